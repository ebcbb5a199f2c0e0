"""What workers do and serve, and what waits in queues, at one moment."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import redis
from celery import Celery
from celery.app.control import flatten_reply
from kombu.transport import redis as kombu_redis

from batchery.cli.console import broker_errors
from batchery.gateway_settings import JOBS_QUEUE
from batchery.protocol.commands import FIGURES
from batchery.protocol.figures import WorkerFigures, read_figures
from batchery.queue_limits import Waiting, find_destination, look_into
from batchery.settings import LOWEST_PRIORITY
from batchery.shards import Shard, list_shards, shard_of
from batchery.task import BatchTask
from batchery.transport.dead_letters import DeadLetters, find_queue
from batchery.transport.live_workers import LiveWorkers, RegisteredWorker
from batchery.transport.redis_schema import Keys, later_sets, transport_scripts

#: How long workers are awaited that live, in seconds; it ends when all have answered. Busy ones, on
#: a busy machine, answer late.
PATIENCE_S = 15.0

#: How long all others are awaited, in seconds: nobody knows how many there are.
DISCOVERY_S = 1.0

#: Maximum number of tasks that a message names.
MAX_NAMED = 8


class RedisMemory(NamedTuple):
    """How full a Redis is."""

    #: What its data take; its `maxmemory`, or 0; and how many keys it has evicted since its start.
    used_bytes: int
    max_bytes: int
    evicted_keys: int


@dataclass(frozen=True)
class Survey:
    """The answers of one moment.

    Attributes:
        workers: Answers by worker, as from `celery inspect batchery`; `{"error": why}` from a
            worker that runs no batches, or lives and does not answer.
        queues: Messages that wait, by name of each queue that a worker consumes, or that was asked
            for: those that no worker holds, and those of dead workers.
        dead_letters: Number of dead letters; None if the broker is not a Redis.
        oldest_s: For how long the oldest of these messages has waited, in seconds, by queue; None
            where it does not say when it was sent, and where no message waits.
        leased: Messages that live workers hold, by queue; none where the broker is not a Redis.
        scheduled: How many messages wait for their time, beside their queues; None if the broker is
            not a Redis.
        memory: That of the Redis, or of the fullest one; None if there is none, or it keeps `INFO`
            from this user.
        is_asked: Whether workers were asked for their figures.
        unserved: Queues with jobs that no worker consumes, as far as workers say what they do.
    """

    workers: Mapping[str, Mapping[str, Any]]
    queues: Mapping[str, int]
    dead_letters: int | None = None
    oldest_s: Mapping[str, float | None] = field(default_factory=dict)
    leased: Mapping[str, int] = field(default_factory=dict)
    scheduled: int | None = None
    memory: RedisMemory | None = None
    is_asked: bool = True
    unserved: Collection[str] = ()

    @cached_property
    def figures(self) -> Mapping[str, WorkerFigures]:
        """Those of each worker with devices, sorted by name."""
        read = {name: read_figures(answer) for name, answer in sorted(self.workers.items())}
        return {name: figures for name, figures in read.items() if figures is not None}

    def find_oldest_s(self, queue: str) -> float | None:
        """Age of the oldest job of a queue, in Redis or in a worker; None if it is unknown."""
        held = [figures.waiting_by_queue.get(queue) for figures in self.figures.values()]
        ages_s = [self.oldest_s.get(queue), *(each.oldest_s for each in held if each is not None)]
        none_s = None if self.queues.get(queue) else 0.0
        return max((each for each in ages_s if each is not None), default=none_s)

    def problems(self, before: "Survey | None" = None) -> dict[str, str]:
        """Why there are no figures of a worker, by its name: first of those that answered."""
        gone = sorted(set(before.workers) - set(self.workers)) if before is not None else []
        return {
            name: str(answer.get("error", "answers with something else"))
            for name, answer in sorted(self.workers.items())
            if name not in self.figures
        } | dict.fromkeys(gone, "no answer")

    def since(self, worker: str, before: "Survey | None") -> WorkerFigures | None:
        """The figures of a worker since the survey before, by the worker's own clock.

        Returns:
            None if it was not in both surveys, or was restarted between them.
        """
        now = self.figures.get(worker)
        if now is None or before is None:
            return None
        return now.since(before.figures.get(worker))

    def report(self) -> dict[str, Any]:
        """The survey for JSON."""
        return {
            "workers": dict(sorted(self.workers.items())),
            "queues": {**self.queues},
            "unserved": sorted(self.unserved),
            "dead_letters": self.dead_letters,
            "oldest_s": {**self.oldest_s},
        }


def survey(
    app: Celery,
    timeout_s: float = PATIENCE_S,
    queues: Collection[str] = (),
    *,
    asks: bool = True,
) -> Survey:
    """Asks the workers that live, by what Redis knows, then all places of jobs.

    Any other worker would log an error each time that it is asked. Other brokers than Redis know no
    workers; there, all are asked for their tasks first.

    Args:
        app: The app whose broker is asked.
        timeout_s: How long workers are awaited, in seconds; it ends when all have answered.
        queues: Names of queues that are looked into, whether a worker consumes them or not.
        asks: Whether workers are asked at all.
    """
    with broker_errors(), open_places(app) as places:
        by_place = [_read_registered(place) for place in places]
        registered = _join(by_place)
        names = find_workers(app, registered) if asks else set[str]()
        answers = ask_workers(app, FIGURES, timeout_s, names)
        silent = {"error": f"lives, and has not answered within {timeout_s:g} s"}
        workers = {name: answers.get(name, silent) for name in names}
        live = [each for each in registered.values() if not each.is_dead]
        consumed = {*chain.from_iterable(each.queues or () for each in live)}
        consumed.update(*(each.get("queues", ()) for each in answers.values()))
        known = {*queues, *chain.from_iterable(each.queues or () for each in registered.values())}
        # Leases first: what goes back meanwhile is counted twice for a moment, never overlooked.
        orphaned = dict[str, Waiting]()
        for place, found in zip(places, by_place, strict=True):
            _add_orphaned(orphaned, place, found)
        waiting = {
            name: _look_into(app, places, name).add(orphaned.get(name, Waiting(0)))
            for name in sorted(known | consumed | set(orphaned))
        }
        servers = [place for place in places if place.client is not None]
        leased = dict.fromkeys(waiting, 0) if servers else {}
        for worker in live:
            for queue, count in worker.leased.items():
                leased[queue] = leased.get(queue, 0) + count
        return Survey(
            workers,
            {name: each.jobs for name, each in waiting.items()},
            sum(len(DeadLetters(*place[1:])) for place in servers) if servers else None,
            {name: each.oldest_s for name, each in waiting.items()},
            leased,
            sum(_count_later(place, waiting) for place in servers) if servers else None,
            _find_memory(servers),
            is_asked=asks,
            unserved={name for name, each in waiting.items() if each.jobs} - consumed,
        )


# Workers


def registered_workers(app: Celery) -> Mapping[str, RegisteredWorker]:
    """The workers with leases, by id, the dead among them; none if the broker is not a Redis."""
    with open_places(app) as places:
        return _join(map(_read_registered, places))


def find_workers(app: Celery, registered: Mapping[str, RegisteredWorker]) -> set[str]:
    """Names of the workers that may have devices: not the dead, and not those beside gateways.

    Args:
        app: Its workers are asked for their tasks where Redis does not know all names: the broker
            may be no Redis, or a worker has just begun.
        registered: By id.
    """
    live = [
        each for each in registered.values() if not each.is_dead and each.queues != {JOBS_QUEUE}
    ]
    names = {each.name for each in live if each.name is not None}
    driver = list_shards(app)[0].connect(app).transport.driver_type
    if driver != "redis" or any(each.name is None for each in live):
        batch = {name for name, task in app.tasks.items() if isinstance(task, BatchTask)}
        found = registered_tasks(app, DISCOVERY_S)
        names |= {name for name, tasks in found.items() if not batch.isdisjoint(tasks)}
    return names


def ask_workers(
    app: Celery, command: str, timeout_s: float, names: Collection[str], **arguments: Any
) -> dict[str, Any]:
    """Sends a command of remote control to workers; returns their answers, once all are there."""
    if not names:
        return {}
    replies = app.control.broadcast(
        command, arguments=arguments, destination=sorted(names), reply=True, timeout=timeout_s
    )
    return flatten_reply(replies or [])


def registered_tasks(
    app: Celery,
    timeout_s: float,
    limit: int | None = None,
    names: Collection[str] | None = None,
) -> Mapping[str, Collection[str]]:
    """Asks workers for the names of their tasks, without Celery's own.

    Args:
        app: The app whose broker is asked.
        timeout_s: How long answers are collected, in seconds.
        limit: Number of answers that are enough; None for all workers'.
        names: Of the workers; None for all.
    """
    replies = app.control.broadcast(
        "registered",
        destination=None if names is None else sorted(names),
        reply=True,
        timeout=timeout_s,
        limit=limit,
    )
    answers = flatten_reply(replies or [])
    return {worker: tasks for worker, tasks in answers.items() if isinstance(tasks, list)}


def consumed_queues(app: Celery) -> dict[str, set[str]]:
    """Names of the queues that each worker consumes, of those that answer soon; any worker may."""
    answers = app.control.inspect(timeout=DISCOVERY_S).active_queues() or {}
    return {worker: {each["name"] for each in queues} for worker, queues in answers.items()}


def name_tasks(name: str, names: Iterable[str]) -> str:
    """Says which tasks there are, those with a similar name first, for an error's text."""
    there = sorted(set(names))
    if not there:
        return "there are none"
    near = difflib.get_close_matches(name, there, n=1)
    question = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(there) - MAX_NAMED} more" if len(there) > MAX_NAMED else ""
    known = ", ".join(there[:MAX_NAMED])
    return f"{question}there are {known}{more} (see `celery inspect registered`)"


# The broker


def app_queues(app: Celery) -> set[str]:
    """The queues that an app has or sends its tasks to; they may have no worker."""
    names = set(app.amqp.queues)
    for task in app.tasks:
        # A router is the app's own code, and a queue may be one that it does not allow.
        with suppress(Exception):
            if not task.startswith("celery."):
                names.add(find_destination(app, task, {}).queue)
    return names


def queue_depths(app: Celery, names: set[str]) -> dict[str, int]:
    """How many messages wait in each queue, sorted by name; none of them is looked at.

    So a producer may do it, who may read no message.

    Raises:
        redis.RedisError: Redis does not answer, or refuses this user.
    """
    with open_places(app) as places:
        return {
            name: sum(_count_messages(each[0], name) for each in choose_places(app, places, name))
            for name in sorted(names)
        }


class Place(NamedTuple):
    """A place of jobs: a shard, or the app's broker."""

    #: Of kombu.
    connection: Any
    #: That shares it; None if it is no Redis.
    client: Any
    #: Kombu's key prefix.
    prefix: str


@contextmanager
def open_places(app: Celery) -> Iterator[Sequence[Place]]:
    """All places of an app's jobs: its shards in order, then its broker if that is none of them.

    Raises:
        OperationalError: One does not answer; kombu's error.
    """
    places = []
    with ExitStack() as stack:
        for shard in dict.fromkeys((*list_shards(app), Shard())):
            connection = stack.enter_context(shard.connect(app))
            channel: Any = connection.default_channel
            is_redis = isinstance(channel, kombu_redis.Channel)
            client = redis.Redis(connection_pool=channel.pool) if is_redis else None
            places.append(Place(connection, client, channel.global_keyprefix if is_redis else ""))
        yield places


def choose_places(app: Celery, places: Sequence[Place], queue: str) -> Sequence[Place]:
    """Those where messages of a queue may be: its shard, and the broker, which is the last."""
    return [places[number] for number in {shard_of(app, queue).number, len(places) - 1}]


def _read_registered(place: Place) -> Mapping[str, RegisteredWorker]:
    return {} if place.client is None else LiveWorkers(place.client, place.prefix).registered()


def _join(by_place: Iterable[Mapping[str, RegisteredWorker]]) -> Mapping[str, RegisteredWorker]:
    return dict(chain.from_iterable(each.items() for each in by_place))


def _find_memory(servers: Sequence[Place]) -> RedisMemory | None:
    """The memory of the fullest one."""
    found = [each for each in map(_read_memory, servers) if each is not None]
    return max(found, key=lambda each: each.used_bytes / (each.max_bytes or inf), default=None)


def _read_memory(place: Place) -> RedisMemory | None:
    try:
        info = {**place.client.info("memory"), **place.client.info("stats")}
    except redis.ResponseError:
        return None
    return RedisMemory(info["used_memory"], info["maxmemory"], info["evicted_keys"])


def _add_orphaned(
    found: dict[str, Waiting], place: Place, registered: Mapping[str, RegisteredWorker]
) -> None:
    """Adds what dead workers hold, by queue: it waits until a worker that lives gives it back.

    Of a worker that holds much only a sample is read. So shares of its queues are estimates, and
    there may be older jobs.
    """
    for worker, known in registered.items():
        if not known.is_dead:
            continue
        # One after the other: no command may have Redis for long.
        key = [Keys(place.prefix).lease(worker)]
        held, *lists = transport_scripts(place.client).run("count_leased", key)
        rows = zip(lists[::3], lists[1::3], lists[2::3], strict=True)
        parts = [(find_queue(key.decode(), place.prefix), n, sent_at) for key, n, sent_at in rows]
        read = sum(n for _, n, _ in parts)
        for queue, n, sent_at in parts:
            waiting = Waiting.read(round(held * n / read), sent_at)
            found[queue] = found.get(queue, Waiting(0)).add(waiting)


def _count_later(place: Place, queues: Iterable[str]) -> int:
    """How many messages wait beside some queues for their time."""
    with place.client.pipeline(transaction=False) as pipe:
        for queue in queues:
            for name in later_sets(queue):
                pipe.zcard(f"{place.prefix}{name}")
        return sum(pipe.execute())


def _look_into(app: Celery, places: Sequence[Place], name: str) -> Waiting:
    """What waits in a queue, without what a worker holds; elsewhere than in Redis, how much."""
    waiting = Waiting(0)
    for connection, *_ in choose_places(app, places, name):
        found = look_into(connection.default_channel, name, range(LOWEST_PRIORITY + 1))
        waiting = waiting.add(found or Waiting(_count_messages(connection, name)))
    return waiting


def _count_messages(connection: Any, name: str) -> int:
    channel: Any = connection.channel()
    try:
        with channel:
            # Declared passively, it is not created; every broker answers with its length.
            return int(channel.queue_declare(queue=name, passive=True).message_count)
    except connection.channel_errors as error:
        # Kombu counts what Redis refuses among them, and that is no empty queue.
        if isinstance(error, redis.RedisError):
            raise
        return 0

"""What workers do and serve, and what waits in queues, at one moment."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
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
    """How full the broker's Redis is."""

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
        memory: That of the broker; None if it is not a Redis, or keeps `INFO` from this user.
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
    """Asks the workers that live, by what Redis knows, then the broker.

    Any other worker would log an error each time that it is asked. Other brokers than Redis know no
    workers; there, all are asked for their tasks first.

    Args:
        app: The app whose broker is asked.
        timeout_s: How long workers are awaited, in seconds; it ends when all have answered.
        queues: Names of queues that are looked into, whether a worker consumes them or not.
        asks: Whether workers are asked at all.
    """
    with broker_errors(), open_redis(app) as (connection, client):
        registered = _read_registered(connection, client)
        names = find_workers(app, registered) if asks else set[str]()
        answers = ask_workers(app, FIGURES, timeout_s, names)
        silent = {"error": f"lives, and has not answered within {timeout_s:g} s"}
        workers = {name: answers.get(name, silent) for name in names}
        live = [each for each in registered.values() if not each.is_dead]
        consumed = {*chain.from_iterable(each.queues or () for each in live)}
        consumed.update(*(each.get("queues", ()) for each in answers.values()))
        known = {*queues, *chain.from_iterable(each.queues or () for each in registered.values())}
        # Leases first: what goes back meanwhile is counted twice for a moment, never overlooked.
        orphaned = _find_orphaned(connection, client, registered)
        waiting = {
            name: _look_into(connection, name).add(orphaned.get(name, Waiting(0)))
            for name in sorted(known | consumed | set(orphaned))
        }
        leased = dict.fromkeys(waiting, 0) if client is not None else {}
        for worker in live:
            for queue, count in worker.leased.items():
                leased[queue] = leased.get(queue, 0) + count
        letters = DeadLetters.of(connection)
        return Survey(
            workers,
            {name: each.jobs for name, each in waiting.items()},
            None if letters is None else len(letters),
            {name: each.oldest_s for name, each in waiting.items()},
            leased,
            None if client is None else _count_later(connection, client, waiting),
            None if client is None else _read_memory(client),
            is_asked=asks,
            unserved={name for name, each in waiting.items() if each.jobs} - consumed,
        )


# Workers


def registered_workers(app: Celery) -> Mapping[str, RegisteredWorker]:
    """The workers with leases, by id, the dead among them; none if the broker is not a Redis."""
    with open_redis(app) as opened:
        return _read_registered(*opened)


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
    if len(names) < len(live) or app.connection_for_read().transport.driver_type != "redis":
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
    with app.connection_for_read() as connection:
        return {name: _count_messages(connection, name) for name in sorted(names)}


@contextmanager
def open_redis(app: Celery) -> Iterator[tuple[Any, Any]]:
    """A connection to the app's broker, and a client that shares it; that is None if no Redis."""
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        is_redis = isinstance(channel, kombu_redis.Channel)
        yield connection, redis.Redis(connection_pool=channel.pool) if is_redis else None


def _read_registered(connection: Any, client: Any) -> Mapping[str, RegisteredWorker]:
    if client is None:
        return {}
    return LiveWorkers(client, connection.default_channel.global_keyprefix).registered()


def _read_memory(client: Any) -> RedisMemory | None:
    try:
        info = {**client.info("memory"), **client.info("stats")}
    except redis.ResponseError:
        return None
    return RedisMemory(info["used_memory"], info["maxmemory"], info["evicted_keys"])


def _find_orphaned(
    connection: Any, client: Any, registered: Mapping[str, RegisteredWorker]
) -> dict[str, Waiting]:
    """What dead workers hold, by queue: it waits until a worker that lives gives it back.

    Of a worker that holds much only a sample is read. So shares of its queues are estimates, and
    there may be older jobs.
    """
    found: dict[str, Waiting] = {}
    for worker, known in registered.items():
        if not known.is_dead:
            continue
        prefix = connection.default_channel.global_keyprefix
        # One after the other: no command may have Redis for long.
        key = [Keys(prefix).lease(worker)]
        held, *lists = transport_scripts(client).run("count_leased", key)
        rows = zip(lists[::3], lists[1::3], lists[2::3], strict=True)
        parts = [(find_queue(key.decode(), prefix), n, sent_at) for key, n, sent_at in rows]
        read = sum(n for _, n, _ in parts)
        for queue, n, sent_at in parts:
            waiting = Waiting.read(round(held * n / read), sent_at)
            found[queue] = found.get(queue, Waiting(0)).add(waiting)
    return found


def _count_later(connection: Any, client: Any, queues: Iterable[str]) -> int:
    """How many messages wait beside some queues for their time."""
    prefix = connection.default_channel.global_keyprefix
    with client.pipeline(transaction=False) as pipe:
        for queue in queues:
            for name in later_sets(queue):
                pipe.zcard(f"{prefix}{name}")
        return sum(pipe.execute())


def _look_into(connection: Any, name: str) -> Waiting:
    """What waits in a queue, without what a worker holds; elsewhere than in Redis, how much."""
    found = look_into(connection.default_channel, name, range(LOWEST_PRIORITY + 1))
    return Waiting(_count_messages(connection, name)) if found is None else found


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

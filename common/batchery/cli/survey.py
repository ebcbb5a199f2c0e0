"""What workers say: their tasks, and their figures at one moment; and what waits in queues."""

import difflib
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import redis
from celery import Celery
from celery.app.control import flatten_reply
from kombu.transport import redis as kombu_redis

from batchery.cli.console import broker_errors
from batchery.gateway_settings import JOBS_QUEUE
from batchery.protocol.figures import FIGURES, WorkerFigures, read_figures
from batchery.queue_limits import Waiting, find_destination, look_into
from batchery.settings import LOWEST_PRIORITY
from batchery.transport.dead_letters import DeadLetters, find_queue
from batchery.transport.live_workers import LiveWorkers, RegisteredWorker
from batchery.transport.redis_schema import Keys, transport_scripts

#: How long workers that were found are asked alone, in seconds; then all are looked through again.
DISCOVERY_S = 5.0

NOT_INSTALLED = "has batch tasks and runs them one by one: call batchery.install(app) in its code"

#: Figures whose growth per second two surveys give.
RATES = ("jobs", "items", "batches", "failed_jobs")

#: A task in the answer to `celery inspect registered FIELD ...`: `name [field=value field=value]`.
ANSWER = re.compile(r"(?P<name>\S+)(?: \[(?P<fields>.*)\])?")

#: Where one of its fields ends and the next one begins.
NEXT_FIELD = re.compile(r" (?=\w+=)")

#: Maximum number of tasks that a message names.
MAX_NAMED = 8

#: Attributes of a task, by task, by worker.
Registered = Mapping[str, Mapping[str, Mapping[str, str]]]


@dataclass(frozen=True)
class RedisMemory:
    """How full the broker's Redis is.

    Attributes:
        used_bytes: What its data take.
        max_bytes: Its `maxmemory`; 0 for no limit.
        evicted_keys: How many keys it has thrown away to make room, since it started.
    """

    used_bytes: int
    max_bytes: int
    evicted_keys: int


@dataclass(frozen=True)
class Survey:
    """The answers of one moment.

    Attributes:
        workers: Answers by worker, as from `celery inspect batchery`; `{"error": why}` from a
            worker that runs no batches.
        queues: Messages that wait, by name of each queue that a worker consumes, or that was asked
            for: those that no worker holds, and those of dead workers.
        dead_letters: Number of dead letters; None if the broker is not a Redis.
        oldest_s: For how long the oldest of these messages has waited, in seconds, by queue; None
            where it does not say when it was sent, and where no message waits.
        leased: Messages that live workers hold, by queue; none where the broker is not a Redis.
        scheduled: How many of them wait for their time; None if the broker is not a Redis.
        memory: That of the broker; None if it is not a Redis, or keeps `INFO` from this user.
        orphaned: How many of the messages that wait are in the leases of dead workers, by queue.
        is_asked: Whether workers were asked for their figures.
        undated: Ids of the jobs next in turn that do not say when they were sent, by queue.
        strays: Jobs in queues that nobody knows, by queue; none where they were not looked for.
    """

    workers: Mapping[str, Mapping[str, Any]]
    queues: Mapping[str, int]
    dead_letters: int | None = None
    oldest_s: Mapping[str, float | None] = field(default_factory=dict)
    leased: Mapping[str, int] = field(default_factory=dict)
    scheduled: int | None = None
    memory: RedisMemory | None = None
    orphaned: Mapping[str, int] = field(default_factory=dict)
    is_asked: bool = True
    undated: Mapping[str, Sequence[bytes]] = field(default_factory=dict)
    strays: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def figures(self) -> Mapping[str, WorkerFigures]:
        """Those of each worker with devices, sorted by name."""
        read = {name: read_figures(answer) for name, answer in sorted(self.workers.items())}
        return {name: figures for name, figures in read.items() if figures is not None}

    def problems(self, before: "Survey | None") -> dict[str, str]:
        """Why there are no figures of a worker, by its name: first of those that answered."""
        silent = sorted(set(before.workers) - set(self.workers)) if before is not None else []
        return {
            name: str(answer.get("error", "answers with something else"))
            for name, answer in sorted(self.workers.items())
            if name not in self.figures
        } | dict.fromkeys(silent, "no answer")

    def since(self, worker: str, before: "Survey | None") -> WorkerFigures | None:
        """The figures of a worker since the survey before, by the worker's own clock.

        Returns:
            None if it was not in both surveys, or was restarted between them.
        """
        now = self.figures.get(worker)
        if now is None or before is None:
            return None
        return now.since(before.figures.get(worker))

    def rates(self, worker: str, before: "Survey | None") -> dict[str, float] | None:
        """Jobs, items, batches and failed jobs per second, as `jobs_per_s` and so on.

        Returns:
            None where `since` has none.
        """
        gained = self.since(worker, before)
        if gained is None:
            return None
        counts = {name: getattr(gained.batches, name) for name in RATES}
        return {f"{name}_per_s": round(n / gained.clock_s, 3) for name, n in counts.items()}

    def report(self, before: "Survey | None" = None) -> dict[str, Any]:
        """The survey for JSON: `workers`, each with its `rates`; the other attributes as such."""
        workers = {
            name: {**figures, "rates": self.rates(name, before)}
            if name in self.figures
            else figures
            for name, figures in sorted(self.workers.items())
        }
        return {
            "workers": workers,
            "queues": {**self.queues},
            "dead_letters": self.dead_letters,
            "oldest_s": {**self.oldest_s},
        }


class FirstSeen:
    """For how long jobs have waited that do not say when they were sent, as of plain clients. Pure.

    It remembers when such a job was first seen next in turn in its queue.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By queue and id; only of the jobs of the last survey.
        self._seen_s: dict[tuple[str, bytes], float] = {}

    def date(self, survey: Survey) -> Survey:
        """The survey with the ages of these jobs, which may be older: they had other turns before.

        Args:
            survey: Later than the one before.
        """
        now_s = self._clock()
        heads = [(queue, id_) for queue, ids in survey.undated.items() for id_ in ids]
        self._seen_s = {head: self._seen_s.get(head, now_s) for head in heads}
        oldest_s = {**survey.oldest_s}
        for (queue, _), seen_s in self._seen_s.items():
            oldest_s[queue] = max(oldest_s.get(queue) or 0.0, now_s - seen_s)
        return replace(survey, oldest_s=oldest_s)


class WorkerDirectory:
    """The workers on a broker that have batch tasks; only these know the command.

    Any other worker would log an error each time that it is asked.
    """

    def __init__(self, app: Celery, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        self._found_s: float | None = None
        self._installed: Mapping[str, bool] = {}

    def ask(self, timeout_s: float, command: str = FIGURES, **arguments: Any) -> dict[str, Any]:
        """The answers of each of them, by name; after `DISCOVERY_S` it first looks for others.

        Looking for others takes the full time, as nobody knows how many there are.

        Args:
            timeout_s: How long answers are collected, in seconds.
            command: What they are asked; by default, for their figures.
            arguments: Of the command.
        """
        if self._found_s is None or self._clock() - self._found_s >= DISCOVERY_S:
            self._installed = find_installed(self._app, timeout_s)
            self._found_s = self._clock()
        installed = [name for name, is_installed in self._installed.items() if is_installed]
        found = {
            name: {"error": NOT_INSTALLED} for name in self._installed if name not in installed
        }
        return found | (
            ask_workers(self._app, command, timeout_s, installed, **arguments) if installed else {}
        )


def ask_workers(
    app: Celery, command: str, timeout_s: float, names: list[str] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Sends a command of remote control to workers, to all without names; returns their answers."""
    replies = app.control.broadcast(
        command, arguments=arguments, destination=names, reply=True, timeout=timeout_s
    )
    return flatten_reply(replies or [])


def registered_tasks(
    app: Celery, fields: Iterable[str], timeout_s: float, limit: int | None = None
) -> Registered:
    """Asks workers for their tasks, without Celery's own.

    Args:
        app: The app whose broker is asked.
        fields: Attributes of tasks; an answer has those that are not None, as text.
        timeout_s: How long answers are collected, in seconds.
        limit: Number of answers that are enough; None for all workers'.
    """
    arguments = {"taskinfoitems": list(fields)}
    replies = app.control.broadcast(
        "registered", arguments=arguments, reply=True, timeout=timeout_s, limit=limit
    )
    return parse_registered(flatten_reply(replies or []))


def parse_registered(answers: Mapping[str, Any]) -> Registered:
    """Reads each worker's answer; one that is no list of tasks is left out."""
    return {
        worker: dict(map(_parse, tasks))
        for worker, tasks in sorted(answers.items())
        if isinstance(tasks, list)
    }


def _parse(task: str) -> tuple[str, Mapping[str, str]]:
    found = ANSWER.fullmatch(task)
    if found is None:
        return task, {}
    pairs = [field.partition("=") for field in NEXT_FIELD.split(found["fields"] or "") if field]
    return found["name"], {name: value for name, _, value in pairs}


def aliases_in(info: Mapping[str, str]) -> list[str]:
    """The aliases of a model, which its worker spells in one text."""
    return [alias for alias in info.get("model_aliases", "").split(",") if alias]


def name_tasks(name: str, names: Iterable[str]) -> str:
    """Says which tasks there are, those with a similar name first, for an error's text."""
    there = sorted(set(names))
    if not there:
        return "there are none"
    near = difflib.get_close_matches(name, there, n=1)
    question = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(there) - MAX_NAMED} more" if len(there) > MAX_NAMED else ""
    return f"{question}there are {', '.join(there[:MAX_NAMED])}{more} (see `batchery models`)"


def find_installed(app: Celery, timeout_s: float) -> dict[str, bool]:
    """Asks all workers; of each that has batch tasks, whether `install` was called."""
    answers = ask_workers(app, "registered", timeout_s, taskinfoitems=["is_installed"])
    installed = {
        worker: [task["is_installed"] for task in tasks.values() if "is_installed" in task]
        for worker, tasks in parse_registered(answers).items()
    }
    return {worker: "True" in found for worker, found in installed.items() if found}


def survey(
    directory: WorkerDirectory, app: Celery, timeout_s: float, queues: Collection[str] = ()
) -> Survey:
    """Asks the workers, then the broker.

    Args:
        directory: The workers; kept from one survey to the next.
        app: The app whose broker is asked.
        timeout_s: How long answers are collected, in seconds.
        queues: Names of queues that are looked into, whether a worker consumes them or not.
    """
    with broker_errors():
        workers = directory.ask(timeout_s)
        names = {name for figures in workers.values() for name in figures.get("queues", ())}
        return _look_at_broker(app, workers, {*names, *queues}, registered_workers(app))


def survey_registered(
    app: Celery, timeout_s: float, queues: Collection[str] = (), *, asks: bool = True
) -> Survey:
    """As `survey`, but asks only workers that are registered in Redis: where none is, none is.

    Args:
        app: The app whose broker is asked.
        timeout_s: How long answers are collected, in seconds.
        queues: Names of queues that are looked into, whether a worker consumes them or not.
        asks: Whether workers are asked at all.
    """
    with broker_errors():
        registered = registered_workers(app)
        names = sorted(name_live_workers(registered))
        workers = ask_workers(app, FIGURES, timeout_s, names) if names and asks else {}
        consumed = {queue for each in registered.values() for queue in each.queues or ()}
        found = _look_at_broker(app, workers, {*consumed, *queues}, registered)
        return replace(found, is_asked=asks)


def _look_at_broker(
    app: Celery,
    workers: Mapping[str, Any],
    queues: set[str],
    registered: Mapping[str, RegisteredWorker],
) -> Survey:
    # Leases first: what goes back meanwhile is counted twice for a moment, and never overlooked.
    orphaned = find_orphaned(app, registered)
    waiting = {
        name: each.add(orphaned.get(name, Waiting(0)))
        for name, each in waiting_in(app, queues | set(orphaned)).items()
    }
    letters = dead_letters(app)
    leased = dict.fromkeys(waiting, 0) if letters is not None else {}
    live = [each for each in registered.values() if not each.is_dead]
    for each in live:
        for queue, count in each.leased.items():
            leased[queue] = leased.get(queue, 0) + count
    return Survey(
        workers,
        {name: each.jobs for name, each in waiting.items()},
        letters,
        {name: each.oldest_s for name, each in waiting.items()},
        leased,
        None if letters is None else sum(each.scheduled for each in live),
        read_memory(app),
        {name: each.jobs for name, each in orphaned.items()},
        undated={name: each.undated for name, each in waiting.items()},
    )


def read_memory(app: Celery) -> RedisMemory | None:
    """How full the broker is; None if it is not a Redis, or keeps `INFO` from this user.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        if not isinstance(channel, kombu_redis.Channel):
            return None
        with redis.Redis(connection_pool=channel.pool).pipeline(transaction=False) as pipe:
            try:
                pipe.info("memory")
                pipe.info("stats")
                memory, stats = pipe.execute()
            except redis.ResponseError:
                return None
    return RedisMemory(memory["used_memory"], memory["maxmemory"], stats["evicted_keys"])


def registered_workers(app: Celery) -> Mapping[str, RegisteredWorker]:
    """The workers with leases, by id, the dead among them; none if the broker is not a Redis."""
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        if not isinstance(channel, kombu_redis.Channel):
            return {}
        client = redis.Redis(connection_pool=channel.pool)
        return LiveWorkers(client, channel.global_keyprefix).registered()


def name_live_workers(registered: Mapping[str, RegisteredWorker]) -> set[str]:
    """Names of the workers that may answer: not the dead, and not those beside gateways.

    Args:
        registered: By id.
    """
    return {
        each.name
        for each in registered.values()
        if each.name is not None and not each.is_dead and each.queues != {JOBS_QUEUE}
    }


def find_orphaned(app: Celery, registered: Mapping[str, RegisteredWorker]) -> dict[str, Waiting]:
    """What dead workers hold, by queue: it waits until a worker that lives gives it back.

    Of a worker that holds much only a sample is read. So shares of its queues are estimates, and
    there may be older jobs. If all are too large to read, its last heartbeat says whose they are.
    """
    dead = [worker for worker, each in registered.items() if each.is_dead]
    found: dict[str, Waiting] = {}
    if not dead:
        return found
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        client, prefix = redis.Redis(connection_pool=channel.pool), channel.global_keyprefix
        calls = [([Keys(prefix).lease(worker)], ()) for worker in dead]
        # One after the other: no command may have Redis for long.
        answers = transport_scripts(client).run_many("count_leased", calls)
    for worker, answer in zip(dead, answers, strict=True):
        if isinstance(answer, Exception):
            raise answer
        held, *lists = answer
        rows = list(zip(lists[::3], lists[1::3], lists[2::3], strict=True))
        parts = [(find_queue(key.decode(), prefix), n, sent_at) for key, n, sent_at in rows]
        if held and not parts:
            parts = [(name, n, b"") for name, n in registered[worker].leased.items() if n > 0]
        read = sum(n for _, n, _ in parts)
        for queue, n, sent_at in parts:
            waiting = Waiting.read(round(held * n / read), sent_at)
            found[queue] = found.get(queue, Waiting(0)).add(waiting)
    return found


def app_queues(app: Celery) -> set[str]:
    """The queues that an app has or sends its tasks to; they may have no worker."""
    names = set(app.amqp.queues)
    for task in app.tasks:
        # A router is the app's own code, and a queue may be one that it does not allow.
        with suppress(Exception):
            if not task.startswith("celery."):
                names.add(find_destination(app, task, {}).queue)
    return names


def waiting_in(app: Celery, names: set[str]) -> dict[str, Waiting]:
    """What waits in each queue, sorted by name, without what a worker holds.

    Of another broker than Redis it only knows how many messages there are.

    Raises:
        redis.RedisError: Redis does not answer, or refuses this user.
    """
    found: dict[str, Waiting] = {}
    with app.connection_for_read() as connection:
        for name in sorted(names):
            with connection.channel() as channel:
                waiting = look_into(channel, name, range(LOWEST_PRIORITY + 1))
            found[name] = waiting or Waiting(_count_messages(connection, name))
    return found


def queue_depths(app: Celery, names: set[str]) -> dict[str, int]:
    """How many messages wait in each queue, sorted by name; none of them is looked at.

    So a producer may do it, who may read no message.

    Raises:
        redis.RedisError: Redis does not answer, or refuses this user.
    """
    with app.connection_for_read() as connection:
        return {name: _count_messages(connection, name) for name in sorted(names)}


def _count_messages(connection: Any, name: str) -> int:
    channel: Any = connection.channel()
    try:
        with channel:
            if isinstance(channel, kombu_redis.Channel):
                return int(channel._size(name))
            # Declared passively, it is not created; every broker answers with its length.
            return int(channel.queue_declare(queue=name, passive=True).message_count)
    except connection.channel_errors as error:
        # Kombu counts what Redis refuses among them, and that is no empty queue.
        if isinstance(error, redis.RedisError):
            raise
        return 0


def dead_letters(app: Celery) -> int | None:
    """The number of dead letters; None if the broker is not a Redis."""
    with app.connection_for_read() as connection:
        letters = DeadLetters.of(connection)
        return None if letters is None else len(letters)

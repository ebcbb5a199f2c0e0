"""Limits of priority classes: how many jobs of one may wait in a queue.

They are kept where jobs are sent: a job that finds its class full is refused before it costs
anything. What was accepted is never given up.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import redis
from celery import Celery
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis

from batchery.errors import BrokerRefused, QueueFull
from batchery.settings import LOWEST_PRIORITY, PriorityClass
from batchery.transport.redis_schema import Keys, lists_of, transport_scripts

#: Limits of `retry_after_s`, in seconds: a worker takes a few milliseconds for a batch, and a
#: caller should not stay away for longer than a queue may take to recover.
MIN_RETRY_AFTER_S = 0.01
MAX_RETRY_AFTER_S = 60.0

#: `retry_after_s` where nothing says how long jobs wait, in seconds.
UNKNOWN_WAIT_S = 1.0


class Waiting(NamedTuple):
    """The jobs of one class that wait in a queue."""

    jobs: int
    #: How long the oldest has waited, in seconds; None if there is none, or it does not say.
    oldest_s: float | None = None

    @classmethod
    def read(cls, jobs: int, sent_at: bytes) -> "Waiting":
        """As a script reports them; `sent_at` is empty if the oldest does not say."""
        oldest_s = max(0.0, time.time() - float(sent_at)) if sent_at else None
        return cls(int(jobs), oldest_s)

    def add(self, other: "Waiting") -> "Waiting":
        """Both together."""
        ages_s = [each.oldest_s for each in (self, other) if each.oldest_s is not None]
        return Waiting(self.jobs + other.jobs, max(ages_s, default=None))


class Destination(NamedTuple):
    """Where jobs of a task go."""

    queue: str
    priority: int


class QueueLimits:
    """Whether a class has room, by what waits already. Pure."""

    def __init__(self, classes: Mapping[str, PriorityClass]) -> None:
        """The classes of the settings."""
        #: Highest class first.
        self._classes = sorted(classes.items(), key=lambda each: each[1].level)

    @property
    def exist(self) -> bool:
        """Whether any class has a limit."""
        return any(each.max_waiting is not None for _, each in self._classes)

    def at(self, priority: int) -> PriorityClass:
        """The class of a priority."""
        return self._classes[self._find_place(priority)][1]

    def priorities(self, priority: int) -> range:
        """All priorities of the class of this one."""
        place = self._find_place(priority)
        ends = [each.level for _, each in self._classes[place + 1 : place + 2]]
        return range(self._classes[place][1].level, *(ends or [LOWEST_PRIORITY + 1]))

    def check(self, where: Destination, look: Callable[[str, range], Waiting | None]) -> None:
        """Refuses jobs of a class that is full.

        Args:
            where: Where they should go.
            look: Says what waits in a queue with priorities of a range; None if that is unknown.

        Raises:
            QueueFull: The class is full.
        """
        name, limit = self._classes[self._find_place(where.priority)]
        if limit.max_waiting is None:
            return
        waiting = look(where.queue, self.priorities(where.priority))
        if waiting is None or waiting.jobs < limit.max_waiting:
            return
        # A job that comes now would wait about as long as the oldest one has.
        wait_s = UNKNOWN_WAIT_S if waiting.oldest_s is None else waiting.oldest_s
        after_s = min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
        problem = f"holds {waiting.jobs:,} jobs, and max_waiting is {limit.max_waiting:,}"
        raise queue_full(f"queue {where.queue!r}: class {name!r} {problem}", after_s)

    def _find_place(self, priority: int) -> int:
        return max(n for n, (_, each) in enumerate(self._classes) if each.level <= priority)


def queue_full(problem: str, after_s: float) -> QueueFull:
    """The error of a queue or class without room.

    Args:
        problem: Which one, and how many jobs it holds.
        after_s: When to try again, in seconds from now.
    """
    error = QueueFull(f"{problem}; try again in {after_s:.2g} s, or start more workers")
    error.retry_after_s = after_s
    return error


def find_destination(app: Celery, task: str, options: Mapping[str, Any]) -> Destination:
    """Where Celery would send a job.

    Args:
        app: Its routes and options of the task apply.
        task: Name of the task; it need not be registered.
        options: Of `apply_async`.

    Raises:
        QueueNotFound: Celery's, for a queue that the app does not allow.
    """
    known: Any = app.tasks.get(task)
    own = known._get_exec_options() if known is not None else {}
    given = {name: value for name, value in options.items() if value is not None}
    route = app.amqp.router.route({**own, **given}, task, (), {}, known)
    priority = route.get("priority") or 0
    parent: Any = app.current_worker_task
    if parent is not None and app.conf.task_inherit_parent_priority and "priority" not in given:
        priority = parent.request.delivery_info.get("priority") or 0
    queue = route.get("queue")
    name = queue.name if queue is not None else route.get("routing_key", task)
    return Destination(str(name), max(0, min(int(priority), LOWEST_PRIORITY)))


def look_into(channel: Any, queue: str, priorities: range) -> Waiting | None:
    """What waits in a queue with some priorities; None if the broker is no Redis, or is away."""
    if not isinstance(channel, kombu_redis.Channel):
        return None
    names = Keys(channel.global_keyprefix)
    keys = [names.queue(key) for key in lists_of(channel, queue, priorities)]
    # Not kombu's own client, which adds its key prefix only to a script's first key.
    client = redis.Redis(connection_pool=channel.pool)
    return Waiting.read(*transport_scripts(client).run("count_waiting", keys))


def check_room(
    limits: QueueLimits, where: Destination, acquire: Callable[[str], AbstractContextManager[Any]]
) -> None:
    """Refuses a job of a class that is full; asks Redis.

    Args:
        limits: Of the classes.
        where: Where the job should go.
        acquire: Gives a producer of kombu's for the jobs of a queue.

    Raises:
        QueueFull: As `QueueLimits.check`.
        BrokerRefused: Redis does not allow this user to count the jobs.
    """

    def look(queue: str, priorities: range) -> Waiting | None:
        try:
            with acquire(queue) as producer:
                # A channel that connects by itself tries for `broker_connection_timeout`.
                producer.connection.ensure_connection(max_retries=1, interval_start=0)
                return look_into(producer.channel, queue, priorities)
        except (OperationalError, OSError, redis.ConnectionError, redis.TimeoutError):
            # Sending will find out, and knows how often to try again.
            return None
        except redis.ResponseError as error:
            raise BrokerRefused(
                f"queue {queue!r}: its jobs cannot be counted: {error}; allow EVALSHA, and its keys"
            ) from error

    limits.check(where, look)

"""Publishing: jobs are sent many at a time, without a subscription for each result."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from celery import Celery, uuid
from celery.backends.redis import RedisBackend
from celery.exceptions import QueueNotFound
from celery.result import AsyncResult
from celery.utils.functional import chunks
from kombu.exceptions import EncodeError

from batchery.errors import BatchArgumentError, PublishError, QueueFull, SettingsError
from batchery.installation import get_queue_limits, get_redis_url
from batchery.protocol.headers import sent_now
from batchery.queue_limits import Destination, Waiting, find_destination, look_into, queue_full
from batchery.redis_scripts import cut_into_parts
from batchery.retry import RetryPolicy, pause_s
from batchery.shards import acquire_producer
from batchery.task import check_options
from batchery.transport.dead_letters import check_size
from batchery_producer.broker import BrokerConnection, RecordedCommands, Room
from batchery_producer.template import (
    ITEM,
    OutgoingJob,
    are_alike,
    build_template,
    encode_item,
)

#: When to try again where a queue has no space for a job, in seconds.
RETRY_AFTER_S = 1.0

#: Maximum number of jobs in one script, and the size in bytes above which no job is added to it:
#: Redis serves no other client while a script runs.
CHUNK_JOBS = 1000

PUSH_BYTES = 4 << 20

#: Options of `apply_async` that belong to a single job, or that the publisher sets.
NOT_SHARED = ("args", "kwargs", "task_id", "producer", "connection", "add_to_parent", "retry")

#: Arguments of a `Publisher` besides options of `apply_async`.
OWN_OPTIONS = ("keywords", "broker", "wait_s")


class Publisher:
    """Sends jobs of one task, as the stock Celery messages that `apply_async` would send.

    On Redis, one script pushes each chunk of jobs, and pushes it once, even if its reply is lost.
    With other brokers, a chunk whose reply was lost is sent again under the same task ids: a job
    may then be in the queue twice, but it has one result.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        *,
        keywords: Mapping[str, Any] | None = None,
        wait_s: float | None = None,
        broker: BrokerConnection | None = None,
        **options: Any,
    ) -> None:
        """Determines the queue; connects when the first job is sent.

        Args:
            app: Its broker, routes and options of the task apply.
            task: Name of the task; it need not be registered with the app.
            keywords: Keyword arguments of all jobs.
            wait_s: How long to wait where the class of the jobs is full, from the last job that
                found room, in seconds; None waits for ever.
            broker: A connection shared with others, which says how long it waits for a broker that
                is away; by default, two minutes.
            options: Options of `apply_async` for all jobs: `queue`, `priority`, `expires`,
                `headers`... By default, a task that the app does not know has a queue of the same
                name.

        Raises:
            BatchArgumentError: An option belongs to a single job, or there is no such option.
            SettingsError: The app does not allow this queue, or runs tasks eagerly.
        """
        if app.conf.task_always_eager and task in app.tasks:
            raise SettingsError(f"{task}: task_always_eager is set, so nothing is sent")
        own = sorted(set(NOT_SHARED) & set(options))
        if own:
            raise BatchArgumentError(f"{task}: {', '.join(own)}: not an option of many jobs")
        check_options(f"{task}: Publisher", options, app.tasks.get(task), OWN_OPTIONS)
        self._app = app
        self._task = task
        self._keywords = dict(keywords or {})
        self._options = options = route_unknown(app, task, options)
        self._wait_s = wait_s
        self._where = _destination(app, task, options)
        self._owns_brokers = broker is None
        self._brokers = broker or BrokerConnection(app, RetryPolicy())
        #: That of the queue.
        self._broker = self._brokers.find_for(task, self._where.queue)
        self._limits = get_queue_limits(app)
        #: Number of jobs sent so far.
        self.sent = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def queue(self) -> str:
        """Name of the queue."""
        return self._where.queue

    def close(self) -> None:
        """Closes the connection unless it is shared; the next job opens a new one."""
        if self._owns_brokers:
            self._brokers.close()

    def send(
        self, jobs: Sequence[tuple[str, Any]], headers: Mapping[str, Any] | None = None
    ) -> None:
        """Sends jobs, each a task id and an item, in this order.

        Args:
            jobs: The item of a multi-item job is a list, and its headers say so.
            headers: Headers of these jobs, in addition to those in the options.

        Raises:
            QueueFull: The queue had no space for `wait_s`; the first `sent` jobs are in the queue.
            BrokerRefused: The broker accepts no jobs; the first `sent` jobs are in the queue.
            EncodeError: kombu's, for an item that cannot be serialized; some of the jobs before it
                may have been sent.
            InvalidItem: The same, for one that is larger than a worker reads.
            Interrupted: The caller asked to stop; some of the jobs may have been sent.
            GaveUp: The broker stays away; some of the jobs may have been sent.
        """
        before = self.sent
        headers = {**(self._options.get("headers") or {}), **(headers or {})}
        try:
            for chunk in chunks(map(OutgoingJob._make, jobs), CHUNK_JOBS):
                # Here, as calls with other headers would not share a template.
                own = {**headers, **sent_now()}
                self._send_chunk(chunk, {**self._options, "retry": False, "headers": own})
        except PublishError as error:
            error.sent = self.sent - before
            raise

    def _look(self, queue: str, priorities: range) -> Waiting | None:
        broker = self._broker
        return broker.call(lambda: look_into(broker.channel, queue, priorities), queue)

    def _send_chunk(self, jobs: Sequence[OutgoingJob], options: Mapping[str, Any]) -> None:
        made = self._broker.call(partial(self._make, jobs, options), self.queue)
        if made is None:
            self._broker.call(partial(self._send_by_kombu, jobs, options), self.queue)
            self.sent += len(jobs)
            return
        for key, messages in made.pushed.items():
            self._push(key, messages)
        if made.others:
            self._broker.call(partial(self._broker.run, made.others), self.queue)

    def _make(
        self, jobs: Sequence[OutgoingJob], options: Mapping[str, Any]
    ) -> RecordedCommands | None:
        """What sends the jobs; None if this is not Redis."""
        if not self._broker.is_redis:
            return None
        # A lone job is not worth a template.
        if len(jobs) > 1 and are_alike(self._app, self._task):
            first = OutgoingJob(uuid(), ITEM)
            with self._broker.recording() as made:
                self._send(first, options)
            if len(made.pushed) == 1:
                ((key, (message, *_)),) = made.pushed.items()
                if (template := build_template(self._app, first.id, message)) is not None:
                    made.pushed = {key: template.fill(jobs)}
                    return made
        with self._broker.recording() as made:
            for job in jobs:
                self._send(job, options)
        return made

    def _push(self, key: str, messages: Iterable[str]) -> None:
        for part in cut_into_parts(messages, len, PUSH_BYTES, CHUNK_JOBS):
            check_size(part[-1])  # A message that is too large ends its part.
            waits, found_s = 0, time.monotonic()
            while part:
                try:
                    pushed = self._push_some(key, part)
                except QueueFull:
                    left_s = math.inf
                    if self._wait_s is not None:
                        left_s = found_s + self._wait_s - time.monotonic()
                    if left_s <= 0:
                        raise
                    waits += 1
                    self._broker.retries.sleep(min(pause_s(waits), left_s))
                else:
                    part, waits, found_s = part[pushed:], 0, time.monotonic()

    def _push_some(self, key: str, messages: Sequence[str]) -> int:
        """Pushes the messages for which there is room; returns how many, at least one.

        Raises:
            QueueFull: There is none.
        """
        broker, where, limits = self._broker, self._where, self._limits
        room = Room(where.queue)
        if limits is not None:
            limits.check(where, self._look)
            most = limits.at(where.priority).max_waiting or 0
            room = Room(where.queue, most, limits.priorities(where.priority))
        push = partial(broker.push, broker.next_chunk(), key, messages, room)
        pushed, length = broker.call(push, where.queue)
        self.sent += pushed
        if not pushed:
            what = f"holds {length:,} jobs, and its maximum is {room.max_waiting:,}"
            raise queue_full(f"queue {where.queue!r} {what}", RETRY_AFTER_S)
        return pushed

    def _send_by_kombu(self, jobs: Sequence[OutgoingJob], options: Mapping[str, Any]) -> None:
        """Sends by kombu, to other brokers: in a batch if the transport has them, or one by one."""
        # A retry repeats the whole chunk, so the channel must not change within it.
        with self._broker.producer.batch(max_size=len(jobs)):
            for job in jobs:
                self._send(job, options)

    def _send(self, job: OutgoingJob, options: Mapping[str, Any]) -> None:
        """Sends one job by Celery's own code, without a subscription to its result."""
        app, known = self._app, self._app.tasks.get(self._task)
        options = {
            **options,
            "task_id": job.id,
            "producer": self._broker.producer,
            "add_to_parent": False,
        }
        if isinstance(app.backend, RedisBackend):
            # Celery subscribes to each result unless results are ignored. Workers read only the
            # header, which keeps the caller's choice.
            ignores_result = options.get("ignore_result", getattr(known, "ignore_result", None))
            headers = {**(options.get("headers") or {}), "ignore_result": ignores_result}
            options |= {"ignore_result": True, "headers": headers}
        send: Any = partial(app.send_task, self._task) if known is None else known.apply_async
        try:
            send((job.item,), dict(self._keywords), **options)
        except EncodeError:
            encode_item(job.item)
            raise


def send_one(
    app: Celery, task: str, args: Sequence[Any], keywords: dict[str, Any], **options: Any
) -> AsyncResult[Any]:
    """Sends one job as `apply_async` does, also of a task that the app does not know."""
    known: Any = app.tasks.get(task)
    if known is not None:
        return known.apply_async(args, keywords, **options)  # type: ignore[no-any-return]
    if get_redis_url(app) is None:
        return app.send_task(task, args, keywords, **options)
    with acquire_producer(app, find_destination(app, task, options).queue) as producer:
        return app.send_task(task, args, keywords, producer=producer, **options)


def is_known(app: Celery, task: str) -> bool:
    """Whether the app determines where this task goes."""
    return task in app.tasks or app.amqp.router.lookup_route(task, (), {}, {}) is not None


def route_unknown(app: Celery, task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with a queue for a task that the app does not know."""
    # Celery takes a None as a choice, which would override the task's own queue.
    own = dict(options)
    if own.get("queue") is None:
        own.pop("queue", None)
    return own if "queue" in own or is_known(app, task) else {**own, "queue": task}


def _destination(app: Celery, task: str, options: Mapping[str, Any]) -> Destination:
    try:
        return find_destination(app, task, options)
    except QueueNotFound as error:
        raise SettingsError(
            f"queue {options.get('queue') or task!r}: not among the app's task_queues, and the app"
            " creates no others (task_create_missing_queues); name one of its queues"
        ) from error

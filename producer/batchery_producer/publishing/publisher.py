"""Publishing: how jobs are sent, many at a time and with no subscription for each."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from celery import Celery, uuid
from celery.exceptions import QueueNotFound

from batchery.errors import BatchArgumentError, PublishError, QueueFull, SettingsError
from batchery_producer.publishing.connection import Outlet
from batchery_producer.publishing.redis_push import Command, send_as_celery_does, split
from batchery_producer.publishing.template import ITEM, Job, SentEvents, template_of, why_not
from batchery_producer.retry import Patience

#: Shortest and longest time after which to ask again, in seconds: a worker takes a few milliseconds
#: for a batch, and a caller wants to hear within some seconds that nothing moves.
SHORTEST_S = 0.01

LONGEST_S = 5.0

#: What is answered while nobody knows how fast jobs are taken, in seconds.
UNKNOWN_S = 1.0

#: Most jobs of a script, and most bytes after which no further one is added to it: Redis serves
#: nobody else meanwhile.
CHUNK_JOBS = 1000

PUSH_BYTES = 4 << 20

#: Options of `apply_async` that belong to one job, or that are ours.
NOT_SHARED = ("args", "kwargs", "task_id", "producer", "connection", "add_to_parent", "retry")


class Room:
    """Learns from the queue's lengths how fast jobs are taken."""

    def __init__(self) -> None:
        self._seen: tuple[float, int] | None = None
        self._per_s: float | None = None

    def saw(self, now_s: float, length: int, pushed: int) -> None:
        """Notes how long the queue is.

        Args:
            now_s: When.
            length: Messages in it.
            pushed: How many of them are new since the last time.
        """
        if self._seen is not None:
            then_s, before = self._seen
            taken = before + pushed - length
            if now_s - then_s < SHORTEST_S:
                # Too close to tell: what was pushed counts at the next time.
                self._seen = then_s, before + pushed
                return
            self._per_s = max(taken, 0) / (now_s - then_s)
        self._seen = now_s, length

    def retry_after_s(self, wanted: int) -> float:
        """When there may be room for so many jobs, in seconds."""
        if self._per_s is None:
            return UNKNOWN_S
        if self._per_s == 0:
            return LONGEST_S
        return min(max(wanted / self._per_s, SHORTEST_S), LONGEST_S)


class Publisher:
    """Sends jobs of one task, as the stock Celery messages that `apply_async` would send.

    On Redis each chunk of jobs is pushed by one script, and only once, even if the answer to it is
    lost. With other brokers a chunk whose answer was lost is sent again under the same task ids:
    jobs may then be in the queue twice, and have one result each.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        app: Celery,
        task: str,
        *,
        keywords: Mapping[str, Any] | None = None,
        most_waiting: int = 0,
        wait_s: float | None = None,
        patience: Patience | None = None,
        persistent: bool = False,
        outlet: Outlet | None = None,
        **options: Any,
    ) -> None:
        """Settles where the jobs go; connects when the first one is sent.

        Args:
            app: Its broker, routes and options of the task apply.
            task: Name of the task; it need not be registered with the app.
            keywords: Keyword arguments of all jobs.
            most_waiting: Jobs that the queue may hold, those of others included; 0 is no limit.
                Only on Redis.
            wait_s: How long to wait for room in the queue, in seconds; None waits for ever.
            patience: For a broker that goes away.
            persistent: Whether that patience is also for a broker that refuses jobs.
            outlet: Shared with others; then patience and persistence are its own.
            options: Of `apply_async`, for all jobs: `queue`, `priority`, `expires`, `headers`... A
                task of which the app says nothing has a queue of its name.

        Raises:
            BatchArgumentError: An option belongs to one job.
            SettingsError: The app does not allow this queue, or runs tasks eagerly.
        """
        if app.conf.task_always_eager and task in app.tasks:
            raise SettingsError(f"{task}: task_always_eager is set, so nothing is sent")
        own = sorted(set(NOT_SHARED) & set(options))
        if own:
            raise BatchArgumentError(f"{task}: {', '.join(own)}: not an option of many jobs")
        self._app = app
        self._task = task
        self._keywords = dict(keywords or {})
        if options.get("queue") is None:
            # To Celery, a None would rule out what the task says.
            options.pop("queue", None)
            if not is_known(app, task):
                options["queue"] = task
        self._options = options
        self._most = most_waiting
        self._wait_s = wait_s
        self._owns_outlet = outlet is None
        self._outlet = outlet or Outlet(app, patience or Patience(), persistent=persistent)
        #: Name of the queue.
        self.queue = _queue_name(app, task, options.get("queue"))
        #: Jobs that are in the queue by now.
        self.sent = 0
        self._room = Room()
        self._events = SentEvents(app)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection, if it is its own; the next job opens another one."""
        if self._owns_outlet:
            self._outlet.close()

    def send(
        self, jobs: Sequence[tuple[str, Any]], headers: Mapping[str, Any] | None = None
    ) -> None:
        """Sends jobs, each a task id and an item, in this order.

        Args:
            jobs: The item of a packed job is a list, and its headers say so.
            headers: Of these jobs, besides those of all.

        Raises:
            QueueFull: There was no room for `wait_s`; the first `sent` jobs are in the queue.
            BrokerRefused: The broker takes none; as above.
            EncodeError: kombu's, for an item that cannot be serialized; some of the jobs before it
                may have been sent.
            Interrupted: The patience was asked to stop; some of the jobs may have been sent.
            GaveUp: The broker stays away; some of the jobs may have been sent.
        """
        before = self.sent
        options = {**self._options, "retry": False}
        if headers:
            options["headers"] = {**(options.get("headers") or {}), **headers}
        try:
            for chunk in _chunks(jobs):
                self._send_chunk(chunk, options)
        except PublishError as error:
            error.sent = self.sent - before
            raise

    def _send_chunk(self, jobs: Sequence[Job], options: Mapping[str, Any]) -> None:
        made = self._outlet.call(partial(self._make, jobs, options), self.queue)
        if made is None:
            self._outlet.call(partial(self._send_by_kombu, jobs, options), self.queue)
            self.sent += len(jobs)
            return
        pushed, others = made
        for key, messages in pushed.items():
            self._push(key, messages)
        if others:
            self._outlet.call(lambda: self._outlet.pusher.run(others), self.queue)

    def _make(
        self, jobs: Sequence[Job], options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Iterable[str]], list[Command]] | None:
        """Messages by the keys of their lists, and further commands; None if this is no Redis."""
        recording = self._outlet.recording
        if recording is None:
            return None
        if why_not(self._app, self._task) is None:
            job = Job(uuid(), ITEM)
            with recording() as commands:
                self._send(job, options)
            pushed, others = split(commands)
            if len(pushed) == 1:
                ((key, (message, *_)),) = pushed.items()
                template = template_of(self._app, job.id, message)
                if template is not None:
                    others = self._events.instead_of(others, jobs, template.repr_of)
                    return {key: template.fill(jobs)}, others
        with recording() as commands:
            for job in jobs:
                self._send(job, options)
        return split(commands)

    def _push(self, key: str, messages: Iterable[str]) -> None:
        deadline_s = None if self._wait_s is None else time.monotonic() + self._wait_s
        for part in _parts(messages):
            while part:
                push = partial(self._push_chunk, self._outlet.pusher.next_chunk(), key, part)
                pushed, length = self._outlet.call(push, self.queue)
                self.sent += pushed
                self._room.saw(time.monotonic(), length, pushed)
                part = part[pushed:]
                if part:
                    self._wait_for_room(len(part), length, deadline_s)

    def _push_chunk(self, chunk: int, key: str, messages: Sequence[str]) -> tuple[int, int]:
        return self._outlet.pusher.push(chunk, key, messages, self.queue, self._most)

    def _wait_for_room(self, wanted: int, length: int, deadline_s: float | None) -> None:
        after_s = self._room.retry_after_s(wanted)
        if deadline_s is not None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                error = QueueFull(
                    f"queue {self.queue!r} holds {length:,} jobs of at most {self._most:,};"
                    f" try again in {after_s:.2g} s, or start more workers"
                )
                error.retry_after_s = after_s
                raise error
            after_s = min(after_s, left_s)
        self._outlet.patience.sleep(after_s)

    def _send_by_kombu(self, jobs: Sequence[Job], options: Mapping[str, Any]) -> None:
        """With other brokers: in a batch where kombu has one, otherwise one by one."""
        # Only the whole chunk can be repeated: its channel must not change on the way.
        with self._outlet.producer.batch(max_size=len(jobs)):
            for job in jobs:
                self._send(job, options)

    def _send(self, job: Job, options: Mapping[str, Any]) -> None:
        producer = self._outlet.producer
        send_as_celery_does(self._app, self._task, job, self._keywords, producer, options)


def _chunks(jobs: Sequence[tuple[str, Any]]) -> Iterator[list[Job]]:
    for start in range(0, len(jobs), CHUNK_JOBS):
        yield [Job(*job) for job in jobs[start : start + CHUNK_JOBS]]


def _parts(messages: Iterable[str]) -> Iterator[list[str]]:
    """Cuts a chunk where its messages are large."""
    part: list[str] = []
    size_bytes = 0
    for message in messages:
        part.append(message)
        size_bytes += len(message)
        if size_bytes >= PUSH_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


def is_known(app: Celery, task: str) -> bool:
    """Whether the app itself says something about where this task goes."""
    return task in app.tasks or app.amqp.router.lookup_route(task, (), {}, {}) is not None


def _queue_name(app: Celery, task: str, queue: Any) -> str:
    known: Any = app.tasks.get(task)
    queue = queue or getattr(known, "model_queue", None) or getattr(known, "queue", None)
    try:
        route = app.amqp.router.route({"queue": queue} if queue else {}, task, (), {}, known)
    except QueueNotFound as error:
        raise SettingsError(
            f"queue {queue or task!r}: not among the app's task_queues, and the app creates no"
            " others (task_create_missing_queues); name one of its queues"
        ) from error
    destination = route.get("queue")
    return str(destination.name if destination is not None else route.get("routing_key", task))

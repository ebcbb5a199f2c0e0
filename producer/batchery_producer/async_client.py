"""The client for `asyncio`: `await task(item)`, thousands at once, on one connection each way.

A session has two threads for all callers. One sends the jobs that gathered while it was sending, so
that a thousand calls at once become a few chunks. The other one waits for results.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, Self
from weakref import WeakValueDictionary

from celery import Celery, uuid
from kombu.utils import json

from batchery.errors import BatcheryError, GaveUp, NoResult
from batchery.protocol.headers import STREAMED, deadline_header, with_tenant
from batchery.retry import AWAY_S, Interrupted, RetryPolicy
from batchery.tracing import trace_headers
from batchery_producer.answers import (
    Answer,
    Outcome,
    build_header,
    check_per_job,
    read_outcomes,
)
from batchery_producer.broker import BrokerConnection
from batchery_producer.client import close_app, make_app
from batchery_producer.collector import Collector, collector_for
from batchery_producer.piece_reader import PieceReader
from batchery_producer.piece_stream import AsyncPieceStream
from batchery_producer.publisher import Publisher
from batchery_producer.stream import WAIT_S, Window
from batchery_producer.template import OutgoingJob

#: Items in flight.
WINDOW = 1024

#: How long cancelled calls are gathered before one message revokes them, in seconds.
GATHER_S = 0.02

#: Maximum number of jobs that are sent before revoked jobs are handled.
SEND_JOBS = 1000

#: How long one command to Redis may take, in seconds, before its connection is replaced; and those
#: at the end, whose answer nobody awaits.
COMMAND_S = 10.0
LAST_COMMAND_S = 1.0

#: Number of publishers that are kept: one for each task with its keywords and options.
PUBLISHERS = 64


class AsyncClient:
    """Calls tasks by name, from coroutines of one event loop."""

    def __init__(self, app: Celery | str) -> None:
        """Connects with the first call.

        Args:
            app: A Celery app, or the URL of a Redis that is broker and result backend. The app does
                not need to have the tasks.
        """
        self._owns_app = isinstance(app, str)
        self.app = make_app(app)
        self._session = Session(self.app)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def task(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        tenant: str | None = None,
        deadline_s: float | None = None,
        **options: Any,
    ) -> "AsyncTask":
        """A task by name. Costs nothing: make one per call where the options differ.

        Args:
            name: Name of the task; of a model, its name in the settings.
            timeout_s: How long a call of one item waits, in seconds; None for ever. Its job expires
                with it, by the clocks of both machines: a worker that begins later drops it.
            tenant: For whom the jobs run. Tenants of one priority class have equal shares of it.
            deadline_s: In how many seconds from the call each job should be answered. In its lane
                it goes before jobs that have more time.
            options: Options of `apply_async` for all jobs: `queue`, `priority`, `expires`,
                `headers`. By default jobs go where the app routes them, or to a queue of the task's
                name. Also `max_waiting` and `wait_s`, as for a `Publisher`. A call does not wait
                for space in the queue unless `wait_s` says so, as it would delay all others.

        Raises:
            InvalidItem: The tenant is no name.
            BatchArgumentError: The deadline is no number above 0.
        """
        deadline_header(deadline_s)
        options = with_tenant(options, tenant)
        # No worker may be there to be told of a cancelled call.
        expires = {} if timeout_s is None else {"expires": timeout_s}
        # After that nobody asks for the result any more.
        keep_s = None if timeout_s is None else math.ceil(timeout_s + AWAY_S)
        call = Terms(name, {"wait_s": 0, **expires, **options}, deadline_s, timeout_s, keep_s)
        return AsyncTask(self._session, call, Terms(name, options, deadline_s))

    def follow(
        self, job_id: str, after: str | None = None, *, timeout_s: float | None = None
    ) -> AsyncPieceStream:
        """The partial results of a job that was sent by `stream`; see `Client.follow`.

        Raises:
            BatchArgumentError: `after` is no such id.
            SettingsError: The app's result backend is no Redis.
        """
        reader = self._session.reader
        stream = AsyncPieceStream(reader, job_id, after=after, timeout_s=timeout_s)
        reader.follow(stream)
        asyncio.get_running_loop().run_in_executor(None, reader.wake)
        return stream

    def cancel(self, job_id: str) -> None:
        """Ends a job that was sent by `stream`, whoever reads it; must be called in the event loop.

        Nothing says whether it had ended before.
        """
        self._session.abandon(job_id)

    async def close(self) -> None:
        """Revokes jobs that no worker has begun, and those streamed; closes all connections."""
        await self._session.close()
        if self._owns_app:
            close_app(self.app)


class Terms(NamedTuple):
    """What calls of a task have in common."""

    task: str
    #: Of a `Publisher`.
    options: Mapping[str, Any]
    deadline_s: float | None = None
    #: How long a caller waits, and how long its result is kept if this client does not fetch it, in
    #: seconds; None for ever.
    timeout_s: float | None = None
    keep_s: int | None = None


class PendingSend(NamedTuple):
    """A job to be sent."""

    terms: Terms
    keywords: Mapping[str, Any]
    headers: Mapping[str, Any]
    job: OutgoingJob
    #: Who reads its partial results; None for a call that waits for its result.
    stream: AsyncPieceStream | None = None

    def build_key(self, headers: Mapping[str, Any] | None = None) -> str:
        """Key of the jobs that one publisher sends; with headers, of those that go together."""
        key = [self.terms.task, self.keywords, repr(self.terms.options), headers]
        return json.dumps(key, sort_keys=True, default=repr)


class Session:
    """Sends and awaits the jobs of many coroutines; starts its threads with the first call."""

    def __init__(self, app: Celery) -> None:
        """Prepares."""
        self.app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[str, asyncio.Future[Answer]] = {}
        self._cancelled: list[str] = []
        self._gathered: list[PendingSend] = []
        self._wake = threading.Condition()
        self._calls: deque[PendingSend] = deque()
        self._unsent: set[str] = set()
        self._revoked: set[str] = set()
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._retries = RetryPolicy(lambda: self._ended, command_s=COMMAND_S)
        sending = RetryPolicy(lambda: self._ended, command_s=COMMAND_S)
        self._broker = BrokerConnection(app, sending, persistent=True)
        self._publishers: dict[str, Publisher] = {}
        self._collector: Collector | None = None
        #: Those that are read; and the ids of jobs that nobody reads any more.
        self._streams: WeakValueDictionary[str, AsyncPieceStream] = WeakValueDictionary()
        self._abandoned: set[str] = set()

    @property
    def collector(self) -> Collector:
        """Awaits the jobs in flight."""
        if self._collector is None:
            self._collector = collector_for(self.app, self._retries, forgets_dropped=True)
        return self._collector

    @cached_property
    def reader(self) -> PieceReader:
        """Reads partial results."""
        return PieceReader(self.app, lambda: self._ended)

    # The event loop

    def stream(self, terms: Terms, item: Any, keywords: Mapping[str, Any]) -> AsyncPieceStream:
        """Sends one job whose partial results are read."""
        headers = {**trace_headers(), **deadline_header(terms.deadline_s), **STREAMED}
        task_id = uuid()
        stream = AsyncPieceStream(
            self.reader,
            task_id,
            timeout_s=terms.timeout_s,
            cancel=partial(self.abandon, task_id),
        )
        self._streams[task_id] = stream
        self._gather(PendingSend(terms, keywords, headers, OutgoingJob(task_id, item), stream))
        return stream

    def abandon(self, task_id: str) -> None:
        """Cancels a job whose partial results are read."""
        self._abandoned.add(task_id)
        self._cancel(task_id)

    def _gather(self, pending: PendingSend) -> None:
        self._loop = asyncio.get_running_loop()
        if not self._gathered:
            # Calls of the same turn of the event loop are sent together.
            self._loop.call_soon(self._notify)
        self._gathered.append(pending)

    async def call(
        self, terms: Terms, item: Any, count: int, keywords: Mapping[str, Any]
    ) -> Answer:
        """Sends one job and waits for its end; a cancellation revokes the job.

        The item of a multi-item job is a list of `count` items; 0 means that it is one item.

        Raises:
            NoResult: The job did not end in time.
            GaveUp: Neither did it, and Redis is away.
        """
        # The trace of this call, as jobs are sent from elsewhere.
        headers = {
            **trace_headers(),
            **deadline_header(terms.deadline_s),
            **build_header(count, self.collector.headers, terms.keep_s),
        }
        task_id = uuid()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._futures[task_id] = future
        self._unsent.add(task_id)
        self._gather(PendingSend(terms, keywords, headers, OutgoingJob(task_id, item)))
        try:
            async with asyncio.timeout(terms.timeout_s):
                return await future
        except TimeoutError:
            self._cancel(task_id)
            self.check_redis(terms.task, terms.timeout_s)
            is_sent = task_id not in self._unsent
            problem = "no result" if is_sent else "not sent"
            raise NoResult(
                f"{terms.task}: {problem} within {terms.timeout_s:g} s, so its job is"
                f" {'revoked' if is_sent else 'dropped'}; see `batchery stats`"
            ) from None
        except asyncio.CancelledError:
            self._cancel(task_id)
            raise
        finally:
            self._futures.pop(task_id, None)

    def check_redis(self, task: str, waited_s: float | None) -> None:
        """Checks that Redis answers, after a caller has waited in vain.

        Raises:
            GaveUp: It does not.
        """
        if self._broker.retries.is_away or self._retries.is_away:
            raise GaveUp(
                f"{task}: nothing within {waited_s:g} s, as Redis does not answer;"
                " this program's log says why"
            ) from None

    async def close(self) -> None:
        """Revokes jobs that no worker has begun, and ends the threads and their connections."""
        for future in list(self._futures.values()):
            future.cancel()
        for stream in list(self._streams.values()):
            stream.close()
        self._ended = True
        self._notify()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        if "reader" in vars(self):
            await asyncio.to_thread(self.reader.close)

    def _notify(self) -> None:
        if not self._threads and not self._ended:
            for target in (self._send_all, self._collect_all):
                thread = threading.Thread(target=target, name="batchery-session", daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._wake:
            self._calls.extend(self._gathered)
            self._wake.notify_all()
        self._gathered.clear()

    def _cancel(self, task_id: str) -> None:
        if not self._cancelled:
            asyncio.get_running_loop().call_later(GATHER_S, self._revoke)
        self._cancelled.append(task_id)

    def _revoke(self) -> None:
        with self._wake:
            self._revoked.update(self._cancelled)
        self._cancelled.clear()
        self._notify()

    def _settle(self, answers: Sequence[tuple[str, Answer | Exception]]) -> None:
        for task_id, answer in answers:
            stream = self._streams.get(task_id)
            if stream is not None and isinstance(answer, Exception):
                self.reader.drop([stream])
                stream.give([answer])
            future = self._futures.get(task_id)
            if future is None or future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    # Both threads

    def _settle_soon(self, answers: Sequence[tuple[str, Answer | Exception]]) -> None:
        """Hands answers, or why there are none, to the event loop."""
        assert self._loop is not None
        with suppress(RuntimeError):  # The event loop is closed, so no call waits.
            self._loop.call_soon_threadsafe(self._settle, answers)

    def _give_up(self, task_ids: Sequence[str], error: Exception) -> None:
        self.collector.drop(task_ids)
        self._settle_soon([(task_id, error) for task_id in task_ids])

    # The sending thread

    def _send_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._calls or self._revoked)
                revoked, self._revoked = self._revoked, set()
                some = [self._calls.popleft() for _ in range(min(SEND_JOBS, len(self._calls)))]
            if self._ended:
                break
            # Nobody waits for the others any more.
            self._send_some([call for call in some if self._is_wanted(call)])
            del some  # A stream that its user has dropped must go.
            self._unsent -= revoked
            self._revoke_some(revoked)
        self._broker.retries = RetryPolicy(away_s=0, command_s=LAST_COMMAND_S)
        self._revoke_some({*self.collector.awaited, *revoked, *self._abandoned})
        self._broker.close()

    def _is_wanted(self, call: PendingSend) -> bool:
        if call.stream is None:
            return call.job.id in self._futures
        return not call.stream.is_over

    def _send_some(self, calls: Sequence[PendingSend]) -> None:
        groups: dict[str, list[PendingSend]] = {}
        for call in calls:
            groups.setdefault(call.build_key(call.headers), []).append(call)
        for group in groups.values():
            ids = [call.job.id for call in group]
            try:
                if streams := [call.stream for call in group if call.stream is not None]:
                    self.reader.open(streams)
                else:
                    self.collector.expect(ids)
                    with self._wake:
                        self._wake.notify_all()
                self._publisher(group[0]).send([each.job for each in group], group[0].headers)
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001 - the callers get it, whatever it is
                self._send_alone(group, error)
            self._unsent.difference_update(ids)

    def _send_alone(self, group: Sequence[PendingSend], error: Exception) -> None:
        """Sends jobs one by one after a failure, which a single job may have caused.

        Jobs that were sent before the failure are sent again, under the same id.
        """
        for call in group[getattr(error, "sent", 0) :]:  # A full queue may have accepted some.
            problem: Exception | None = error
            if len(group) > 1 and not isinstance(error, BatcheryError):
                try:
                    self._publisher(call).send([call.job], call.headers)
                    problem = None
                except Exception as own:  # noqa: BLE001 - as above
                    problem = own
            if problem is not None:
                self._give_up([call.job.id], problem)

    def _publisher(self, call: PendingSend) -> Publisher:
        # Headers go with each message: that of a deadline never comes twice.
        kind = call.build_key()
        if kind not in self._publishers:
            if len(self._publishers) >= PUBLISHERS:
                self._publishers.pop(next(iter(self._publishers)))
            terms, broker = call.terms, self._broker
            self._publishers[kind] = Publisher(
                self.app, terms.task, keywords=call.keywords, broker=broker, **terms.options
            )
        return self._publishers[kind]

    def _revoke_some(self, task_ids: set[str]) -> None:
        begun = [each for each in task_ids if each in self.collector.awaited]
        self.collector.drop(begun)
        streamed = self._abandoned & task_ids
        self._abandoned -= streamed
        with suppress(Exception):  # This thread must go on, and no caller waits for the answer.
            if streamed:
                self.reader.give_up(streamed)
            self._broker.revoke([*begun, *streamed])

    # The collecting thread

    def _collect_all(self) -> None:
        while not self._ended:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self.collector.awaited)
            if not self._ended:
                self._collect_some()
        self.collector.close()

    def _collect_some(self) -> None:
        answers: list[tuple[str, Answer]] = []
        try:
            answers.extend(self.collector.collect(WAIT_S))
        except Interrupted:
            pass
        except Exception as error:  # noqa: BLE001 - the callers get it
            self._give_up(list(self.collector.awaited), error)
        if answers:
            self._settle_soon(answers)
            with suppress(Exception):  # This thread must go on, and results expire.
                self.collector.forget([task_id for task_id, _ in answers])


class AsyncTask:
    """A task that coroutines call."""

    def __init__(self, session: Session, call: Terms, stream: Terms) -> None:
        self._session = session
        self.name = call.task
        #: Of a call that waits, and of the jobs of `as_completed`.
        self._call, self._stream = call, stream

    async def __call__(self, item: Any, **keywords: Any) -> Any:
        """The result of one item. Cancelling the call revokes its job.

        Raises:
            NoResult: None came within `timeout_s`.
            GaveUp: None came within `timeout_s`, as Redis does not answer.
            QueueFull: The queue had no space for the job.
            Exception: What the worker raised, or why the job could not be sent.
        """
        (outcome,) = await self._outcomes([item], range(1), False, keywords, self._call)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def stream(self, item: Any, **keywords: Any) -> AsyncPieceStream:
        """Sends one job, whose partial results `async for` reads; then it has the `result`.

        The task's `timeout_s` is how long to wait for each of them. Must be called in the event
        loop.

        Raises:
            SettingsError: The app's result backend is no Redis.
        """
        return self._session.stream(self._call, item, keywords)

    async def outcomes(
        self, items: Sequence[Any], *, per_job: int = 1, keywords: Mapping[str, Any] | None = None
    ) -> list[Outcome]:
        """How each item ended, in order. All are sent at once; cancelling revokes their jobs.

        Args:
            items: A few; for many, `as_completed` keeps to a window.
            per_job: Number of items in one message, as in `TaskClient.as_completed`.
            keywords: Keyword arguments of all jobs.

        Raises:
            NoResult: Not all of them ended within `timeout_s`.
            GaveUp: Neither did they, as Redis does not answer.
            QueueFull: The queue had no space for one of the jobs; the others are revoked.
        """
        size, known = min(check_per_job(per_job), len(items)) or 1, keywords or {}
        starts = range(0, len(items), size)
        calls = [
            self._outcomes(
                list(items[start : start + size]),
                range(start, min(start + size, len(items))),
                size > 1,
                known,
                self._call,
            )
            for start in starts
        ]
        jobs = [asyncio.ensure_future(call) for call in calls]
        try:
            some = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        return [outcome for each in some for outcome in each]

    async def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        **settings: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yields the result of each item; the arguments are those of `as_completed`.

        Raises:
            Exception: The error of the first item that failed; the others are revoked.
        """
        stream = self.as_completed(items, ordered=ordered, **settings)
        try:
            async for outcome in stream:
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.value
        finally:
            await stream.aclose()

    async def as_completed(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = False,
        keywords: Mapping[str, Any] | None = None,
        per_job: int | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Outcome, None]:
        """Yields an `Outcome` with the index of each item. A failed item does not stop the others.

        Args:
            items: Are read as the window has space for them.
            ordered: Whether outcomes come in the order of the items, or as they are done.
            keywords: Keyword arguments of all jobs.
            per_job: Number of items in one message, as in `TaskClient.as_completed`.
            window: Maximum number of items in flight.
            timeout_s: Give up when no result has come for so long, in seconds; by default never.

        Raises:
            NoResult: None came for `timeout_s`.
            GaveUp: None came for `timeout_s`, as Redis does not answer.
            BatchArgumentError: A number is out of range.
        """
        size = check_per_job(per_job)
        jobs = _arguments(items, size)
        running = Window[asyncio.Task[list[Outcome]], None, list[Outcome]](
            max(window // (size or 1), 1), ordered=ordered
        )
        ended: asyncio.Queue[asyncio.Task[list[Outcome]]] = asyncio.Queue()
        exhausted, start = False, 0
        try:
            while running or not exhausted:
                for _ in range(0 if exhausted else running.to_send):
                    argument = await anext(jobs, None)
                    if exhausted := argument is None:
                        break
                    indexes = range(start, start + len(argument))
                    start = indexes.stop
                    call = self._outcomes(argument, indexes, size > 0, keywords or {}, self._stream)
                    task = asyncio.create_task(call)
                    task.add_done_callback(ended.put_nowait)
                    running.add({task: None})
                if running:
                    try:
                        async with asyncio.timeout(timeout_s):
                            done = await ended.get()
                    except TimeoutError:
                        self._session.check_redis(self.name, timeout_s)
                        raise NoResult(
                            f"no result for {timeout_s:g} s; see `celery inspect batchery`"
                        ) from None
                    for _, _, outcomes in running.end(done, done.result()):
                        for outcome in outcomes:
                            yield outcome
        finally:
            for task in running.in_flight:
                task.cancel()

    async def _outcomes(
        self,
        argument: list[Any],
        indexes: range,
        are_many: bool,
        keywords: Mapping[str, Any],
        terms: Terms,
    ) -> list[Outcome]:
        item, count = (argument, len(argument)) if are_many else (argument[0], 0)
        answer = await self._session.call(terms, item, count, keywords)
        return read_outcomes(answer, indexes, are_many, self._session.app.backend)


async def _arguments(
    items: Iterable[Any] | AsyncIterable[Any], per_job: int
) -> AsyncIterator[list[Any]]:
    """The items of each job."""
    some: list[Any] = []
    async for item in _each(items):
        some.append(item)
        if len(some) >= per_job:
            yield some
            some = []
    if some:
        yield some


async def _each(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item

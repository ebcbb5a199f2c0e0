"""What all calls of an `AsyncClient` share: two threads, and the reader of partial results.

One thread sends the jobs that gathered while it was sending, so that a thousand calls at once
become a few chunks. The other one waits for results. The event loop itself never waits for Redis.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from celery import Celery, uuid
from kombu.utils import json

from batchery.errors import BatcheryError, GaveUp, InvalidItem, NoResult
from batchery.protocol.headers import STREAMED, deadline_header
from batchery.retry import Interrupted, RetryPolicy
from batchery.tracing import trace_headers
from batchery_producer.answers import Answer, build_header
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import Collector
from batchery_producer.diagnosis import explain_stall
from batchery_producer.piece_reader import PieceReader
from batchery_producer.piece_stream import AsyncPieceStream
from batchery_producer.publisher import Publisher
from batchery_producer.stream import WAIT_S
from batchery_producer.template import OutgoingJob

#: Maximum number of jobs that are sent before revoked jobs are handled.
SEND_JOBS = 1000

#: How long one command to Redis may take, in seconds, before its connection is replaced; and those
#: at the end, whose answer nobody awaits.
COMMAND_S = 10.0
LAST_COMMAND_S = 1.0

#: Maximum time that closing a client takes, in seconds.
CLOSE_S = 1.0

#: How long a caller waits to be told why no result came, in seconds.
EXPLAIN_S = 3.0

T = TypeVar("T")


class Terms(NamedTuple):
    """What calls of a task have in common."""

    task: str
    #: Of a `Publisher`, as is the task.
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

    def build_key(self) -> str:
        """Key of the jobs that go together."""
        try:
            return json.dumps([*self.terms[:2], self.keywords, self.headers], default=repr)
        except Exception:  # noqa: BLE001 - whatever is wrong with its keywords, it goes alone
            return self.job.id


class Session:
    """Sends and awaits the jobs of many coroutines; starts its threads with the first call."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        #: The event loop of the latest call, and whether it will wake the threads.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._will_wake = False
        self._futures: dict[str, asyncio.Future[Answer]] = {}
        #: Those that are read; and the ids of jobs that nobody reads any more.
        self._streams: WeakValueDictionary[str, AsyncPieceStream] = WeakValueDictionary()
        self._abandoned: set[str] = set()
        #: Who is asked why no results come, by what the jobs have in common.
        self._explanations: dict[str, asyncio.Future[str]] = {}
        self._wake = threading.Condition()
        #: Calls of this turn of the event loop, and those that wait to be sent.
        self._gathered: list[PendingSend] = []
        self._calls: deque[PendingSend] = deque()
        self._cancelled: deque[str] = deque()
        self._is_ended = False
        self._threads: list[threading.Thread] = []
        #: Of the process that has the threads; 0 if they were not started.
        self._pid = 0
        self._retries = RetryPolicy(lambda: self._is_ended, command_s=COMMAND_S)
        sending = RetryPolicy(lambda: self._is_ended, command_s=COMMAND_S)
        self._broker = BrokerConnection(app, sending, persistent=True)

    @cached_property
    def collector(self) -> Collector:
        """Awaits the jobs in flight."""
        return Collector(self.app, self._retries, forgets_dropped=True)

    @cached_property
    def reader(self) -> PieceReader:
        """Reads partial results."""
        return PieceReader(self.app, lambda: self._is_ended)

    # The event loop

    def check(self) -> None:
        """Makes sure that calls are served; raises a `NoResult` where nobody would answer them."""
        if self._is_ended or self._pid not in (0, os.getpid()):
            raise NoResult("the client is closed, or was used before a fork; make another one")

    def stream(self, terms: Terms, item: Any, keywords: Mapping[str, Any]) -> AsyncPieceStream:
        """Sends one job whose partial results are read; raises as `check`."""
        self.check()
        task_id = uuid()
        stream = AsyncPieceStream(
            self.reader,
            task_id,
            timeout_s=terms.timeout_s,
            keep_s=terms.keep_s,
            cancel=partial(self.abandon, task_id),
            explain=partial(self.explain, terms),
        )
        self._streams[task_id] = stream
        own, job = build_headers(terms, 0, STREAMED), OutgoingJob(task_id, item)
        self._send(PendingSend(terms, keywords, own, job, stream))
        return stream

    def abandon(self, task_id: str) -> None:
        """Cancels a job whose partial results are read."""
        self._abandoned.add(task_id)
        self._cancel(task_id)

    async def call(
        self, terms: Terms, item: Any, count: int, keywords: Mapping[str, Any]
    ) -> Answer:
        """Sends one job and waits for its end; a cancellation revokes the job.

        The item of a multi-item job is a list of `count` items; 0 means that it is one item.

        Raises:
            NoResult: The job did not end in time; or what `check` raises.
            GaveUp: Neither did it, and Redis is away.
        """
        self.check()
        task_id = uuid()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._futures[task_id] = future
        own = build_headers(terms, count, self.collector.headers)
        self._send(PendingSend(terms, keywords, own, OutgoingJob(task_id, item)))
        try:
            async with asyncio.timeout(terms.timeout_s):
                return await future
        except TimeoutError:
            is_sent = task_id in self.collector.awaited
            self._cancel(task_id)
            raise await self._complain(terms, task_id, is_sent=is_sent) from None
        except asyncio.CancelledError:
            self._cancel(task_id)
            raise
        finally:
            self._futures.pop(task_id, None)

    async def _complain(self, terms: Terms, task_id: str, *, is_sent: bool) -> BatcheryError:
        """The error of a caller who has waited in vain."""
        within = f"within {terms.timeout_s:g} s"
        if self._broker.retries.is_away or self._retries.is_away:
            why = "as Redis does not answer; this program's log says why"
            return GaveUp(f"{terms.task}: nothing {within}, {why}")
        if not is_sent:
            return NoResult(f"{terms.task}: not sent {within}, so its job is dropped: {task_id}")
        why = await self.explain(terms)
        return NoResult(
            f"{terms.task}: no result {within}, so its job is revoked: {task_id}; {why}"
        )

    async def explain(self, terms: Terms) -> str:
        """As `explain_stall`, once for all who ask meanwhile, and within `EXPLAIN_S`."""
        key = f"{terms.task} {terms.options.get('queue')}"
        if (asked := self._explanations.get(key)) is None:
            ask = partial(explain_stall, self.app, *terms[:2])
            asked = self._explanations[key] = asyncio.ensure_future(run_aside(ask))
            asked.add_done_callback(lambda _: self._explanations.pop(key))
        with suppress(TimeoutError):
            async with asyncio.timeout(EXPLAIN_S):
                return await asyncio.shield(asked)
        return "see `batchery stats`"

    async def close(self) -> None:
        """Revokes jobs that no worker has begun, and ends the threads and their connections.

        While Redis hangs, the threads end later than this, and what they revoke may be lost.
        """
        for future in list(self._futures.values()):
            future.cancel()
        for stream in list(self._streams.values()):
            stream.close()
        self._is_ended = True
        self._wake_threads()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await run_aside(self._end)

    def _end(self) -> None:
        for thread in self._threads:
            thread.join()
        if "reader" in vars(self):
            self.reader.close()

    def _send(self, call: PendingSend) -> None:
        self._gathered.append(call)
        self._wake_soon()

    def _cancel(self, task_id: str) -> None:
        self._cancelled.append(task_id)
        self._wake_soon()

    def _wake_soon(self) -> None:
        """Has the threads see to it together with all else of this turn of the event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or not self._will_wake:
            self._loop, self._will_wake = loop, True
            loop.call_soon(self._wake_threads)

    def _wake_threads(self) -> None:
        self._will_wake = False
        if not self._threads and not self._is_ended:
            self._pid = os.getpid()
            for target in (self._send_all, self._collect_all):
                thread = threading.Thread(target=target, name="batchery-session", daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._wake:
            self._calls.extend(self._gathered)
            self._wake.notify_all()
        self._gathered.clear()

    def _settle(self, answers: Sequence[tuple[str, Answer | Exception]]) -> None:
        for task_id, answer in answers:
            future, stream = self._futures.get(task_id), self._streams.get(task_id)
            if future is not None and not future.done():
                is_error = isinstance(answer, Exception)
                settle: Any = future.set_exception if is_error else future.set_result
                settle(answer)
            elif stream is not None and isinstance(answer, Exception):
                self.reader.drop([stream])
                stream.give([answer])

    # Both threads

    def _wait_for(self, is_due: Callable[[], object]) -> bool:
        """Waits until there is something to do; returns whether to go on."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_ended or is_due())
        return not self._is_ended

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
        while self._wait_for(lambda: self._calls or self._cancelled):
            some = [self._calls.popleft() for _ in range(min(SEND_JOBS, len(self._calls)))]
            # Nobody waits for the others any more.
            self._send_some([call for call in some if self._is_wanted(call)])
            del some  # A stream that its user has dropped must go.
            self._revoke({self._cancelled.popleft() for _ in range(len(self._cancelled))})
        self._broker.retries = RetryPolicy(away_s=0, command_s=LAST_COMMAND_S)
        self._revoke({*self.collector.awaited, *self._cancelled, *self._abandoned})
        self._broker.close()

    def _is_wanted(self, call: PendingSend) -> bool:
        if call.stream is None:
            return call.job.id in self._futures
        return not call.stream.is_over

    def _send_some(self, calls: Sequence[PendingSend]) -> None:
        groups: dict[str, list[PendingSend]] = {}
        for call in calls:
            groups.setdefault(call.build_key(), []).append(call)
        for group in groups.values():
            try:
                if streams := [call.stream for call in group if call.stream is not None]:
                    self.reader.open(streams)
                else:
                    self.collector.expect([call.job.id for call in group])
                    with self._wake:
                        self._wake.notify_all()
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001 - the callers get it, whatever it is
                self._refuse(group, error)
            else:
                self._publish_all(group)

    def _publish_all(self, group: Sequence[PendingSend]) -> None:
        """Sends jobs together; one by one after a failure that a single job may have caused.

        Jobs that were sent before the failure are sent again, under the same id.
        """
        try:
            self._publish(group)
        except Interrupted:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            is_of_one = isinstance(error, InvalidItem) or not isinstance(error, BatcheryError)
            if len(group) > 1 and is_of_one:
                for call in group:
                    self._publish_all([call])
            else:
                # A full queue may have accepted some.
                self._refuse(group[getattr(error, "sent", 0) :], error)

    def _refuse(self, group: Sequence[PendingSend], error: Exception) -> None:
        self._give_up([call.job.id for call in group], error)
        refused = [call.stream for call in group if call.stream is not None]
        # If Redis is away, the job may have been sent.
        if refused and not isinstance(error, GaveUp):
            self.reader.forget(refused)

    def _publish(self, group: Sequence[PendingSend]) -> None:
        (task, options, *_), keywords, headers, *_ = group[0]
        publisher = Publisher(self.app, task, keywords=keywords, broker=self._broker, **options)
        publisher.send([call.job for call in group], headers)

    def _revoke(self, task_ids: set[str]) -> None:
        begun = [each for each in task_ids if each in self.collector.awaited]
        self.collector.drop(begun)
        streamed = self._abandoned & task_ids
        self._abandoned -= streamed
        with suppress(Exception):  # This thread must go on, and no caller waits for the answer.
            self._broker.revoke([*begun, *streamed])
            # Last: where it fails, streams end after the grace time.
            if streamed:
                self.reader.give_up(streamed)

    # The collecting thread

    def _collect_all(self) -> None:
        while self._wait_for(lambda: self.collector.awaited):
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
        self.collector.close()


def build_headers(terms: Terms, count: int, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Headers of one call: those of `build_header`, its deadline, and its trace."""
    own = build_header(count, reply, terms.keep_s)
    return {**trace_headers(), **deadline_header(terms.deadline_s), **own}


async def run_aside(function: Callable[[], T]) -> T:
    """As `asyncio.to_thread`, on a thread that no exit of the program waits for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_it(outcome)

    def run() -> None:
        told: tuple[Any, Any]
        try:
            told = future.set_result, function()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            told = future.set_exception, error
        with suppress(RuntimeError):  # The event loop is closed, so nobody waits.
            loop.call_soon_threadsafe(settle, *told)

    threading.Thread(target=run, name="batchery-aside", daemon=True).start()
    return await future

"""What all callers of an `AsyncClient` share: two threads, and the reader of partial results.

One thread sends the jobs that gathered while it was sending, so that a thousand calls at once
become a few chunks. The other one waits for results.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from celery import Celery, uuid
from kombu.utils import json

from batchery.errors import BatcheryError, GaveUp, InvalidItem, NoResult, counted
from batchery.protocol.headers import STREAMED, deadline_header
from batchery.queue_limits import find_destination
from batchery.retry import Interrupted, RetryPolicy
from batchery.tracing import trace_headers
from batchery_producer.answers import Answer, build_header
from batchery_producer.broker import BrokerConnection
from batchery_producer.collector import Collector, collector_for
from batchery_producer.piece_reader import PieceReader
from batchery_producer.piece_stream import AsyncPieceStream
from batchery_producer.publisher import Publisher, route_unknown
from batchery_producer.stream import WAIT_S
from batchery_producer.template import OutgoingJob

#: How long cancelled calls are gathered before one message revokes them, in seconds.
GATHER_S = 0.02

#: Maximum number of jobs that are sent before revoked jobs are handled.
SEND_JOBS = 1000

#: How long one command to Redis may take, in seconds, before its connection is replaced; and those
#: at the end, whose answer nobody awaits.
COMMAND_S = 10.0
LAST_COMMAND_S = 1.0

#: Maximum time that closing a client takes, in seconds.
CLOSE_S = 1.0

#: Number of publishers that are kept: one for each task with its keywords and options.
PUBLISHERS = 64


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

    def build_key(self, headers: Mapping[str, Any] | None = None) -> str:
        """Key of the jobs that one publisher sends; with headers, of those that go together."""
        try:
            return json.dumps([*self.terms[:2], self.keywords, headers], default=repr)
        except Exception:  # noqa: BLE001 - whatever is wrong with its keywords, it goes alone
            return self.job.id


class Session:
    """Sends and awaits the jobs of many coroutines; starts its threads with the first call."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._loop: asyncio.AbstractEventLoop | None = None
        self._futures: dict[str, asyncio.Future[Answer]] = {}
        self._cancelled: list[str] = []
        #: Where a timer will revoke them; it dies with its loop.
        self._revoking_on: asyncio.AbstractEventLoop | None = None
        self._gathered: list[PendingSend] = []
        self._wake = threading.Condition()
        self._calls: deque[PendingSend] = deque()
        self._unsent: set[str] = set()
        self._revoked: set[str] = set()
        self._ended = False
        self._threads: list[threading.Thread] = []
        #: Of the process that has the threads; 0 if they were not started.
        self._pid = 0
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

    def check(self) -> None:
        """Makes sure that calls are served; raises a `NoResult` where nobody would answer them."""
        if self._ended or self._pid not in (0, os.getpid()):
            raise NoResult("the client is closed, or was used before a fork; make another one")

    def stream(self, terms: Terms, item: Any, keywords: Mapping[str, Any]) -> AsyncPieceStream:
        """Sends one job whose partial results are read; raises as `check`."""
        self.check()
        headers = {
            **trace_headers(),
            **deadline_header(terms.deadline_s),
            **build_header(0, STREAMED, terms.keep_s),
        }
        task_id = uuid()
        stream = AsyncPieceStream(
            self.reader,
            task_id,
            timeout_s=terms.timeout_s,
            keep_s=terms.keep_s,
            cancel=partial(self.abandon, task_id),
            explain=partial(self.hint, terms),
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
            NoResult: The job did not end in time; or what `check` raises.
            GaveUp: Neither did it, and Redis is away.
        """
        self.check()
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
            within = f"within {terms.timeout_s:g} s, so its job is"
            if task_id in self._unsent:
                raise NoResult(
                    f"{terms.task}: not sent {within} dropped: {task_id};"
                    f" {counted(len(self._unsent), 'job')} of this client waited to be sent"
                ) from None
            raise NoResult(
                f"{terms.task}: no result {within} revoked: {task_id}; {self.hint(terms)}"
            ) from None
        except asyncio.CancelledError:
            self._cancel(task_id)
            raise
        finally:
            self._futures.pop(task_id, None)

    def hint(self, terms: Terms) -> str:
        """What a caller can do who waits in vain. No worker is asked, as that takes seconds."""
        with suppress(Exception):  # A router is the app's own code.
            options = route_unknown(self.app, terms.task, terms.options)
            queue = find_destination(self.app, terms.task, options).queue
            return f"`batchery stats` shows whether a worker serves queue {queue!r}"
        return "see `batchery stats`"

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
        """Revokes jobs that no worker has begun, and ends the threads and their connections.

        While Redis hangs, the threads end later than this, and what they revoke may be lost.
        """
        for future in list(self._futures.values()):
            future.cancel()
        for stream in list(self._streams.values()):
            stream.close()
        self._ended = True
        self._notify()
        end = threading.Thread(target=self._end, name="batchery-session", daemon=True)
        end.start()
        await asyncio.to_thread(end.join, CLOSE_S)

    def _end(self) -> None:
        for thread in self._threads:
            thread.join()
        if "reader" in vars(self):
            self.reader.close()

    def _notify(self) -> None:
        if not self._threads and not self._ended:
            self._pid = os.getpid()
            for target in (self._send_all, self._collect_all):
                thread = threading.Thread(target=target, name="batchery-session", daemon=True)
                self._threads.append(thread)
                thread.start()
        with self._wake:
            self._calls.extend(self._gathered)
            self._wake.notify_all()
        self._gathered.clear()

    def _cancel(self, task_id: str) -> None:
        loop = asyncio.get_running_loop()
        if self._revoking_on is not loop:
            self._revoking_on = loop
            loop.call_later(GATHER_S, self._revoke)
        self._cancelled.append(task_id)

    def _revoke(self) -> None:
        self._revoking_on = None
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
        refused: list[AsyncPieceStream] = []
        for call in group[getattr(error, "sent", 0) :]:  # A full queue may have accepted some.
            problem: Exception | None = error
            is_its_own = isinstance(error, InvalidItem) or not isinstance(error, BatcheryError)
            if len(group) > 1 and is_its_own:
                try:
                    self._publisher(call).send([call.job], call.headers)
                    problem = None
                except Exception as own:  # noqa: BLE001 - as above
                    problem = own
            if problem is not None:
                self._give_up([call.job.id], problem)
                # If Redis is away, the job may have been sent.
                if call.stream is not None and not isinstance(problem, GaveUp):
                    refused.append(call.stream)
        if refused:
            self.reader.forget(refused)

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
            self._broker.revoke([*begun, *streamed])
            # Last: where it fails, streams end after the grace time.
            if streamed:
                self.reader.give_up(streamed)

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

"""A session: two threads that send and await the jobs of many callers together.

One thread sends the jobs that gathered while it was sending, so that a thousand calls at once
become a few chunks. The other thread waits for results. Both call back on their own thread: see
`async_client.py`.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from celery import Celery
from kombu.utils import json

from batchery.errors import BatcheryError
from batchery.retry import Interrupted, RetryPolicy
from batchery_producer.publishing.broker import BrokerConnection
from batchery_producer.publishing.publisher import Publisher
from batchery_producer.publishing.template import OutgoingJob
from batchery_producer.results.answers import Answer
from batchery_producer.results.collector import Collector, collector_for

#: Maximum number of jobs that are sent before revoked jobs are handled.
SEND_JOBS = 1000

#: How long the collecting thread waits for results at a time, in seconds; it notices `close` that
#: late.
WAIT_S = 0.25

#: How long one command to Redis may take, in seconds, before its connection is replaced; and those
#: at the end, whose answer nobody awaits.
COMMAND_S = 10.0
LAST_COMMAND_S = 1.0

#: Number of publishers that are kept: one for each task with its keywords and options.
PUBLISHERS = 64


class PendingSend(NamedTuple):
    """A job to be sent."""

    task: str
    keywords: Mapping[str, Any]
    options: Mapping[str, Any]
    headers: Mapping[str, Any] | None
    job: OutgoingJob


class Session:
    """Starts its threads with the first call. Calls may come from any thread."""

    def __init__(
        self,
        app: Celery,
        answered: Callable[[Sequence[tuple[str, Answer]]], None],
        failed: Callable[[Sequence[str], Exception], None],
    ) -> None:
        """Prepares.

        Args:
            app: App to which the jobs are sent.
            answered: Called on a thread of the session, with jobs that have ended.
            failed: Called on a thread of the session, with the ids of jobs that were given up, and
                why.
        """
        self._app = app
        self._answered = answered
        self._failed = failed
        self._wake = threading.Condition()
        self._calls: deque[PendingSend] = deque()
        self._revoked: set[str] = set()
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._retries = RetryPolicy(lambda: self._ended, command_s=COMMAND_S)
        sending = RetryPolicy(lambda: self._ended, command_s=COMMAND_S)
        self._broker = BrokerConnection(app, sending, persistent=True)
        self._publishers: dict[str, Publisher] = {}
        #: Ids of jobs in flight.
        self._in_flight: dict[str, None] = {}
        self._unsent: set[str] = set()
        self._collector: Collector | None = None

    def send(self, calls: Sequence[PendingSend]) -> None:
        """Hands jobs to the sending thread."""
        with self._wake:
            if not self._threads:
                self._start()
            self._calls.extend(calls)
            self._unsent.update(call.job.id for call in calls)
            self._wake.notify_all()

    @property
    def is_away(self) -> bool:
        """Whether broker or backend do not answer at present."""
        return self._broker.retries.is_retrying or self._retries.is_retrying

    def has_sent(self, task_id: str) -> bool:
        """Whether a job that was handed over is no longer waiting to be sent."""
        return task_id not in self._unsent

    def revoke(self, task_ids: Sequence[str]) -> None:
        """Stops awaiting jobs, and tells the workers not to begin them."""
        with self._wake:
            self._revoked.update(task_ids)
            self._wake.notify_all()

    def close(self) -> None:
        """Revokes jobs that no worker has begun, and ends the threads and their connections."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        for target in (self._send_all, self._collect_all):
            thread = threading.Thread(target=target, name="batchery-session", daemon=True)
            self._threads.append(thread)
            thread.start()

    # The sending thread

    def _send_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._calls or self._revoked)
                revoked, self._revoked = self._revoked, set()
                if revoked:
                    self._calls = deque(call for call in self._calls if call.job.id not in revoked)
                    self._unsent -= revoked
                some = [self._calls.popleft() for _ in range(min(SEND_JOBS, len(self._calls)))]
            if self._ended:
                break
            self._send_some(some)
            self._revoke_some(revoked)
        self._broker.retries = RetryPolicy(away_s=0, command_s=LAST_COMMAND_S)
        self._revoke_some(set(self._in_flight) | revoked)
        self._broker.close()

    def _send_some(self, calls: Sequence[PendingSend]) -> None:
        groups: dict[str, list[PendingSend]] = {}
        for call in calls:
            groups.setdefault(_build_publisher_key(call, call.headers), []).append(call)
        for group in groups.values():
            ids = [call.job.id for call in group]
            try:
                self._await(ids)
                self._publisher(group[0]).send([call.job for call in group], group[0].headers)
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
                self._forget([call.job.id])
                self._failed([call.job.id], problem)

    def _publisher(self, call: PendingSend) -> Publisher:
        # Headers go with each message: that of a deadline never comes twice.
        kind = _build_publisher_key(call)
        if kind not in self._publishers:
            if len(self._publishers) >= PUBLISHERS:
                self._publishers.pop(next(iter(self._publishers)))
            self._publishers[kind] = Publisher(
                self._app, call.task, keywords=call.keywords, broker=self._broker, **call.options
            )
        return self._publishers[kind]

    def _revoke_some(self, task_ids: set[str]) -> None:
        begun = [task_id for task_id in task_ids if task_id in self._in_flight]
        self._forget(begun)
        with suppress(Exception):  # This thread must go on, and no caller waits for the answer.
            self._broker.revoke(begun)

    # Both threads

    @property
    def headers(self) -> Mapping[str, Any]:
        """Headers that the collector asks for."""
        if self._collector is None:
            self._collector = collector_for(self._app, self._retries, forgets_dropped=True)
        return self._collector.headers

    def _await(self, task_ids: Sequence[str]) -> None:
        assert self._collector is not None
        self._collector.expect(task_ids)
        with self._wake:
            self._in_flight.update(dict.fromkeys(task_ids))
            self._wake.notify_all()

    def _forget(self, task_ids: Sequence[str]) -> None:
        assert self._collector is not None
        self._collector.drop(task_ids)
        for task_id in task_ids:
            self._in_flight.pop(task_id, None)

    # The collecting thread

    def _collect_all(self) -> None:
        while not self._ended:
            with self._wake:
                self._wake.wait_for(lambda: self._ended or self._in_flight)
            if self._ended:
                break
            self._collect_some()
        if self._collector is not None:
            self._collector.close()

    def _collect_some(self) -> None:
        assert self._collector is not None
        answers: list[tuple[str, Answer]] = []
        try:
            answers.extend(self._collector.collect(WAIT_S))
        except Interrupted:
            pass
        except Exception as error:  # noqa: BLE001 - the callers get it
            lost = list(self._in_flight)
            self._forget(lost)
            self._failed(lost, error)
        if answers:
            for task_id, _ in answers:
                self._in_flight.pop(task_id, None)
            self._answered(answers)
            with suppress(Exception):  # This thread must go on, and results expire.
                self._collector.forget([task_id for task_id, _ in answers])


def _build_publisher_key(call: PendingSend, headers: Mapping[str, Any] | None = None) -> str:
    """Key of the calls that one publisher sends; with headers, of those that it sends together."""
    return json.dumps(
        [call.task, call.keywords, repr(call.options), headers], sort_keys=True, default=repr
    )

"""The end of every job: its outcome is completed on a thread, then told to Celery on the loop."""

import logging
import queue
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery

from batchery.outcome import Failed
from batchery_worker.completion import Completion
from batchery_worker.metrics import Metrics
from batchery_worker.ticket import Ticket

logger = logging.getLogger("batchery.pool")


class Settlement:
    """Settles each job once, and knows how many are on their way."""

    def __init__(self, app: Celery, threads: int, metrics: Metrics, hub: Any) -> None:
        self._completion = Completion(app, threads, self.deliver)
        self._metrics = metrics
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._hub = hub
        self._called = False
        #: Jobs whose outcome is known, and whose result is being stored.
        self.pending = 0

    def attach(self, hub: Any) -> None:
        """Moves to another event loop."""
        self._hub = hub
        hub.call_soon(self.empty_mailbox)

    def deliver(self, call: Callable[[], None]) -> None:
        """Runs something on the loop's thread; may be called from any thread."""
        self._mailbox.put(call)
        # One turn of the loop empties the whole mailbox; each turn costs as much as a job.
        if not self._called:
            self._called = True
            self._hub.call_soon(self.empty_mailbox)

    def empty_mailbox(self) -> None:
        """Runs what was delivered; on the loop's thread."""
        # Before the first look, so that what comes after the last one is called for again.
        self._called = False
        while True:
            try:
                call = self._mailbox.get_nowait()
            except queue.Empty:
                return
            _run(call)

    def finish(self) -> None:
        """Waits until no job is on its way; on the loop's thread, which is held up meanwhile."""
        while self.pending:
            _run(self._mailbox.get())

    def fail(self, ticket: Ticket, error: Exception) -> None:
        """Settles a job that no device has answered."""
        self.settle(ticket, lambda _: Failed(error), None)

    def settle(
        self, ticket: Ticket, outcome: Callable[[Any], Any], facts: Mapping[str, Any] | None
    ) -> None:
        """Settles a job, unless nobody wants its outcome any more.

        Args:
            ticket: The job; accepted.
            outcome: Makes the outcome, given the backend; called on a completion thread.
            facts: Of its batch, None if it never was in one.
        """
        if ticket.request is not None:
            if ticket.request.discarded:
                return
            ticket.request.batch = facts
        self.pending += 1
        self._completion.submit(ticket, outcome, facts, self._settled)

    def stop(self) -> None:
        """Waits for the jobs that are on their way."""
        self._completion.stop()
        self.empty_mailbox()

    def _settled(self, failed: bool) -> None:
        self.pending -= 1
        self._metrics.failed_jobs += failed


def _run(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        # An OSError from here would make Celery reconnect to a broker that is well.
        logger.exception("settling a job failed")

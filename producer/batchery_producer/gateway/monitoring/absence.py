"""Which queues nobody consumes, so that a request for one is refused and does not wait in vain."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from batchery.transport.channel import LeasingChannel
from batchery.transport.live_workers import RegisteredWorker
from batchery.transport.membership import FailureDetector
from batchery_producer.gateway.problems import Kind, Problem

#: Longest time between two looks, in seconds; after a longer one nothing is known of the time
#: before.
MAX_GAP_S = 5.0

#: In how many seconds a caller who was refused may come again.
RETRY_S = 5.0


class Absence:
    """The queues that no worker has consumed for a while; a look a second says which.

    Whatever is not known for sure counts as a worker: an answer that Redis owes, a worker that
    does not say what it consumes, one without leases.
    """

    def __init__(self, queues: Collection[str], grace_s: float) -> None:
        """Refuses nobody yet.

        Args:
            queues: Names of the queues that requests may need.
            grace_s: How long a queue may be without a worker, in seconds: as long as one starts.
        """
        self._grace_s = grace_s
        self._seen_s = dict.fromkeys(queues, time.monotonic())
        self._looked_s = float("-inf")
        self._detector = FailureDetector(LeasingChannel.lease_expiry_s, max_gap_s=MAX_GAP_S)
        #: What waits for results from each queue.
        self._waiting: dict[str, set[asyncio.Timeout]] = {queue: set() for queue in queues}
        #: Names of the queues that nobody consumes.
        self.queues: Collection[str] = frozenset()

    def without_worker(self, workers: Mapping[str, RegisteredWorker], now_s: float) -> set[str]:
        """Takes in which workers are registered; returns the queues that they leave alone too long.

        Args:
            workers: By id, the dead among them.
            now_s: Monotonic time in seconds.
        """
        if now_s - self._looked_s > MAX_GAP_S:
            self.forget(now_s)
        self._looked_s = now_s
        dead = self._detector.observe(
            {worker: about.heartbeat for worker, about in workers.items()},
            now_s,
            {worker: about.expiry_s for worker, about in workers.items() if about.expiry_s},
        )
        gone = {worker for worker, _ in dead}
        for worker, about in workers.items():
            if worker not in gone:
                self._seen(self._seen_s if about.queues is None else about.queues, now_s)
        return {queue for queue, seen_s in self._seen_s.items() if now_s - seen_s > self._grace_s}

    def _seen(self, queues: Collection[str], now_s: float) -> None:
        self._seen_s.update((queue, now_s) for queue in queues if queue in self._seen_s)

    def forget(self, now_s: float) -> None:
        """Refuses nobody until queues were without a worker for long enough once more."""
        self._seen(self._seen_s, now_s)
        self.queues = frozenset()

    def refuse(self, queues: Collection[str]) -> None:
        """Refuses requests for these queues from now on, and those that wait for them."""
        self.queues = frozenset(queues)
        for queue in self.queues:
            for limit in self._waiting[queue]:
                limit.reschedule(asyncio.get_running_loop().time())

    def check(self, model: str, queue: str) -> None:
        """Makes sure that a worker may be there.

        Raises:
            Problem: Nobody consumes the queue.
        """
        if queue in self.queues:
            raise Problem(
                Kind.UNAVAILABLE,
                f"model {model!r}: no worker has consumed its queue {queue!r} for"
                f" {self._grace_s:g} s; start one: celery -A batchery.app worker -Q {queue}",
                code="no_worker",
                retry_after_s=RETRY_S,
            )

    @asynccontextmanager
    async def refusing(self, model: str, queue: str) -> AsyncIterator[None]:
        """Waits for results of a queue, unless and until nobody consumes it.

        Raises:
            Problem: Nobody does.
        """
        self.check(model, queue)
        limits = self._waiting[queue]
        try:
            async with asyncio.timeout(None) as limit:
                limits.add(limit)
                try:
                    yield
                finally:
                    limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                self.check(model, queue)
            raise

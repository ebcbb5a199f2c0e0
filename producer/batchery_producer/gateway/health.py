"""Whether Redis answers, and who consumes its queues: looked at beside the requests.

Requests for a queue that nobody consumes are refused, so that they do not wait in vain.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from batchery.cli.app import TIMEOUT_S, check_broker
from batchery.errors import StartError
from batchery.transport.channel import LeasingChannel
from batchery.transport.live_workers import LiveWorkers, RegisteredWorker
from batchery.transport.membership import FailureDetector
from batchery_producer.gateway.problems import REDIS_AWAY, Kind, Problem

# Queues without workers


#: Longest time between two looks, in seconds; after a longer one nothing is known of the time
#: before.
MAX_GAP_S = 5.0

#: In how many seconds a caller who was refused may come again.
NO_WORKER_RETRY_S = 5.0


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
                f" {self._grace_s:g} s; unless one still loads its models, start one:"
                f" celery -A batchery.app worker -Q {queue}",
                code="no_worker",
                retry_after_s=NO_WORKER_RETRY_S,
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


# Looks at Redis


logger = logging.getLogger("uvicorn.error")

#: Seconds between two looks.
INTERVAL_S = 1.0

#: A look that takes longer, in seconds, is reported as a Redis that does not answer. Requests go on
#: until it has failed, as a busy Redis may take so long.
SLOW_S = 1.0


class Health:
    """Looks whether the broker answers, and which of its queues have workers."""

    def __init__(self, app: Celery, absence: Absence) -> None:
        self._app = app
        self.absence = absence
        #: Why requests are refused now; empty if they are not. Names no address and no user.
        self.problem = ""
        self._began_s: float | None = None
        self._is_wanted = asyncio.Event()
        self._workers: LiveWorkers | None = None
        # Of its own: threads that others share may all wait for Redis.
        self._thread = ThreadPoolExecutor(1, "batchery-health")

    @property
    def is_silent(self) -> bool:
        """Whether Redis does not answer, as far as is known at this moment."""
        began_s = self._began_s
        return bool(self.problem) or (began_s is not None and time.monotonic() - began_s > SLOW_S)

    def check(self) -> None:
        """Makes sure that jobs can be sent.

        Raises:
            Problem: They cannot.
        """
        if self.problem:
            raise Problem(Kind.UNAVAILABLE, self.problem, retry_after_s=INTERVAL_S)

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            self._is_wanted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_S):
                    await self._is_wanted.wait()

    def look_soon(self) -> None:
        """Looks once more, at once: somebody waits."""
        self._is_wanted.set()

    async def look(self) -> None:
        """Looks once."""
        self._began_s = time.monotonic()
        try:
            absent = await asyncio.get_running_loop().run_in_executor(self._thread, self._look)
        except (StartError, OperationalError, RedisError, OSError) as error:
            if not self.problem:
                logger.warning("%s: %s", REDIS_AWAY, error)
            self.problem = REDIS_AWAY
            self.absence.forget(time.monotonic())
        else:
            self.problem = ""
            self.absence.refuse(absent)
        finally:
            self._began_s = None

    def _look(self) -> set[str]:
        """Returns the queues that nobody consumes."""
        if self._workers is None:
            check_broker(self._app)
            with self._app.connection_for_read() as connection:
                self._workers = LiveWorkers.of(connection, TIMEOUT_S)
            if self._workers is None:
                return set()  # Other brokers do not say who consumes.
        alone = self.absence.without_worker(self._workers.registered(), time.monotonic())
        return set() if alone and self._workers.may_be_others() else alone


async def stop(task: "asyncio.Task[None]") -> None:
    """Cancels a task and waits for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task

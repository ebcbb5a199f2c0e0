"""Membership: this worker sends heartbeats, and a failure detector watches those of the others."""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from time import monotonic
from types import MappingProxyType
from typing import Any

import redis

from batchery.fork_gate import fork_gate
from batchery.transport.dead_letters import find_queue
from batchery.transport.inbox import active_tokens, count_scheduled
from batchery.transport.lease_store import LeaseStore, give_back_left
from batchery.transport.redis_schema import transport_scripts
from batchery.transport.worker_registry import read_expiry, read_text

logger = logging.getLogger("batchery.transport")

#: What becomes of jobs that may have killed a worker, for people.
CAUTION = (
    "they run with nothing next to them, first in halves of their batch,"
    " and one by one if a worker dies again"
)

#: Heartbeats per expiry. On a loaded machine a worker may miss some before it counts as dead.
BEATS_PER_EXPIRY = 5


class FailureDetector:
    """One worker's view of all others. Pure: heartbeats and the time are arguments.

    The age of a heartbeat proves nothing: after an outage of Redis, a paused machine or a jump of
    its clock, all heartbeats are old. A worker counts as dead if its heartbeat stayed the same for
    a full expiry, by this worker's own monotonic clock, and this worker looked without a gap.
    """

    def __init__(self, expiry_s: float, max_gap_s: float) -> None:
        """Knows no worker yet.

        Args:
            expiry_s: How long a worker may send no heartbeat before it counts as dead, in seconds,
                unless it has registered another time.
            max_gap_s: Maximum time between two observations, in seconds; after a longer one, all
                observation starts anew.
        """
        self._expiry_s = expiry_s
        self._max_gap_s = max_gap_s
        self._since: dict[str, tuple[int, float]] = {}
        self._observed_s: float | None = None
        # A new detector starts undisturbed. Otherwise a lone worker that replaces a dead one could
        # never count its predecessor's death.
        self._undisturbed_since_s: float | None = float("-inf")

    def reset(self) -> None:
        """Starts all observation anew, because the connection was lost."""
        self._since.clear()
        self._observed_s = None
        self._undisturbed_since_s = None

    def undisturbed_s(self, now_s: float) -> float:
        """How long the observation has gone on without an interruption, in seconds."""
        return 0.0 if self._undisturbed_since_s is None else now_s - self._undisturbed_since_s

    def observe(
        self,
        heartbeats: Mapping[str, int],
        now_s: float,
        expiries_s: Mapping[str, float] = MappingProxyType({}),
    ) -> list[tuple[str, int]]:
        """Compares the heartbeats with those of the last observation.

        Args:
            heartbeats: Last heartbeat of every worker by its id; compared, but not read as a time.
            now_s: This worker's monotonic clock.
            expiries_s: Expiry of each worker, in seconds; this worker's own for those not named.

        Returns:
            The dead workers, each with its last heartbeat.
        """
        if self._observed_s is not None and now_s - self._observed_s > self._max_gap_s:
            self.reset()
        if self._undisturbed_since_s is None:
            self._undisturbed_since_s = now_s
        self._observed_s = now_s
        self._since = {
            worker: (beat, now_s)
            if (seen := self._since.get(worker)) is None or seen[0] != beat
            else seen
            for worker, beat in heartbeats.items()
        }
        return [
            (worker, beat)
            for worker, (beat, since_s) in self._since.items()
            if now_s - since_s >= expiries_s.get(worker, self._expiry_s)
        ]


class Heartbeat:
    """A thread that renews this worker's leases, and recovers those of dead workers.

    It has its own connection, so Celery's event loop cannot delay it.
    """

    def __init__(self, lease_store: LeaseStore, client: "redis.Redis") -> None:
        """Sends no heartbeat yet.

        Args:
            lease_store: The open lease store of this worker.
            client: A client for this thread alone.
        """
        self._lease_store = lease_store
        self._client = client
        self._scripts = transport_scripts(client)
        # Only this thread runs them, so nothing is lost.
        self._scripts.times = lease_store.scripts.times
        self._pause_s = lease_store.expiry_s / BEATS_PER_EXPIRY
        self._detector = FailureDetector(lease_store.expiry_s, max_gap_s=lease_store.expiry_s / 2)
        self._expiries_s: dict[str, float] = {}
        #: Dead workers whose jobs this one cannot give back.
        self._left: set[str] = set()
        #: How many heartbeats were answered since a channel has left the lease store.
        self._beats_left = 0
        self._stopped = threading.Event()
        # A daemon, as it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="batchery-heartbeat", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; returns at once."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_s):
            try:
                with fork_gate.working():
                    self.beat(monotonic())
            except (redis.RedisError, OSError) as error:
                logger.debug("heartbeat: %r", error)
                self._lease_store.is_silent = True
                self._detector.reset()
            except Exception:
                logger.exception("heartbeat failed")
                self._detector.reset()
        self._client.connection_pool.disconnect()

    def beat(self, now_s: float) -> None:
        """Sends one heartbeat, and observes those of the other workers once.

        Args:
            now_s: Monotonic time in seconds.
        """
        store = self._lease_store
        if store.fenced:
            return
        worker = store.worker
        keys = [store.keys.workers, store.keys.worker_info]
        flat = self._scripts.run("renew", keys, worker, self._describe())
        store.beat_s, store.is_silent = monotonic(), False
        if flat is None:
            if worker == store.worker and store.is_open:
                store.fenced = True
            return
        store.flush()
        self._beats_left = self._beats_left + 1 if store.holder is None else 0
        if self._beats_left > 2 * BEATS_PER_EXPIRY:
            # Of several brokers the worker has another one now, and may never come back.
            give_back_left(store, active_tokens())
        heartbeats = {
            name.decode(): int(float(beat))
            for name, beat in zip(flat[::2], flat[1::2], strict=True)
        }
        del heartbeats[worker]
        expiries_s = self._read_expiries(heartbeats)
        for name, beat in self._detector.observe(heartbeats, now_s, expiries_s):
            self._recover(name, beat, now_s)

    def _describe(self) -> str:
        """What this worker says of itself, with how much of each queue it holds."""
        store, leased = self._lease_store, Counter[str]()
        for key, count in store.leases.by_key().items():
            leased[find_queue(key, store.keys.prefix)] += count
        return store.describe(leased, count_scheduled())

    def _read_expiries(self, workers: Collection[str]) -> Mapping[str, float]:
        """The expiries of other workers, as they registered them."""
        unknown = [worker for worker in workers if worker not in self._expiries_s]
        if unknown:
            infos: Any = self._client.hmget(self._lease_store.keys.worker_info, unknown)
            for worker, about in zip(unknown, infos, strict=True):
                self._expiries_s[worker] = read_expiry(about) or self._lease_store.expiry_s
        self._expiries_s = {worker: self._expiries_s[worker] for worker in workers}
        return self._expiries_s

    def _recover(self, worker: str, beat: int, now_s: float) -> None:
        # Just after an outage many live workers look dead: like this one, they lost the connection.
        counts = self._detector.undisturbed_s(now_s) >= 2 * self._lease_store.expiry_s
        # The script removes what is known of the worker.
        about: Any = self._client.hget(self._lease_store.keys.worker_info, worker)
        keys = self._lease_store.keys.of_recovery(worker)
        try:
            answer: Any = self._scripts.run("recover", keys, worker, beat, int(counts))
        except redis.ResponseError as error:
            # Nothing was done. A worker that may push to those queues will do it.
            if worker not in self._left:
                self._left.add(worker)
                logger.error(
                    "worker %s is dead, and its jobs cannot go back to their queues: %s; see"
                    " `batchery acl -Q` for what the user of a worker must be allowed",
                    *(read_text(about, "name") or worker, error),
                )
            return
        if answer is None:
            return
        count, suspects = answer
        self._lease_store.recovered += count
        why = f"; {suspects} were on a device and may have killed it: {CAUTION}" if suspects else ""
        logger.warning(
            "worker %s is dead; its jobs are back in their queues: %d%s",
            *(read_text(about, "name") or worker, count, why),
        )

"""The heartbeat: keeps this worker's leases, and takes those of workers that died."""

import logging
import threading
from collections.abc import Collection, Mapping
from time import monotonic
from typing import Any

import redis

from batchery.transport.ledger import Ledger
from batchery.transport.member import expiry_in
from batchery.transport.observer import Observer
from batchery.transport.scripts import Scripts

logger = logging.getLogger("batchery.transport")

#: Heartbeats per expiry. A worker may miss some, on a loaded machine, before it counts as dead.
BEATS_PER_EXPIRY = 5


class Heart:
    """A thread with a connection of its own: nothing that Celery's event loop does delays it."""

    def __init__(self, ledger: Ledger, client: "redis.Redis") -> None:
        """Does not beat yet.

        Args:
            ledger: Of this worker, which is open.
            client: For this thread alone.
        """
        self._ledger = ledger
        self._client = client
        self._scripts = Scripts(client)
        self._pause_s = ledger.expiry_s / BEATS_PER_EXPIRY
        self._observer = Observer(ledger.expiry_s, max_gap_s=ledger.expiry_s / 2)
        self._expiries_s: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchery-heart", daemon=True)

    def start(self) -> None:
        """Starts the thread, a daemon: it must not keep a process alive."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; returns at once."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_s):
            try:
                self.beat(monotonic())
            except (redis.RedisError, OSError) as error:
                logger.debug("heartbeat: %r", error)
                self._observer.interrupted()
            except Exception:
                logger.exception("heartbeat failed")
                self._observer.interrupted()
        self._client.connection_pool.disconnect()

    def beat(self, now_s: float) -> None:
        """One heartbeat and one look at the others.

        Args:
            now_s: Monotonic time.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        ledger = self._ledger
        if ledger.fenced:
            return
        worker = ledger.worker
        flat = self._scripts.run("renew", [ledger.keys.workers], worker)
        if flat is None:
            if worker == ledger.worker and ledger.is_open:
                ledger.fenced = True
            return
        ledger.flush()
        beats = {
            name.decode(): int(float(beat))
            for name, beat in zip(flat[::2], flat[1::2], strict=True)
        }
        del beats[worker]
        for name, beat in self._observer.look(beats, now_s, self._expiries_of(beats)):
            self._recover(name, beat, now_s)

    def _expiries_of(self, workers: Collection[str]) -> Mapping[str, float]:
        """How long others may be silent, by what they said when they entered."""
        unknown = [worker for worker in workers if worker not in self._expiries_s]
        if unknown:
            told: Any = self._client.hmget(self._ledger.keys.worker_info, unknown)
            for worker, about in zip(unknown, told, strict=True):
                self._expiries_s[worker] = expiry_in(about) or self._ledger.expiry_s
        self._expiries_s = {worker: self._expiries_s[worker] for worker in workers}
        return self._expiries_s

    def _recover(self, worker: str, beat: int, now_s: float) -> None:
        # Just after an outage many look dead that only lost their connection as we did.
        counts = self._observer.calm_s(now_s) >= 2 * self._ledger.expiry_s
        count: Any = self._scripts.run(
            "recover", self._ledger.keys.of_recovery(worker), worker, beat, int(counts)
        )
        if count is not None:
            logger.warning(
                "worker %s is dead: %d of its jobs are back in their queues", worker, count
            )

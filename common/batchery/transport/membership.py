"""Membership: this worker sends heartbeats, and a failure detector watches those of the others."""

import logging
from collections.abc import Mapping
from types import MappingProxyType

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

"""Who is dead? Pure policy: heartbeats and the time are arguments."""

from collections.abc import Mapping
from types import MappingProxyType


class Observer:
    """One worker's view of all others.

    A heartbeat's own age proves nothing: after an outage of Redis, a paused machine or a jump of
    its clock all are old. What counts is that the same heartbeat was seen unchanged for a full
    expiry, on the observer's own monotonic clock, without a gap in between.
    """

    def __init__(self, expiry_s: float, max_gap_s: float) -> None:
        """Knows nobody yet.

        Args:
            expiry_s: How long a worker that says nothing else may be silent before it counts as
                dead.
            max_gap_s: Longest time between two looks; after a longer one everything starts anew.
        """
        self._expiry_s = expiry_s
        self._max_gap_s = max_gap_s
        self._since: dict[str, tuple[int, float]] = {}
        self._looked_s: float | None = None
        # Who has just come has lost nothing: else the worker that follows a dead one, and is alone,
        # would never count a death.
        self._calm_since_s: float | None = float("-inf")

    def interrupted(self) -> None:
        """Forgets everything: the connection was lost, and with it the proof."""
        self._since.clear()
        self._looked_s = None
        self._calm_since_s = None

    def calm_s(self, now_s: float) -> float:
        """How long nothing has interrupted the observation."""
        return 0.0 if self._calm_since_s is None else now_s - self._calm_since_s

    def look(
        self,
        heartbeats: Mapping[str, int],
        now_s: float,
        expiries_s: Mapping[str, float] = MappingProxyType({}),
    ) -> list[tuple[str, int]]:
        """Takes in what Redis says now.

        Args:
            heartbeats: Last heartbeat of every worker by its id; only compared, never read as time.
            now_s: The observer's monotonic clock.
            expiries_s: How long each of them may be silent; who is not in here, as long as us.

        Returns:
            The dead, each with the heartbeat that was seen.
        """
        if self._looked_s is not None and now_s - self._looked_s > self._max_gap_s:
            self.interrupted()
        if self._calm_since_s is None:
            self._calm_since_s = now_s
        self._looked_s = now_s
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

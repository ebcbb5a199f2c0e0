"""Whether a worker is ready, and whether it is live. Pure: what is seen, and the clock, are given.

Ready is a worker that takes jobs and can run them. Live is one that a restart would not help. So a
Redis that is away makes a worker not ready at once, and not live only after ten minutes: a fresh
worker could do no more than wait, and would load its models first. A device that hangs makes it not
live until its replacement is ready. The worker sees to that by itself: `device_pool/` kills the
device, and its jobs run again.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

#: Heartbeats that may be missing, in their usual pauses, before Redis counts as lost.
MAX_MISSED_BEATS = 3

#: After so much time without Redis a worker is not live, in seconds.
REDIS_GRACE_S = 600.0

#: After so much time in which its event loop did nothing else a worker is not ready, in seconds.
MAX_STILL_S = 30.0


class DeviceSight(NamedTuple):
    """What is seen of a device."""

    name: str
    is_ready: bool
    #: How long it has given no sign although it has work, in seconds.
    silent_s: float = 0.0
    #: Whether it was killed because it hung, and is being replaced.
    is_hung: bool = False


class WorkerSight(NamedTuple):
    """What is seen of a worker."""

    #: None before they were started, and after they were stopped.
    devices: Sequence[DeviceSight] | None
    #: Whether it consumes its queues.
    is_connected: bool
    #: When its last heartbeat was answered, on the clock; None where there are no leases.
    beat_s: float | None = None
    #: Whether the last heartbeat was not answered.
    is_silent: bool = False
    #: For how long its event loop has stood still; 0 where nobody measures it.
    still_s: float = 0.0


class Verdict(NamedTuple):
    """Why a worker is not live, and why it is not ready; empty if it is."""

    not_live: str
    not_ready: str


class HealthPolicy:
    """Judges what is seen of a worker."""

    def __init__(
        self,
        max_pass_s: float | None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Remembers nothing from one judgement to the next.

        Args:
            max_pass_s: How long a device with work may give no sign, in seconds; None for no limit.
            clock: Seconds, as for `WorkerSight.beat_s`.
        """
        self._max_pass_s = max_pass_s
        self._clock = clock

    def judge(self, sight: WorkerSight, beat_pause_s: float = 1.0) -> Verdict:
        """Judges."""
        lost_s = 0.0 if sight.beat_s is None else self._clock() - sight.beat_s
        is_lost = sight.is_silent or lost_s > MAX_MISSED_BEATS * beat_pause_s
        not_live = [*map(self._why_not_live, sight.devices or ())]
        if lost_s > REDIS_GRACE_S:
            not_live.append(f"Redis has not answered for {lost_s:.0f} s")
        not_ready = [
            "the devices have not started" if sight.devices is None else "",
            *(
                f"device {each.name} is not ready"
                for each in sight.devices or ()
                if not each.is_ready
            ),
            "" if sight.is_connected else "the worker does not consume its queues",
            f"the event loop has stood still for {sight.still_s:.0f} s"
            if sight.still_s > MAX_STILL_S
            else "",
            "Redis does not answer" if is_lost else "",
        ]
        dead = "; ".join(filter(None, not_live))
        return Verdict(dead, dead or "; ".join(filter(None, not_ready)))

    def _why_not_live(self, device: DeviceSight) -> str:
        if device.is_hung:
            return f"device {device.name} hung, and is being replaced"
        if self._max_pass_s is not None and device.silent_s > self._max_pass_s:
            return f"device {device.name} has work, and gave no sign for {device.silent_s:.1f} s"
        return ""

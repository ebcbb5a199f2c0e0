"""Whether a worker is ready, and whether it is live. Pure: what is seen, and the clock, are given.

Ready is a worker that takes jobs and can run them. Live is one that a restart would not help. So a
Redis that is away makes a worker not ready at once, and not live only after ten minutes: a fresh
worker could do no more than wait, and would load its models first. A device that hangs makes it not
live until its replacement is ready. The worker sees to that by itself: `device_pool/` kills the
device, and its jobs run again.
"""

from collections.abc import Sequence
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
    #: How long ago its last heartbeat was answered, in seconds; 0 where there are no leases.
    unheard_s: float = 0.0
    #: The usual pause between two of them, in seconds.
    beat_pause_s: float = 1.0
    #: Whether the last heartbeat was not answered.
    is_silent: bool = False
    #: For how long its event loop has stood still; 0 where nobody measures it.
    still_s: float = 0.0


class Verdict(NamedTuple):
    """Why a worker is not live, and why it is not ready; empty if it is."""

    not_live: str
    not_ready: str


def judge(sight: WorkerSight, max_pass_s: float | None) -> Verdict:
    """Judges what is seen of a worker.

    Args:
        sight: That.
        max_pass_s: How long a device with work may give no sign, in seconds; None for no limit.
    """
    devices, not_live, not_ready = sight.devices or (), list[str](), list[str]()
    for each in devices:
        if each.is_hung:
            not_live.append(f"device {each.name} hung, and is being replaced")
        elif max_pass_s is not None and each.silent_s > max_pass_s:
            silence = f"gave no sign for {each.silent_s:.1f} s"
            not_live.append(f"device {each.name} has work, and {silence}")
    if sight.unheard_s > REDIS_GRACE_S:
        not_live.append(f"Redis has not answered for {sight.unheard_s:.0f} s")
    if sight.devices is None:
        not_ready.append("the devices have not started")
    not_ready += [f"device {each.name} is not ready" for each in devices if not each.is_ready]
    if not sight.is_connected:
        not_ready.append("the worker does not consume its queues")
    if sight.still_s > MAX_STILL_S:
        not_ready.append(f"the event loop has stood still for {sight.still_s:.0f} s")
    if sight.is_silent or sight.unheard_s > MAX_MISSED_BEATS * sight.beat_pause_s:
        not_ready.append("Redis does not answer")
    return Verdict("; ".join(not_live), "; ".join(not_live or not_ready))

"""What is different for jobs in slots: their limits, and who makes room for whom."""

from collections.abc import Mapping
from datetime import datetime
from math import inf
from time import monotonic

from batchery_worker.batch import DeviceBatch
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.dispatch.held import HeldBatches
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import Job
from batchery_worker.work import SlotLimits


def limit_in_slots(job: Job[TaskCall], *, sheds_late: bool) -> SlotLimits:
    """The limits of a job on its way to slots, which are minded between two steps.

    Args:
        job: It goes now.
        sheds_late: Whether jobs are given up that cannot make their deadline.
    """
    call = job.payload
    request = None if call.is_plain else call.request
    deadline_s = job.deadline_s - monotonic() if sheds_late else inf
    expires = None if request is None else request.expires
    return SlotLimits(
        job.key.time_limits[1],
        None if deadline_s == inf else deadline_s,
        expires and (expires - datetime.now(expires.tzinfo)).total_seconds(),
    )


def charge_slots(scheduler: Scheduler[TaskCall], held: HeldBatches, now_s: float) -> None:
    """Charges lanes for what their jobs had of slots since the last call.

    Args:
        scheduler: Knows the lanes.
        held: What the device has.
        now_s: The time, on the clock of `time.monotonic`.
    """
    for each in held.batches.values():
        slots = 0 if each.is_aside else each.items_left
        had_s = slots * (now_s - (each.charged_s or each.formed_s))
        each.charged_s = now_s
        scheduler.progress(each.formed, had_s, slots)


def list_victims(batches: Mapping[int, DeviceBatch], ranks: Mapping[int, int]) -> list[int]:
    """Who makes room first: jobs of the lowest class, and of these the one that came last.

    So those before it get on. It does, too, as others only have their share.

    Args:
        batches: What a device has in its slots, by id; ids grow.
        ranks: The places of their classes; the highest is 0.

    Returns:
        The ids of all batches. Those that have made room by now are the last ones; some of them may
        have a slot again of which this process has not heard.
    """
    return sorted(batches, key=lambda each: (batches[each].is_aside, -ranks[each], -each))

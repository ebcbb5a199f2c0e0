"""What is different for jobs in slots: their limits, and who makes room for whom."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from math import inf

from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.device_pool.clocks import MAX_STEP_S
from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.in_flight import DispatchedBatch, TaskCall
from batchery_worker.ipc.messages import SlotLimits, Work
from batchery_worker.job import Job


def limit_in_slots(
    work: Work, job: Job[TaskCall], dispatched: DispatchedBatch, *, sheds_late: bool
) -> Work:
    """A job on its way to slots, where the device minds its limits between two steps.

    Args:
        work: The job.
        job: The same, as the scheduler has it.
        dispatched: The same; its process is killed only some time after the hard limit.
        sheds_late: Whether jobs are given up that cannot make their deadline.
    """
    hard_s, call = dispatched.hard_limit_s, job.payload
    request = None if call.is_plain else call.request
    if hard_s is not None:
        dispatched.hard_limit_s = hard_s + MAX_STEP_S
    deadline_s = job.deadline_s - dispatched.dispatched_s if sheds_late else inf
    expires = None if request is None else request.expires
    return replace(
        work,
        slot_limits=SlotLimits(
            hard_s,
            None if deadline_s == inf else deadline_s,
            expires and (expires - datetime.now(expires.tzinfo)).total_seconds(),
        ),
    )


def charge_slots(
    scheduler: Scheduler[TaskCall], devices: Iterable[DeviceProcess], now_s: float
) -> None:
    """Charges lanes for what their jobs had of slots since the last call.

    Args:
        scheduler: Knows the lanes.
        devices: All of them.
        now_s: The time, on the clock of `DispatchedBatch.dispatched_s`.
    """
    for device in devices:
        for each in device.batches.values() if device.setup.slots else ():
            slots = 0 if each.is_aside else each.items_left
            had_s = slots * (now_s - (each.charged_s or each.dispatched_s))
            each.charged_s = now_s
            scheduler.progress(each.batch, had_s, slots)


def list_victims(batches: Mapping[int, DispatchedBatch], ranks: Mapping[int, int]) -> list[int]:
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

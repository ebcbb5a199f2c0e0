"""What is different for jobs in slots: their limits, who makes room for whom, deaths."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from math import inf

from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.device_pool.supervisor import MAX_STEP_S
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
    hard_s, request = dispatched.hard_limit_s, job.payload.request
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


def find_victim(
    batches: Sequence[DispatchedBatch], rank: Callable[[str], int]
) -> DispatchedBatch | None:
    """The job that makes room first: of the lowest class, and of these the one that came last.

    A job makes room once at most, so that it ends however many others come.

    Args:
        batches: What a device has in its slots.
        rank: Place of a class; the highest is 0.

    Returns:
        Its batch; None if there is none.
    """
    return max(
        (each for each in batches if not each.is_aside),
        key=lambda each: (rank(each.batch.jobs[0].lane.priority_class), each.dispatched_s),
        default=None,
    )


def put_aside(device: DeviceProcess, victim: DispatchedBatch) -> int:
    """Notes that a job makes room; returns the id of its batch."""
    victim.is_aside = True
    return next(number for number, each in device.batches.items() if each is victim)


def merge_slots(batches: Sequence[DispatchedBatch]) -> Sequence[DispatchedBatch]:
    """The batches of a device that has died; those in its slots, one job each, as one batch."""
    if not batches or not batches[0].in_slots:
        return batches
    jobs = tuple(job for each in batches for job in each.batch.jobs)
    batch = replace(batches[0].batch, jobs=jobs)
    return [replace(batches[0], batch=batch, expired=any(each.expired for each in batches))]

"""Poison detection: which job killed its device, and what becomes of it.

Only a job that ran alone can be blamed for a death. So after a death the suspects are quarantined:
they run in halves of their batch, then alone. A job that kills twice while alone becomes a dead
letter.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from celery.exceptions import TimeLimitExceeded

from batchery.errors import DeviceDied
from batchery.transport.lease_store import LeaseStore
from batchery.transport.leases import Deaths
from batchery_worker.batch import DeviceBatch
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.completion.settlement import Settlement
from batchery_worker.dispatch.dead_letters import dead_letter_on_ack
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.ipc.messages import HISTORY, Handed
from batchery_worker.job import Job
from batchery_worker.request import get_lease_store

logger = logging.getLogger(__name__)

#: How often a job may kill its device process, or its worker, while it runs there alone.
MAX_DEATHS = 2


class RunningNote(NamedTuple):
    """What the broker was told of a batch on a device."""

    store: LeaseStore
    batch: int


class PoisonDetector:
    """Quarantines suspects, and ends jobs that killed too often; for one thread."""

    def __init__(
        self, scheduler: Scheduler[TaskCall], settlement: Settlement, in_flight: InFlight
    ) -> None:
        self._scheduler = scheduler
        self._settlement = settlement
        self._in_flight = in_flight

    def admit(self, job: Job[TaskCall]) -> None:
        """Takes in a job, which may have been on a device that died."""
        if job.payload.is_plain:
            self._scheduler.admit(job)
            return
        deaths, limit_s = read_history(job.payload)
        if limit_s is not None:
            self._in_flight.add(job.payload, os.getpid())
            self._settlement.fail(job.payload, TimeLimitExceeded(limit_s))
        elif deaths is None:
            self._scheduler.admit(job)
        elif deaths.alone < MAX_DEATHS:
            among = max(1, deaths.group_size // 2)
            job = replace(job, deaths=deaths.alone, recovered=True, among=among)
            self._scheduler.quarantine(job)
        else:
            self._in_flight.add(job.payload, os.getpid())
            self._end(replace(job, deaths=deaths.alone), "its device or worker died")

    def _end(self, job: Job[TaskCall], what: str) -> None:
        """Makes a dead letter of a poison job, and tells its caller."""
        reason = (
            f"{job.key.task}[{job.id}] was running alone when {what};"
            f" that happened {job.deaths} times, so it is not run again"
        )
        call = job.payload
        if call.request is not None and call.lease is not None:
            dead_letter_on_ack(call.request.message, reason)
        self._settlement.fail(call, DeviceDied(reason))


def read_history(call: TaskCall) -> tuple[Deaths | None, float | None]:
    """What is known of earlier runs of a job.

    Returns:
        The deaths of its devices or workers, None if it is no suspect; and the hard time limit that
        it has reached, in seconds.
    """
    if (lease := call.lease) is not None:
        return lease.store.deaths(lease.token), lease.store.expired_s(lease.token)
    handed = None if call.request is None else call.request.message.properties.get(HISTORY)
    return (handed.deaths, handed.expired_s) if isinstance(handed, Handed) else (None, None)


def note_begin(
    jobs: Sequence[Job[TaskCall]], *, alone: bool, in_slots: bool = False
) -> RunningNote | None:
    """Tells the broker what is about to run, so that a death of this worker can be blamed on it.

    Args:
        jobs: Those of a batch.
        alone: Whether no other job runs meanwhile on its device.
        in_slots: Whether others do.

    Returns:
        A note for `note_end`; None where there are no leases.
    """
    leases = [job.payload.lease for job in jobs]
    store = get_lease_store(leases)
    if store is None:
        return None
    held = {
        lease.token: job.id
        for job, lease in zip(jobs, leases, strict=True)
        if lease is not None and lease.store is store
    }
    return RunningNote(store, store.began(held, alone=alone, in_slots=in_slots))


def note_end(batch: DeviceBatch) -> None:
    """Notes that a batch is answered; the broker hears it with the next batch."""
    if isinstance(batch.note, RunningNote):
        batch.note.store.ended(batch.note.batch)

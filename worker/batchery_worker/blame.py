"""Whose fault is a death? Only a job that ran alone can be blamed; who is, twice, is buried."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from celery.exceptions import TimeLimitExceeded

from batchery.errors import DeviceDied
from batchery.transport.ledger import Ledger
from batchery_worker.accepted import Accepted
from batchery_worker.process import DeviceProcess, Flight
from batchery_worker.request import ledger_of
from batchery_worker.scheduler import Job, Scheduler
from batchery_worker.settlement import Settlement
from batchery_worker.ticket import Ticket
from batchery_worker.undertaker import condemn

#: How often a job may kill its device process, or its worker, while it runs there alone.
MAX_DEATHS = 2


class Note(NamedTuple):
    """What the broker was told of a batch on a device."""

    ledger: Ledger
    batch: int


class Blame:
    """Runs suspects alone, and those that killed too often not at all; for one thread."""

    def __init__(
        self, scheduler: Scheduler[Ticket], settlement: Settlement, accepted: Accepted
    ) -> None:
        self._scheduler = scheduler
        self._settlement = settlement
        self._accepted = accepted

    def admit(self, job: Job[Ticket]) -> None:
        """Takes in a job, which may have been on a device when an earlier worker died."""
        lease = job.payload.lease
        deaths = None if lease is None else lease.ledger.deaths(lease.token)
        if deaths is None:
            self._scheduler.admit(job)
        elif deaths < MAX_DEATHS:
            self._scheduler.recall(replace(job, deaths=deaths, recalled=True))
        else:
            self._accepted.add(job.payload, os.getpid())
            self._convict(replace(job, deaths=deaths), "its worker died")

    def died_with(self, job: Job[Ticket], flight: Flight, how: str) -> None:
        """The device of a job has died, or was killed as its time was over.

        Args:
            job: Not committed; its message is still ours.
            flight: Its batch.
            how: How the device died, for people.
        """
        if not flight.batch.alone:
            self._scheduler.suspect(job)
            return
        job = replace(job, deaths=job.deaths + 1)
        if flight.expired:
            self._settlement.fail(job.payload, TimeLimitExceeded(flight.hard_limit_s))
        elif job.deaths < MAX_DEATHS:
            self._scheduler.suspect(job)
        else:
            self._convict(job, f"the {how}")

    def _convict(self, job: Job[Ticket], what: str) -> None:
        reason = (
            f"{job.key.task}[{job.id}] was running alone when {what};"
            f" that happened {job.deaths} times, so it is not run again"
        )
        ticket = job.payload
        if ticket.request is not None and ticket.lease is not None:
            condemn(ticket.request.message, reason)
        self._settlement.fail(ticket, DeviceDied(reason))


def note_begin(jobs: Sequence[Job[Ticket]], *, alone: bool) -> Note | None:
    """Tells the broker what is about to run, so that this worker's death can be blamed on it.

    Returns:
        For `note_end`; None where there are no leases.
    """
    leases = [job.payload.lease for job in jobs]
    ledger = ledger_of(leases)
    if ledger is None:
        return None
    held = {
        lease.token: job.id
        for job, lease in zip(jobs, leases, strict=True)
        if lease is not None and lease.ledger is ledger
    }
    return Note(ledger, ledger.began(held, alone=alone))


def note_end(flight: Flight) -> None:
    """The batch is back, or its device died; the broker hears of it with the next batch."""
    if flight.note is not None:
        flight.note.ledger.ended(flight.note.batch)


def is_reserved(devices: Iterable[DeviceProcess]) -> bool:
    """Whether a job runs that may kill the worker: nothing may run beside it, on any device."""
    return any(
        flight.batch.alone and flight.batch.jobs[0].recalled
        for device in devices
        for flight in device.flights.values()
    )

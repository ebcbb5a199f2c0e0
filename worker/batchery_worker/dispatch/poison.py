"""Poison detection: which job killed its device, and what becomes of it.

Only a job that ran alone can be blamed for a death. So after a death the suspects are quarantined:
they run in halves of their batch, then alone; alone, a job with several items runs them one by one.
An item that kills twice then fails, and is not run again. Any other job that kills twice while it
is alone becomes a dead letter.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery.exceptions import TimeLimitExceeded

from batchery.errors import DeviceDied
from batchery.transport.suspects import Deaths
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.completion.settlement import Settlement
from batchery_worker.dispatch.dead_letters import dead_letter_on_ack
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.ipc.messages import HISTORY, Handed
from batchery_worker.job import Job

logger = logging.getLogger(__name__)

#: How often a job, or an item of it, may kill its device process or its worker, alone there.
MAX_DEATHS = 2

#: How many items of a job may do that.
MAX_DEAD_ITEMS = 8


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
        deaths, limit_s = read_history(job.payload)
        if limit_s is not None:
            self._in_flight.add(job.payload, os.getpid())
            self._settlement.fail(job.payload, TimeLimitExceeded(limit_s))
        elif deaths is None:
            self._scheduler.admit(job)
        elif deaths.alone < MAX_DEATHS or has_culprits(job.payload, deaths.alone):
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
        if call.lease is not None:
            dead_letter_on_ack(call.request.message, reason)
        self._settlement.fail(call, DeviceDied(reason))


def find_culprits(call: TaskCall) -> Sequence[int]:
    """Places of the items of a suspect that have ended a device, once for each time."""
    handle = call.lease
    lease = None if handle is None else handle.store.leases.get(handle.token)
    if lease is None or lease.deaths is None:
        return ()
    # A run that was ended in order, which counts no death, has noted an item, too.
    return lease.last_items[: lease.deaths.alone]


def has_culprits(call: TaskCall, deaths: int) -> bool:
    """Whether each of so many deaths has its item, and the job may go on without those."""
    return len(find_culprits(call)) == deaths <= MAX_DEATHS * MAX_DEAD_ITEMS


def find_dead_items(culprits: Sequence[int]) -> set[int]:
    """Places of the items that are not run again."""
    return {place for place, deaths in Counter(culprits).items() if deaths >= MAX_DEATHS}


def read_history(call: TaskCall) -> tuple[Deaths | None, float | None]:
    """What is known of earlier runs of a job.

    Returns:
        The deaths of its devices or workers, None if it is no suspect; and the hard time limit that
        it has reached, in seconds.
    """
    known: Any = None
    if (handle := call.lease) is not None:
        known = handle.store.leases.get(handle.token)
    elif isinstance(handed := call.request.message.properties.get(HISTORY), Handed):
        known = handed
    return (None, None) if known is None else (known.deaths, known.expired_s)

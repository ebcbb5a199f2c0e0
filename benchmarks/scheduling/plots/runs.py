"""One run of the worker's scheduler in virtual time, and what became of each job: pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from random import Random
from typing import Any

from batchery_worker.job import Limits
from batchery_worker.simulator.engine import Fleet, ServiceTime, Simulation
from batchery_worker.simulator.outcome import percentile
from batchery_worker.simulator.policies import RealScheduler, SimulatedBatch
from batchery_worker.simulator.workload import MS_PER_S, Arrival, JobKind, arrivals, poisson_times

#: Numbers, names and lists of them: what a picture shows, and what JSON can hold.
Figures = dict[str, Any]

#: Of all streams of jobs.
SEED = 1

#: Maximum number of items in a batch, and in a forward pass.
BATCH_SIZE = 16

#: One device, which takes 100 ms for a full batch. A larger message runs in several passes.
DEVICE = Fleet(1, ServiceTime(pass_ms=20, item_ms=5, micro_batch_size=BATCH_SIZE))

#: Items per second that it can do in full batches.
CAPACITY_PER_S = DEVICE.capacity_per_s(BATCH_SIZE)

LIMITS = Limits(BATCH_SIZE)


@dataclass(frozen=True, slots=True)
class Done:
    """A job that was done; times in seconds."""

    #: As it was before `as_seen`.
    job: Arrival
    began_s: float
    done_s: float

    @property
    def latency_ms(self) -> float:
        """From its arrival to its result."""
        return (self.done_s - self.job.time_s) * MS_PER_S


def simulated(
    scheduler: RealScheduler,
    jobs: Iterable[Arrival],
    *,
    fleet: Fleet = DEVICE,
    limits: Limits = LIMITS,
    as_seen: Callable[[Arrival], Arrival] = lambda job: job,
) -> list[Done]:
    """Runs jobs.

    Args:
        scheduler: Fresh.
        jobs: In any order.
        fleet: The devices.
        limits: Of all batches.
        as_seen: Makes of each job what the scheduler sees, such as one without its class.

    Returns:
        The jobs that were done, as they were done; those that were given up are missing.
    """
    # The order of those that come at the same time stays.
    stream = sorted(jobs, key=attrgetter("time_s"))
    done: list[Done] = []

    def note(batch: SimulatedBatch, began_s: float, end_s: float) -> None:
        # The simulation numbers jobs from 1.
        done.extend(Done(stream[int(job.id) - 1], began_s, end_s) for job in batch.jobs)

    Simulation(scheduler, fleet, limits, SEED, note).run(map(as_seen, stream))
    return done


def poisson(rate_per_s: float, seconds: float, kind: JobKind, seed: int = SEED) -> list[Arrival]:
    """Jobs that know nothing of each other.

    Args:
        rate_per_s: How many come.
        seconds: For how long they come.
        kind: What they are like.
        seed: Another one for each stream of a run.
    """
    random = Random(seed)
    times_s = takewhile(lambda each: each < seconds, poisson_times(rate_per_s, random))
    return list(arrivals(times_s, kind, random))


def percentile_ms(done: Iterable[Done], percent: float) -> float:
    """A percentile of the latency; there must be jobs."""
    found = percentile(sorted(each.latency_ms for each in done), percent / 100)
    assert found is not None
    return round(found, 2)

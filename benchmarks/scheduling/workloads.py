"""Which jobs come, and when: made with a seed, so the same for all policies."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import merge
from itertools import count, takewhile
from operator import attrgetter
from random import Random

from batchery_worker.job import Lane
from benchmarks.scheduling.virtual import Arrival

#: Two classes of live jobs, of which the higher one is the smaller one.
HIGH, NORMAL = Lane("high"), Lane("normal")
HIGH_SHARE = 0.3

#: Nobody waits for these jobs: they fill what the others leave.
BULK = Lane("low", "bulk")
BULK_ITEMS = 16

#: A burst has so many times the mean rate, lasts so many seconds, and is so much of the time.
BURST_FACTOR, BURST_S, BURST_SHARE = 2.5, 0.5, 0.2

#: How far the rate of a day is above its mean at noon, and below it at midnight.
DAY_SWING = 0.5

#: Number of tenants beside the one that sends half of everything.
SMALL_TENANTS = 9

Pick = Callable[[Random], Lane]


@dataclass(frozen=True, slots=True)
class Demand:
    """How much comes."""

    #: Live jobs, each of one item.
    rate_per_s: float
    #: For how long.
    seconds: float
    #: Items per second that the devices do in full batches.
    capacity_per_s: float
    seed: int


def poisson_times(rate_per_s: float, random: Random) -> Iterator[float]:
    """Times in seconds that know nothing of each other, without end."""
    now_s = 0.0
    while True:
        now_s += random.expovariate(rate_per_s)
        yield now_s


def bursty_times(rate_per_s: float, random: Random) -> Iterator[float]:
    """Times of a stream that is in a burst or between two, by chance."""
    calm_rate_per_s = rate_per_s * (1 - BURST_FACTOR * BURST_SHARE) / (1 - BURST_SHARE)
    calm_s = BURST_S * (1 - BURST_SHARE) / BURST_SHARE
    now_s, in_burst = 0.0, False
    while True:
        end_s = now_s + random.expovariate(1 / (BURST_S if in_burst else calm_s))
        rate = rate_per_s * BURST_FACTOR if in_burst else calm_rate_per_s
        while (now_s := now_s + random.expovariate(rate)) < end_s:
            yield now_s
        now_s, in_burst = end_s, not in_burst


def day_times(rate_per_s: float, day_s: float, random: Random) -> Iterator[float]:
    """Times of a stream whose rate is a sine, lowest at 0 seconds, highest half a day later."""
    highest_per_s = rate_per_s * (1 + DAY_SWING)
    for now_s in poisson_times(highest_per_s, random):
        wanted_per_s = rate_per_s * (1 - DAY_SWING * math.cos(2 * math.pi * now_s / day_s))
        if random.random() * highest_per_s < wanted_per_s:
            yield now_s


def live(random: Random) -> Lane:
    """The lane of the next live job."""
    return HIGH if random.random() < HIGH_SHARE else NORMAL


def small_tenant(random: Random) -> Lane:
    """The lane of one of the tenants that send little."""
    return Lane("normal", f"small{random.randrange(SMALL_TENANTS)}")


def arrivals(times_s: Iterator[float], pick: Pick, random: Random) -> Iterator[Arrival]:
    """A job of one item for each time."""
    return (Arrival(time_s, pick(random)) for time_s in times_s)


def poisson(demand: Demand) -> Iterator[Arrival]:
    """Jobs that know nothing of each other."""
    random = Random(demand.seed)
    return arrivals(poisson_times(demand.rate_per_s, random), live, random)


def bursty(demand: Demand) -> Iterator[Arrival]:
    """Bursts of half a second on average, at 2.5 times the mean rate."""
    random = Random(demand.seed)
    return arrivals(bursty_times(demand.rate_per_s, random), live, random)


def day(demand: Demand) -> Iterator[Arrival]:
    """A day in the time of the run: half more than the mean at noon."""
    random = Random(demand.seed)
    return arrivals(day_times(demand.rate_per_s, demand.seconds, random), live, random)


def bulk(demand: Demand) -> Iterator[Arrival]:
    """Half of the live jobs, beside a bulk that would keep all devices busy by itself."""
    each_s = BULK_ITEMS / demand.capacity_per_s
    # What comes in the first quarter of a second is there at once.
    times_s = (max(0.0, number * each_s - 0.25) for number in count())
    bulk_jobs = (Arrival(time_s, BULK, BULK_ITEMS) for time_s in times_s)
    live_jobs = poisson(replace(demand, rate_per_s=demand.rate_per_s / 2))
    return merge(live_jobs, bulk_jobs, key=attrgetter("time_s"))


def tenants(demand: Demand) -> Iterator[Arrival]:
    """One tenant sends half of all jobs, in bursts; nine share the rest."""
    random, others = Random(demand.seed), Random(demand.seed + 1)
    large = arrivals(
        bursty_times(demand.rate_per_s / 2, random), lambda _: Lane("normal", "large"), random
    )
    small = arrivals(poisson_times(demand.rate_per_s / 2, others), small_tenant, others)
    return merge(large, small, key=attrgetter("time_s"))


WORKLOADS: Mapping[str, Callable[[Demand], Iterator[Arrival]]] = {
    each.__name__: each for each in (poisson, bursty, day, bulk, tenants)
}


def make_jobs(name: str, demand: Demand) -> list[Arrival]:
    """All jobs of a workload; the same demand gives the same ones."""
    return list(takewhile(lambda job: job.time_s < demand.seconds, WORKLOADS[name](demand)))

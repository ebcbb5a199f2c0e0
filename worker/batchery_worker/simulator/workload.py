"""Which jobs come, and when: made with a seed, the same each time; or recorded, from a file."""

import json
import math
import sys
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate, count
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from batchery.errors import DatasetError
from batchery.settings import Settings
from batchery_worker.job import USUAL_LANE, Lane

MS_PER_S = 1000

#: Task of the jobs that are made here.
TASK = "task"

#: A burst has so many times the mean rate, ...
BURST_FACTOR = 2.5

#: ... lasts so many seconds on average, ...
BURST_S = 0.5

#: ... and so much of the time is a burst. What comes between them makes up the mean.
BURST_SHARE = 0.2

#: How far the rate of a day is above its mean at noon, and below it at midnight, as a share of it.
DAY_SWING = 0.5

#: Items of each job of the bulk, unless a batch has fewer.
BULK_ITEMS = 16

#: Batches of the bulk that are there for each device at the start.
BULK_HEAD_BATCHES = 4

#: Fields of a recorded job; all but the first may be left out.
FIELDS = ("time_s", "task", "class", "tenant", "items", "tokens", "deadline_s")

#: Maximum number of characters of a wrong value that an error shows.
MAX_SHOWN = 40

#: Number of tenants beside the one that sends half of everything.
SMALL_TENANTS = 9


class Arrival(NamedTuple):
    """A job that comes."""

    time_s: float
    task: str
    lane: Lane
    #: At least 1.
    items: int = 1
    #: Of all its items together; 0 where they do not matter.
    tokens: int = 0
    #: After how many seconds from its arrival nobody wants the result any more; None for never.
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Amount:
    """A log-normal number of at least 1, as of items or tokens."""

    mean: float = 1.0
    #: Standard deviation of the logarithm; 0 for the mean itself each time.
    sigma: float = 0.0

    def draw(self, random: Random) -> int:
        """The next number."""
        if not self.sigma:
            return max(1, round(self.mean))
        centre = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(random.lognormvariate(centre, self.sigma)))


@dataclass(frozen=True, slots=True)
class JobKind:
    """What the jobs of one stream are like."""

    #: Lane -> how often its jobs come; only the ratios matter.
    lanes: Mapping[Lane, float] = field(default_factory=lambda: {USUAL_LANE: 1.0})
    items: Amount = Amount()
    deadline_s: float | None = None
    task: str = TASK


def arrivals(times_s: Iterator[float], kind: JobKind, random: Random) -> Iterator[Arrival]:
    """Makes a job for each time."""
    lanes = list(kind.lanes)
    bounds = list(accumulate(kind.lanes.values()))
    total = bounds.pop()
    for time_s in times_s:
        lane = lanes[bisect(bounds, random.random() * total)] if bounds else lanes[0]
        items = kind.items.draw(random)
        yield Arrival(time_s, kind.task, lane, items, deadline_s=kind.deadline_s)


def together(*streams: Iterator[Arrival]) -> Iterator[Arrival]:
    """Several streams as one, in the order of time."""
    return merge(*streams, key=attrgetter("time_s"))


def poisson_times(rate_per_s: float, random: Random) -> Iterator[float]:
    """Times in seconds, independent of each other, without end."""
    now_s = 0.0
    while True:
        now_s += random.expovariate(rate_per_s)
        yield now_s


def bursty_times(rate_per_s: float, random: Random) -> Iterator[float]:
    """Times of a stream that is in a burst or between two, by chance: a Markov-modulated Poisson.

    Args:
        rate_per_s: Mean over bursts and the time between them.
        random: Source of chance.
    """
    low_rate_per_s = rate_per_s * (1 - BURST_FACTOR * BURST_SHARE) / (1 - BURST_SHARE)
    calm_s = BURST_S * (1 - BURST_SHARE) / BURST_SHARE
    now_s = 0.0
    in_burst = False
    while True:
        end_s = now_s + random.expovariate(1 / (BURST_S if in_burst else calm_s))
        rate = rate_per_s * BURST_FACTOR if in_burst else low_rate_per_s
        while (now_s := now_s + random.expovariate(rate)) < end_s:
            yield now_s
        # The exponential law has no memory, so the rest of the last pause counts for nothing.
        now_s, in_burst = end_s, not in_burst


def day_times(rate_per_s: float, day_s: float, random: Random) -> Iterator[float]:
    """Times of a stream whose rate is a sine, lowest at 0 seconds and highest half a day later.

    Args:
        rate_per_s: Mean over the day.
        day_s: Length of the day.
        random: Source of chance.
    """
    highest_per_s = rate_per_s * (1 + DAY_SWING)
    for now_s in poisson_times(highest_per_s, random):
        wanted_per_s = rate_per_s * (1 - DAY_SWING * math.cos(2 * math.pi * now_s / day_s))
        if random.random() * highest_per_s < wanted_per_s:
            yield now_s


def steady_times(rate_per_s: float, head: int) -> Iterator[float]:
    """Times at equal distances; so many of them at the start."""
    yield from (0.0 for _ in range(head))
    for number in count(1):
        yield number / rate_per_s


@dataclass(frozen=True, slots=True)
class Demand:
    """How much comes, for the workloads of `WORKLOADS`."""

    #: Jobs per second, without those of the bulk.
    rate_per_s: float
    #: Items per second that all devices together compute in full batches.
    capacity_per_s: float
    #: Length of the whole run.
    seconds: float
    devices: int = 1
    max_batch_size: int = 64
    items: Amount = Amount()
    deadline_s: float | None = None
    seed: int = 0

    def kind(self, lanes: Mapping[Lane, float]) -> JobKind:
        """Jobs of these lanes."""
        return JobKind(lanes, self.items, self.deadline_s)


#: Share of each class that there is by default, highest class first: the workloads are made for
#: these classes.
DEFAULT_SHARES: Mapping[str, float] = {
    name: each.share for name, each in Settings.model_fields["classes"].default.items()
}

#: Two live classes, of which the higher one is the smaller one.
LIVE = {Lane("high"): 0.3, Lane("normal"): 0.7}

#: Who waits for nothing: these jobs fill what the others leave.
BULK = Lane("low", "bulk")


def _poisson(demand: Demand) -> Iterator[Arrival]:
    random = Random(demand.seed)
    return arrivals(poisson_times(demand.rate_per_s, random), demand.kind(LIVE), random)


def _bursty(demand: Demand) -> Iterator[Arrival]:
    random = Random(demand.seed)
    return arrivals(bursty_times(demand.rate_per_s, random), demand.kind(LIVE), random)


def _day(demand: Demand) -> Iterator[Arrival]:
    random = Random(demand.seed)
    times_s = day_times(demand.rate_per_s, demand.seconds, random)
    return arrivals(times_s, demand.kind(LIVE), random)


def _bulk(demand: Demand) -> Iterator[Arrival]:
    """Half of the live jobs, beside a bulk that would keep all devices busy by itself."""
    random = Random(demand.seed)
    live = arrivals(poisson_times(demand.rate_per_s / 2, random), demand.kind(LIVE), random)
    items = min(BULK_ITEMS, demand.max_batch_size)
    head = BULK_HEAD_BATCHES * demand.devices * math.ceil(demand.max_batch_size / items)
    # A bulk has no deadline, and a generator of its own: live jobs are the same without it.
    bulk = JobKind({BULK: 1.0}, Amount(items))
    times_s = steady_times(demand.capacity_per_s / items, head)
    return together(live, arrivals(times_s, bulk, Random(demand.seed + 1)))


def _tenants(demand: Demand) -> Iterator[Arrival]:
    """One tenant sends half of all jobs, in bursts; the others share the other half."""
    random, others = Random(demand.seed), Random(demand.seed + 1)
    large = demand.kind({Lane("normal", "large"): 1.0})
    small = demand.kind({Lane("normal", f"small{n}"): 1.0 for n in range(1, SMALL_TENANTS + 1)})
    return together(
        arrivals(bursty_times(demand.rate_per_s / 2, random), large, random),
        arrivals(poisson_times(demand.rate_per_s / 2, others), small, others),
    )


#: Name -> endless stream of jobs.
WORKLOADS: Mapping[str, Callable[[Demand], Iterator[Arrival]]] = {
    "poisson": _poisson,
    "bursty": _bursty,
    "day": _day,
    "bulk": _bulk,
    "tenants": _tenants,
}

#: Name of a workload -> classes for which nobody waits, so that no target is missed by them.
PATIENT: Mapping[str, frozenset[str]] = {"bulk": frozenset({BULK.priority_class})}


# Recorded jobs


def read_trace(path: Path, classes: Collection[str]) -> Sequence[Arrival]:
    """Reads a whole trace.

    A line is one job: a JSON object with `time_s`, the seconds since any moment, and perhaps
    `task`, `class`, `tenant`, `items`, `tokens` and `deadline_s`, the seconds from its arrival.
    Lines may be in any order. The first job comes at 0, whatever its time is. Empty lines are
    skipped.

    Args:
        path: Of the file.
        classes: Names of the priority classes; the first is that of lines without one.

    Returns:
        The jobs, in the order of time.

    Raises:
        DatasetError: The file cannot be read, or a line is wrong; names file, line and problem.
    """
    #: Lanes are few, and jobs are many.
    lanes: dict[Lane, Lane] = {}
    jobs = [_arrival(line, f"{path}:{number}", classes, lanes) for number, line in _lines(path)]
    jobs.sort(key=attrgetter("time_s"))
    first_s = jobs[0].time_s if jobs else 0.0
    return [job._replace(time_s=job.time_s - first_s) for job in jobs]


def _arrival(line: str, place: str, classes: Collection[str], lanes: dict[Lane, Lane]) -> Arrival:
    row = _parse(line, place)
    time_s = _seconds(row, "time_s", place)
    if time_s is None:
        raise DatasetError(f"{place}: no time_s; give the seconds since any moment")
    usual = next(iter(classes))
    lane = Lane(_text(row, "class", usual, place), _text(row, "tenant", "", place))
    if lane.priority_class not in classes:
        raise DatasetError(
            f"{place}: no class {lane.priority_class!r}; there are {', '.join(classes)};"
            " others are those of the setting `classes`, as in the batchery.toml of this folder"
        )
    return Arrival(
        time_s,
        sys.intern(_text(row, "task", TASK, place)),
        lanes.setdefault(lane, lane),
        _count(row, "items", 1, place),
        _count(row, "tokens", 0, place),
        _seconds(row, "deadline_s", place),
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        # Windows may put a mark before the text.
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{path}:{number + 1}: is no text in UTF-8") from None


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{place}: {_shown(row)} is no JSON object; a job has fields")
    if unknown := sorted(set(row) - set(FIELDS)):
        raise DatasetError(f"{place}: no field {unknown[0]!r}; there are {', '.join(FIELDS)}")
    return row


def _seconds(row: dict[str, Any], field: str, place: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DatasetError(f"{place}: {field} is {_shown(value)}; it must be a number of seconds")
    # JSON has whole numbers that are larger than any float.
    if not 0 <= value <= sys.float_info.max:
        raise DatasetError(f"{place}: {field} is {_shown(value)}; it must be at least 0")
    return float(value)


def _count(row: dict[str, Any], field: str, default: int, place: str) -> int:
    value = row.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < default:
        expected = f"it must be a whole number of at least {default}"
        raise DatasetError(f"{place}: {field} is {_shown(value)}; {expected}")
    return value


def _text(row: dict[str, Any], field: str, default: str, place: str) -> str:
    value = row.get(field, default)
    if not isinstance(value, str):
        raise DatasetError(f"{place}: {field} is {_shown(value)}; it must be a text")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."

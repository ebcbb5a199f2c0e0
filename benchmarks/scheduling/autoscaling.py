"""A day of load with KEDA: how many GPU hours against a fixed size, and who waits.

Virtual time: the worker's own scheduler decides on batches, the numbers of the chart's ScaledObject
decide how many pods there are. Live jobs follow the hours of a day; 100,000 jobs of bulk come at
one o'clock at night. A pod has one GPU, paid from its start, while its models load, until its last
batch is finished. A wait is from the arrival of a job to the begin of its batch.

    python -m benchmarks.scheduling.autoscaling --json benchmarks/results/autoscaling.json

`--try 16,5,300` adds a row with other numbers: jobs for each pod, age of the oldest, cooldown. The
published figures are with `--try 500,30,600 --try 64,10,600 --try 8,10,600`.
"""

import argparse
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from batchery_worker.job import Lane, Limits
from batchery_worker.simulator.engine import Fleet, ServiceTime, Simulation
from batchery_worker.simulator.outcome import percentile
from batchery_worker.simulator.policies import RealScheduler, SimulatedBatch, SimulatedJob
from batchery_worker.simulator.workload import DEFAULT_SHARES, TASK, Arrival, poisson_times
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.report import WIDTH
from benchmarks.scheduling.keda import SYNC_S, Autoscaler, Scaling, read_scaling

VALUES = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "batchery" / "values.yaml"
CHART = yaml.safe_load(VALUES.read_text(encoding="utf-8"))

HOUR_S = 3600.0

#: Live jobs at each full hour, as a share of the peak; in between, a straight line.
HOURS = (
    *(0.0001, 0.0001, 0.0001, 0.0001, 0.0002, 0.01, 0.08, 0.25, 0.6, 0.9, 1.0, 0.9),
    *(0.6, 0.7, 0.9, 1.0, 0.9, 0.6, 0.4, 0.3, 0.2, 0.1, 0.03, 0.005),
)

LIVE, BULK = Lane("high"), Lane("low", "bulk")
BULK_HOUR = 1.0

#: A heavy model: 3.7 items/s in full batches, of four passes each.
BATCH_SIZE = 16
DEVICE = ServiceTime(pass_ms=200, item_ms=220, micro_batch_size=4)
CAPACITY_PER_S = Fleet(1, DEVICE).capacity_per_s(BATCH_SIZE)

#: Share of its time for which a fixed size is busy, where it is made for the peak.
PEAK_LOAD = 0.8

#: When Prometheus, KEDA and the autoscaler first look, in seconds: they do so one after the other.
SCRAPE_PHASE_S, POLL_PHASE_S, SYNC_PHASE_S = 0.0, 4.0, 9.0

#: A live job that waits for longer has been noticed, in seconds.
NOTICED_S = 10.0


def make_day(
    begin_h: float, hours: float, peak_per_s: float, bulk: int, seed: int
) -> list[Arrival]:
    """The jobs of a part of the day, which begins at 0 seconds."""
    jobs: list[Arrival] = []
    random = Random(seed)
    bulk_s = (BULK_HOUR - begin_h) * HOUR_S
    if 0 <= bulk_s < hours * HOUR_S:
        jobs += [Arrival(bulk_s, TASK, BULK)] * bulk
    for now_s in poisson_times(peak_per_s, random):
        if now_s >= hours * HOUR_S:
            break
        if random.random() < find_share(begin_h + now_s / HOUR_S):
            jobs.append(Arrival(now_s, TASK, LIVE))
    jobs.sort(key=lambda job: job.time_s)
    return jobs


def find_share(hour: float) -> float:
    """Live jobs at a time of day, as a share of the peak."""
    whole = math.floor(hour)
    before, after = HOURS[whole % 24], HOURS[(whole + 1) % 24]
    return before + (after - before) * (hour - whole)


class Counting(RealScheduler):
    """The worker's scheduler, and what the exporter says of its jobs."""

    def __init__(self) -> None:
        """Has no jobs."""
        super().__init__(DEFAULT_SHARES)
        self.unfinished = 0

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        self.unfinished += 1
        super().admit(job)

    def ended(self, batch: SimulatedBatch, run_s: float | None, load_s: float = 0.0) -> None:
        """Notes a batch that is back."""
        self.unfinished -= len(batch.jobs)
        super().ended(batch, run_s, load_s)


class Pods:
    """Pods of one GPU each: they load models, serve, finish what they hold, and are gone."""

    def __init__(self, simulation: Simulation, places: int, start_s: float) -> None:
        """Has no pod.

        Args:
            simulation: Whose devices are theirs; all are stopped.
            places: Number of its devices.
            start_s: From the decision for a pod to its first batch.
        """
        self._simulation = simulation
        self._start_s = start_s
        self._free = list(range(places))
        #: Number of each pod that is wanted -> when it was; those that serve are in `_ready`.
        self._wanted: dict[int, float] = {}
        self._ready: list[int] = []
        self.starts = 0
        self.paid_s = 0.0
        self.longest_stop_s = 0.0
        for number in self._free:
            simulation.stop_device(number, lambda _: None)

    @property
    def ready(self) -> int:
        """How many serve."""
        return len(self._ready)

    def scale(self, replicas: int, now_s: float, *, are_ready: bool = False) -> None:
        """Starts or stops pods; those that load go first, then the youngest."""
        while len(self._wanted) < replicas:
            number = self._free.pop(0)
            self._wanted[number] = now_s
            if are_ready:
                self._serve(number, now_s)
            else:
                self.starts += 1
                serve = partial(self._serve, number, now_s)
                self._simulation.call_at(now_s + self._start_s, serve)
        while len(self._wanted) > replicas:
            loading = [number for number in self._wanted if number not in self._ready]
            self._stop((loading or self._ready)[-1], now_s)

    def pay(self, end_s: float) -> None:
        """Pays the pods that are still there at the end."""
        self.paid_s += sum(end_s - since_s for since_s in self._wanted.values())

    def _serve(self, number: int, since_s: float, _: float = 0.0) -> None:
        if self._wanted.get(number) == since_s:
            self._ready.append(number)
            self._simulation.start_device(number)

    def _stop(self, number: int, now_s: float) -> None:
        since_s = self._wanted.pop(number)

        def end(end_s: float) -> None:
            self.paid_s += end_s - since_s
            self.longest_stop_s = max(self.longest_stop_s, end_s - now_s)
            self._free.append(number)

        if number in self._ready:
            self._ready.remove(number)
            self._simulation.stop_device(number, end)
        else:
            end(now_s)


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to decide how many pods there are."""

    name: str
    #: Pods at the start; without `scaling`, for ever.
    replicas: int
    scaling: Scaling | None = None


def run_day(
    trial: Trial, jobs: Sequence[Arrival], seconds: float, start_s: float
) -> dict[str, Any]:
    """Runs all jobs, until the end of the day at least.

    Args:
        trial: How many pods there are.
        jobs: In the order of time.
        seconds: Length of the day.
        start_s: From the decision for a pod to its first batch.

    Returns:
        The row of the table.
    """
    waits_s = {LIVE: array("d"), BULK: array("d")}
    end_s = seconds

    def note(batch: SimulatedBatch, began_s: float, ended_s: float) -> None:
        nonlocal end_s
        end_s = max(end_s, ended_s)
        for job in batch.jobs:
            waits_s[job.lane].append(began_s - job.arrived_s)

    scheduler = Counting()
    # Pods that finish their batch have their place beside those that are wanted.
    places = 2 * (trial.scaling.max_replicas if trial.scaling else trial.replicas)
    simulation = Simulation(scheduler, Fleet(places, DEVICE), Limits(BATCH_SIZE), on_done=note)
    pods = Pods(simulation, places, start_s)
    pods.scale(trial.replicas, 0.0, are_ready=True)
    if trial.scaling:
        watch(simulation, scheduler, pods, trial, seconds)
    done = simulation.run(jobs)
    pods.pay(end_s)
    return {
        "name": trial.name,
        "scaling": asdict(trial.scaling) if trial.scaling else None,
        "gpu_hours": round(pods.paid_s / HOUR_S, 1),
        "busy": round(done.busy_s / pods.paid_s, 3),
        "starts": pods.starts,
        "live": describe(waits_s[LIVE]),
        "bulk": describe(waits_s[BULK]),
        "unfinished": len(jobs) - done.done,
        "begun_twice": done.rerun,
        "longest_stop_s": round(pods.longest_stop_s, 1),
    }


def watch(
    simulation: Simulation, scheduler: Counting, pods: Pods, trial: Trial, seconds: float
) -> None:
    """Lets Prometheus, KEDA and the autoscaler look, until the day is over and nothing is left."""
    scaling = trial.scaling or Scaling()
    autoscaler = Autoscaler(scaling, trial.replicas)
    jobs, oldest_s = 0, 0.0

    def scrape(now_s: float) -> None:
        nonlocal jobs, oldest_s
        jobs = scheduler.unfinished
        came_s = scheduler.oldest_held_s(TASK)
        oldest_s = 0.0 if came_s is None else now_s - came_s

    def poll(now_s: float) -> None:
        autoscaler.poll(now_s, jobs, oldest_s)
        pods.scale(autoscaler.replicas, now_s)

    def sync(now_s: float) -> None:
        autoscaler.sync(now_s, jobs, oldest_s, pods.ready)
        pods.scale(autoscaler.replicas, now_s)

    def repeat(look: Callable[[float], None], first_s: float, every_s: float) -> None:
        def again(now_s: float) -> None:
            look(now_s)
            if now_s < seconds or scheduler.unfinished:
                simulation.call_at(now_s + every_s, again)

        simulation.call_at(first_s, again)

    repeat(scrape, SCRAPE_PHASE_S, float(CHART["monitoring"]["interval"].removesuffix("s")))
    repeat(poll, POLL_PHASE_S, scaling.polling_s)
    repeat(sync, SYNC_PHASE_S, SYNC_S)


def describe(waits_s: Sequence[float]) -> dict[str, Any]:
    """What a table says of waits."""
    ordered = sorted(waits_s)
    shares = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99, "longest_s": 1.0}
    figures = {name: percentile(ordered, share) for name, share in shares.items()}
    return {
        "jobs": len(ordered),
        **{name: None if each is None else round(each, 1) for name, each in figures.items()},
        "noticed": len(ordered) - bisect_right(ordered, NOTICED_S),
    }


def make_trials(options: argparse.Namespace, jobs: Sequence[Arrival]) -> Iterator[Trial]:
    """Fixed sizes, then the chart's numbers with none and one at least, then others."""
    mean = len(jobs) / (options.hours * HOUR_S) / CAPACITY_PER_S
    peak = math.ceil(options.peak_per_s / CAPACITY_PER_S / PEAK_LOAD)
    yield Trial("fixed, for the peak", peak)
    yield Trial("fixed, for the mean", max(1, math.ceil(mean)))
    shipped = read_scaling()
    for lowest in (0, 1):
        yield Trial(f"KEDA, {lowest} at least", lowest, replace(shipped, min_replicas=lowest))
    for text in options.others:
        per_replica, oldest_s, cooldown_s = map(float, text.split(","))
        other = replace(
            shipped,
            jobs_per_replica=per_replica,
            oldest_s=oldest_s,
            cooldown_s=cooldown_s,
            stabilization_s=cooldown_s,
        )
        yield Trial(f"KEDA, 0 at least: {text}", 0, replace(other, min_replicas=0))


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is claimed, and whether it holds."""
    grace_s = CHART["workerDefaults"]["gracePeriodSeconds"]
    longest_s = max(row["longest_stop_s"] for row in rows)
    lost = sum(row["unfinished"] + row["begun_twice"] for row in rows)
    return [
        {
            "claim": f"each pod that went finished its batches within its {grace_s} s",
            "holds": longest_s < grace_s,
            "found": f"{longest_s:g} s",
        },
        {"claim": "no job is lost or begins twice", "holds": not lost, "found": f"{lost:,}"},
    ]


def show(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table."""
    heads = ("", "GPU hours", "busy", "starts", "live: p50, p95, p99, longest", "over 10 s")
    table = Table(*heads, "bulk: p50, longest", "killed", box=box.MARKDOWN)
    for row in rows:
        live, bulk = row["live"], row["bulk"]
        table.add_row(
            row["name"],
            f"{row['gpu_hours']:,}",
            f"{row['busy']:.0%}",
            f"{row['starts']:,}",
            ", ".join(spell_s(live[key]) for key in ("p50_s", "p95_s", "p99_s", "longest_s")),
            f"{live['noticed']:,}",
            f"{spell_s(bulk['p50_s'])}, {spell_s(bulk['longest_s'])}",
            f"{row['unfinished'] + row['begun_twice']:,}",
        )
    console.print(table)


def spell_s(seconds: float | None) -> str:
    """A time for people."""
    if seconds is None:
        return "-"
    return f"{seconds:g} s" if seconds < 2 * 60 else f"{seconds / 60:,.0f} min"


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--begin-h", type=float, default=0.0, help="hour at which the day begins")
    parser.add_argument("--hours", type=float, default=24.0, help="length of the day")
    parser.add_argument("--peak-per-s", type=float, default=10.0, help="live jobs per second")
    parser.add_argument("--bulk", type=int, default=100_000, help="jobs of the bulk")
    parser.add_argument("--start-s", type=float, default=90.0, help="until a new pod serves")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--try", dest="others", action="append", default=[], metavar="J,S,S")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Runs the day with each trial, prints a table; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    jobs = make_day(options.begin_h, options.hours, options.peak_per_s, options.bulk, options.seed)
    seconds = options.hours * HOUR_S
    run = partial(run_day, jobs=jobs, seconds=seconds, start_s=options.start_s)
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(run, make_trials(options, jobs)))
    show(console, rows)
    found = verdicts(rows)
    for each in found:
        console.print(f"{'yes' if each['holds'] else 'NO'}: {each['claim']}: {each['found']}")
    taken = {key: value for key, value in vars(options).items() if key not in ("json", "others")}
    report = {**taken, "device": asdict(DEVICE), "rows": rows, "verdicts": found}
    write_report(options.json, {"hardware": hardware(), **report})


if __name__ == "__main__":
    main()

"""How far the simulator may be believed: the same jobs on a real worker, and simulated.

A trace of jobs of three classes is played against a worker with a Redis of its own, and given to
`batchery simulate` with what an earlier, short trace has taught of that worker. Throughput and
percentiles of the latency are compared. There are devices that sleep, so that a batch costs what it
is said to cost, and MiniLM, whose costs are those of the batches of the trace itself: a processor's
speed drifts from minute to minute. The last kind has batches so short that the work of the host
counts.

    python -m benchmarks.scheduling.reality --json reality.json
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from batchery_worker.job import Lane
from batchery_worker.simulator.engine import Fleet, ServiceTime
from batchery_worker.simulator.workload import (
    Arrival,
    JobKind,
    arrivals,
    bursty_times,
    poisson_times,
)
from benchmarks.engine.models import MODELS
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.report import WIDTH
from benchmarks.scheduling.learning import Learned, learned
from benchmarks.scheduling.live import cut, rounded
from benchmarks.scheduling.places import Place, embedding, sleeping
from benchmarks.scheduling.playing import Played, Player
from benchmarks.scheduling.predicting import (
    TIMES,
    measured,
    options_of,
    simulated,
    write_trace,
)

#: How often jobs of each class come.
LANES = {Lane("high"): 0.3, Lane("normal"): 0.5, Lane("low"): 0.2}

#: What makes the times of a trace.
TIMES_OF = {"poisson": poisson_times, "bursty": bursty_times}

#: How far the simulator may be off, as a share of what is measured.
RATE_SHARE, P99_SHARE = 0.1, 0.2

#: Full batches for each device from which a model's rate is learned.
FLOOD_BATCHES = 6

#: Load of the trace that teaches, its seconds as a share of the others', and its seed.
LESSON_LOAD, LESSON_SHARE, LESSON_SEED = 0.7, 0.5, 1000

#: Jobs that meet an idle worker, and the time from one to the next in seconds.
LONELY, LONELY_S = 12, 0.25

#: What was measured, what is simulated with all that was learned, and with the costs alone
#: that `batchery stats` shows.
REAL, SIMULATED, PLAIN = "real", "simulated", "costs of stats"

#: Stands for all classes.
ALL = "all"


@dataclass(frozen=True, slots=True)
class Setting:
    """A worker, and which traces it gets."""

    name: str
    #: The batches of devices that sleep; None for a model.
    sleep_ms: tuple[float, float] | None
    devices: int
    #: Workload and load, as a share of what the devices can do in full batches.
    traces: Sequence[tuple[str, float]]

    def place(self, options: argparse.Namespace) -> AbstractContextManager[Place]:
        """Starts the worker."""
        if self.sleep_ms is None:
            return embedding(options)
        return sleeping(*self.sleep_ms, self.devices)


#: By the names of `--only`. Four devices have longer batches: one main process feeds them all.
SETTINGS: Mapping[str, Setting] = {
    "one": Setting(
        "sleeps, 1 device",
        (30.0, 1.5),
        1,
        [("poisson", 0.6), ("poisson", 0.9), ("bursty", 0.7), ("poisson", 1.3)],
    ),
    "four": Setting("sleeps, 4 devices", (60.0, 3.0), 4, [("poisson", 0.9), ("bursty", 0.7)]),
    "model": Setting("MiniLM", None, 1, [("poisson", 0.6), ("poisson", 0.8), ("bursty", 0.7)]),
    "short": Setting("short batches", (2.0, 0.5), 1, [("poisson", 0.6), ("poisson", 0.9)]),
}


def main() -> None:
    """Measures, prints tables; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    rows = []
    with tempfile.TemporaryDirectory(prefix="batchery-bench-") as folder:
        for name in options.only:
            setting = SETTINGS[name]
            with setting.place(options) as place:
                rows += list(measure(place, setting, options, Path(folder), console.print))
    report = {
        "hardware": hardware(),
        "versions": {name: version(name) for name in ("batchery", "celery", "redis")},
        "seconds": options.seconds,
        "seed": options.seed,
        "noise_seeds": options.noise_seeds,
        "classes": {lane.priority_class: share for lane, share in LANES.items()},
        "rows": rows,
    }
    show(console, report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each trace")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", default="cpu", help="of the model, as torch spells it")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--batch-size", type=int, default=64, help="of the model")
    # Several of them compute passes side by side, which is not simulated.
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--seed", type=int, default=1, help="of the traces")
    parser.add_argument("--noise-seeds", type=int, default=3, help="simulations of each trace")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def trace_of(workload: str, jobs_per_s: float, seconds: float, seed: int) -> list[Arrival]:
    """Jobs of the simulator's own workloads, of three classes; the first one comes at 0."""
    random = Random(seed)
    stream = arrivals(TIMES_OF[workload](jobs_per_s, random), JobKind(LANES), random)
    first = next(stream)
    rest = (each._replace(time_s=each.time_s - first.time_s) for each in stream)
    return [
        first._replace(time_s=0.0),
        *takewhile(lambda each: each.time_s < seconds, rest),
    ]


def play(place: Place, trace: Sequence[Arrival]) -> Played:
    """Plays a trace on a worker."""

    async def played() -> Played:
        async with Player(place.url) as player:
            return await player.play(place.calls(trace))

    return asyncio.run(played())


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a worker teaches beforehand."""

    #: Items per second in full batches.
    capacity_per_s: float
    #: What came of jobs that met an idle worker.
    alone: Played
    #: None for a model: its costs are learned from each trace.
    costs: Learned | None


def lesson(place: Place, setting: Setting, options: argparse.Namespace) -> Lesson:
    """Asks a worker."""
    if setting.sleep_ms is None:
        full = FLOOD_BATCHES * place.max_batch_size * place.devices
        flood = play(place, [Arrival(0.0, place.task, Lane("high"))] * full)
        return Lesson(full / flood.seconds, play_alone(place), None)
    service = ServiceTime(*setting.sleep_ms)
    capacity_per_s = Fleet(place.devices, service).capacity_per_s(place.max_batch_size)
    alone = play_alone(place)
    seconds = LESSON_SHARE * options.seconds
    trace = trace_of("bursty", LESSON_LOAD * capacity_per_s, seconds, LESSON_SEED)
    return Lesson(capacity_per_s, alone, learned(place.calls(trace), play(place, trace), alone))


def play_alone(place: Place) -> Played:
    """Jobs that meet an idle worker."""
    times_s = [number * LONELY_S for number in range(LONELY)]
    return play(place, [Arrival(each, place.task, Lane("high")) for each in times_s])


def measure(
    place: Place,
    setting: Setting,
    options: argparse.Namespace,
    folder: Path,
    say: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Plays and simulates the traces of a worker; a row for each."""
    say(f"{setting.name}: what it teaches")
    taught = lesson(place, setting, options)
    capacity_per_s, stats = taught.capacity_per_s, place.costs()
    for workload, load in setting.traces:
        say(f"{setting.name}: {workload}, load {load:.0%}")
        trace = trace_of(workload, load * capacity_per_s, options.seconds, options.seed)
        path = folder / "trace.jsonl"
        calls = place.calls(trace)
        write_trace(calls, path)
        played = play(place, trace)
        costs = taught.costs or learned(calls, played, taught.alone)
        told = options_of(costs, place)
        row = {
            "setting": setting.name,
            "devices": place.devices,
            "max_batch_size": place.max_batch_size,
            "workload": workload,
            "load": load,
            "redis_server": place.redis_server(),
            "jobs": len(trace),
            "jobs_per_s": round(load * capacity_per_s, 2),
            "learned": {name: round(value, 4) for name, value in asdict(costs).items()},
            "stats_costs": stats,
            "command": f"batchery simulate --trace FILE --policies ours {' '.join(told)}",
            "lag_p99_ms": rounded(cut(played.lags_s, 99) * 1e3),
            "longest_lag_ms": rounded(max(played.lags_s) * 1e3),
            REAL: measured(played),
            SIMULATED: simulated(path, told, options.noise_seeds),
        }
        if stats is not None:
            plain = Learned(stats["pass_ms"], stats["item_us"] / 1e3, 0.0, costs.noise)
            row[PLAIN] = simulated(path, options_of(plain, place), options.noise_seeds)
        yield {**row, "verdicts": verdicts_of(row)}


def verdicts_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is claimed of a trace, whether it holds, and what was found."""
    rate = row[SIMULATED]["items_per_s"] / row[REAL]["items_per_s"] - 1
    off = off_of(row, SIMULATED)
    worst = max(off, key=lambda name: abs(off[name]))
    of = describe_function(row)
    return [
        {
            "claim": f"{of}: throughput within {RATE_SHARE:.0%}",
            "holds": abs(rate) <= RATE_SHARE,
            "found": f"{rate:+.1%}",
        },
        {
            "claim": f"{of}: p99 within {P99_SHARE:.0%}, of all jobs and of each class",
            "holds": abs(off[worst]) <= P99_SHARE,
            "found": f"{off[ALL]:+.1%} of all; furthest off is {worst}, {off[worst]:+.1%}",
        },
    ]


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Prints tables and verdicts."""
    console.print(report["hardware"])
    console.print(_rates(report["rows"]))
    console.print(_latencies(report["rows"]))
    for row in report["rows"]:
        for each in row["verdicts"]:
            console.print(f"{'yes' if each['holds'] else 'NO'}: {each['claim']}: {each['found']}")


def _rates(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("jobs", "lag, p99", "longest", "items/s", "simulated", "in a batch", "simulated")
    table = Table("", *heads, box=box.MARKDOWN)
    for row in rows:
        both = (row[REAL], row[SIMULATED])
        table.add_row(
            describe_function(row),
            f"{row['jobs']:,}",
            f"{row['lag_p99_ms']:,} ms",
            f"{row['longest_lag_ms']:,} ms",
            *(f"{each['items_per_s']:,.0f}" for each in both),
            *(f"{each['batch_items']:.1f}" for each in both),
        )
    return table


def _latencies(rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = ("class", "p50, p95, p99 in ms", "simulated", "p99 off", f"with {PLAIN}")
    table = Table("", *heads, box=box.MARKDOWN)
    for row in rows:
        for name in (ALL, *(lane.priority_class for lane in LANES)):
            both = (group_of(row[REAL], name), group_of(row[SIMULATED], name))
            table.add_row(
                describe_function(row) if name == ALL else "",
                name,
                *(", ".join(f"{each[time]:,.0f}" for time in TIMES) for each in both),
                f"{off_of(row, SIMULATED)[name]:+.1%}",
                f"{off_of(row, PLAIN)[name]:+.1%}" if PLAIN in row else "",
            )
    return table


def describe_function(row: Mapping[str, Any]) -> str:
    """Of a row, for people."""
    return f"{row['setting']}, {row['workload']} at {row['load']:.0%}"


def group_of(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The figures of a class, or of all jobs."""
    group: Mapping[str, Any] = found if name == ALL else found["classes"][name]
    return group


def off_of(row: Mapping[str, Any], source: str) -> dict[str, float]:
    """By how much the p99 of all jobs and of each class is off, as a share of what was measured."""
    return {
        name: group_of(row[source], name)["p99_ms"] / group_of(row[REAL], name)["p99_ms"] - 1
        for name in (ALL, *row[REAL]["classes"])
    }


if __name__ == "__main__":
    main()

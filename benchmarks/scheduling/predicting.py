"""What `batchery simulate` says of a trace, and what was measured, in the same figures."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from click.testing import CliRunner

from batchery_worker.cli.simulate import simulate
from batchery_worker.job import Lane
from batchery_worker.simulator.outcome import (
    PERCENTILES,
    Figures,
    LaneOutcome,
    SimulatedRun,
    figures,
)
from batchery_worker.simulator.workload import DEFAULT_SHARES
from benchmarks.scheduling.learning import Learned
from benchmarks.scheduling.places import Place
from benchmarks.scheduling.playing import Call, Played

#: Names of the percentiles in figures.
TIMES = tuple(f"p{each}_ms" for each in PERCENTILES)

#: What is compared besides; both are means.
MEANS = ("items_per_s", "batch_items")


def write_trace(calls: Sequence[Call], path: Path) -> None:
    """Writes jobs as `batchery simulate --trace` reads them."""
    rows = [
        {"time_s": each.due_s, "class": each.priority_class, "tokens": each.tokens}
        for each in calls
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def options_of(costs: Learned, place: Place) -> list[str]:
    """How `batchery simulate` is told of a worker."""
    told = {**asdict(costs), "devices": place.devices, "max_batch_size": place.max_batch_size}
    return [f"--{name.replace('_', '-')}={round(value, 4):g}" for name, value in told.items()]


def simulated(trace: Path, options: Sequence[str], seeds: int) -> Figures:
    """What the command says, with several seeds of the noise: medians, and the range of the p99.

    Raises:
        SystemExit: The command fails.
    """
    runs = [_simulated(trace, options, seed) for seed in range(seeds)]
    middle = _median(runs)
    middle["classes"] = {
        name: _median([run["classes"][name] for run in runs]) for name in runs[0]["classes"]
    }
    return middle


def _simulated(trace: Path, options: Sequence[str], seed: int) -> Figures:
    command = ["--trace", str(trace), "--policies=ours", "--json=-", f"--seed={seed}", *options]
    answer = CliRunner().invoke(simulate, command, catch_exceptions=False)
    if answer.exit_code:
        raise SystemExit(f"batchery simulate {' '.join(command)}\n{answer.output}")
    found: Figures = json.loads(answer.output)["policies"][0]
    return found


def _median(runs: Sequence[Figures]) -> Figures:
    """Of each figure that is compared; of the p99 the range, too."""
    p99_ms = [run["p99_ms"] for run in runs]
    names = [name for name in (*MEANS, *TIMES) if name in runs[0]]
    middle: Figures = {
        name: round(statistics.median(run[name] for run in runs), 2) for name in names
    }
    return {**middle, "p99_range_ms": [min(p99_ms), max(p99_ms)]}


def measured(played: Played) -> Figures:
    """The same figures of a trace that was played."""
    outcome = SimulatedRun(end_s=played.seconds)
    for each in played.heard:
        lane = outcome.lanes.setdefault(Lane(each.priority_class), LaneOutcome())
        lane.latencies_s.append(each.latency_s)
        lane.items += 1
    outcome.batches = len({each.info["id"] for each in played.heard})
    return figures("real", outcome, DEFAULT_SHARES, 1.0, ())

"""How exactly classes share a device, and how soon a tenant's only job runs: a worker that sleeps.

Jobs of three classes wait without end, and a batch takes so much, and so much for each item. The
function notes what it ran, so that the device time of each class over any second is known exactly,
beside its share. Then one class is silent, and comes back. Then a tenant sends one job while the
worker is full of another tenant's.

    python -m benchmarks.scheduling.shares --seconds 20 --json shares.json
"""

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import hardware, write_report
from benchmarks.queue.report import WIDTH
from benchmarks.scheduling.sleeper import BATCH_SIZE, Sleeper, Source
from benchmarks.scheduling.windows import Ran, by_second, deviations

#: Priority and share of each class, as a worker has them by default.
CLASSES = {"high": (0, 50), "normal": (3, 30), "low": (6, 20)}

#: The class that is silent for a while.
SILENT = "normal"

#: Length of a window, in seconds.
WINDOW_S = 1.0

#: How long lanes wait before the clock starts: costs are learned from the first batches.
WARM_S = 3.0

#: What estimates and the way to the device may add to the bound of fair queueing, as its share.
SLACK = 0.1

#: Batches of each case that are written one by one, to see in which order lanes come.
FIRST_BATCHES = 60

#: How much of a device the others must fill, of what all classes together fill.
FILLED_SHARE = 0.98

#: Jobs that fill the worker, all of them taken: fewer than it takes of one class, so that none
#: wait in Redis, which knows no tenants.
FILL_JOBS = 80

#: Trials with a lonely job, pauses between them in seconds, and what the job may wait for.
TRIALS = 20
PAUSE_S = (0.1, 0.4)
BATCHES_PER_LANE = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Lanes that wait without end."""

    name: str
    sources: Sequence[Source]


def main() -> None:
    """Measures, prints tables; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    rows, tenants = [], []
    with sleeper(options.pass_ms, options.item_ms) as worker:
        for case in cases():
            console.print(case.name)
            rows.append(measure(worker, case, options.seconds))
        console.print(f"{SILENT} is silent, then back")
        rows += measure_silence(worker, options.seconds)
        for busy in options.tenants:
            console.print(f"one job behind {busy} busy tenants")
            tenants.append(measure_tenant(worker, busy, options.trials))
    report = {
        "hardware": hardware(),
        "seconds": options.seconds,
        "pass_ms": options.pass_ms,
        "item_ms": options.item_ms,
        "max_batch_size": BATCH_SIZE,
        "shares": {name: share for name, (_, share) in CLASSES.items()},
        "window_s": WINDOW_S,
        "rows": rows,
        "tenants": tenants,
        "verdicts": [*(each for row in rows for each in verdicts_of(row, rows[0]))]
        + [verdict_of_tenant(each) for each in tenants],
    }
    show(console, report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each case")
    parser.add_argument("--pass-ms", type=float, default=2.0, help="what a batch takes")
    parser.add_argument("--item-ms", type=float, default=1.0, help="and each of its items")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 3], help="busy ones")
    parser.add_argument("--trials", type=int, default=TRIALS, help="lonely jobs of a tenant")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.seconds < 2 * WINDOW_S:
        parser.error(f"--seconds: expected at least {2 * WINDOW_S:g}")
    return options


@contextlib.contextmanager
def sleeper(pass_ms: float, item_ms: float) -> Iterator[Sleeper]:
    """A worker that sleeps; it ends with the block."""
    worker = Sleeper(pass_ms / 1e3, item_ms / 1e3)
    try:
        yield worker
    finally:
        worker.stop()


def cases() -> list[Case]:
    """All three classes, as they may and may not share batches."""
    usual = [Source(name, priority) for name, (priority, _) in CLASSES.items()]
    return [
        Case("in the same batches", usual),
        Case("each with keywords of its own", [apart(each) for each in usual]),
        Case(
            "two tasks, low has slow items",
            [replace(each, task="sleep_long") if each.lane == "low" else each for each in usual],
        ),
    ]


def apart(source: Source) -> Source:
    """The same lane, in batches of its own."""
    return replace(source, keywords={"of": source.lane})


def measure(worker: Sleeper, case: Case, seconds: float) -> dict[str, Any]:
    """Lets lanes wait for so long; a row with how they shared the device."""
    worker.feed(case.sources, WARM_S)
    began_s = time.monotonic()
    fewest = worker.feed(case.sources, seconds)
    ended_s = time.monotonic()
    row = row_of(case, inside(worker, began_s, ended_s), fewest)
    worker.settle()
    return row


def measure_silence(worker: Sleeper, seconds: float) -> list[dict[str, Any]]:
    """Two rows: one class is silent, and then it is back, without a pause between them."""
    every = cases()[0]
    others = Case(f"{SILENT} is silent", [each for each in every.sources if each.lane != SILENT])
    worker.feed(others.sources, WARM_S)
    began_s = time.monotonic()
    fewest = worker.feed(others.sources, seconds)
    back_s = time.monotonic()
    fewest_back = worker.feed(every.sources, seconds)
    ended_s = time.monotonic()
    worker.settle()
    silent = [each for each in inside(worker, began_s, ended_s) if each.end_s <= back_s]
    back = inside(worker, back_s, ended_s)
    # The clock starts with the first batch that has a job of it.
    first = next(number for number, each in enumerate(back) if each.items.get(SILENT))
    return [
        row_of(others, silent, fewest),
        row_of(replace(every, name=f"{SILENT} is back"), back[first:], fewest_back),
    ]


def inside(worker: Sleeper, began_s: float, ended_s: float) -> list[Ran]:
    """The batches that began and ended between two times."""
    return [each for each in worker.batches(began_s) if each.end_s <= ended_s]


def row_of(case: Case, batches: Sequence[Ran], fewest: int) -> dict[str, Any]:
    """The figures of one case."""
    lanes = [source.lane for source in case.sources]
    shares = {lane: float(CLASSES[lane][1]) for lane in lanes}
    total = sum(shares.values())
    had = {lane: sum(each.seconds_of(lane) for each in batches) for lane in lanes}
    busy_s = sum(had.values())
    found = deviations(batches, shares, WINDOW_S)
    batch_s = {lane: _batch_s(batches, lane) for lane in lanes}
    bounds_s = fair_bounds_s({lane: shares[lane] / total for lane in lanes}, batch_s)
    return {
        "case": case.name,
        "batches": len(batches),
        "mean_batch_size": round(statistics.mean(each.size for each in batches), 2),
        "batch_ms": round(max(batch_s.values()) * 1e3, 2),
        "longest_batch_ms": round(max(each.seconds for each in batches) * 1e3, 2),
        "busy": round(busy_s / (batches[-1].end_s - batches[0].begin_s), 4),
        "fewest_waiting": fewest,
        "classes": {
            lane: {
                "share": round(shares[lane] / total, 4),
                "had": round(had[lane] / busy_s, 4),
                "off_ms": round(found[lane].seconds * 1e3, 2),
                "off_items": round(found[lane].items, 2),
                "off_at_s": round(found[lane].begin_s, 3),
                "bound_ms": round(bounds_s[lane] * 1e3, 2),
            }
            for lane in lanes
        },
        "by_second": by_second(batches, lanes),
        "first_batches": [dict(each.items) for each in batches[:FIRST_BATCHES]],
    }


def fair_bounds_s(shares: Mapping[str, float], batch_s: Mapping[str, float]) -> dict[str, float]:
    """How far start-time fair queueing lets a lane be off its share in any window, in seconds.

    If each batch is of one lane alone: for any two lanes, what they had divided by their shares
    differs by a batch of each divided by its share, at most. The sum over all others is the bound.

    Args:
        shares: Of all lanes; together 1.
        batch_s: How long a batch of each takes, in seconds.
    """
    return {
        lane: sum(
            shares[other] * batch_s[lane] + share * batch_s[other]
            for other in shares
            if other != lane
        )
        for lane, share in shares.items()
    }


def _batch_s(batches: Sequence[Ran], lane: str) -> float:
    """How long a batch takes that has items of a lane: the median."""
    own = [each.seconds for each in batches if lane in each.items]
    return statistics.median(own) if own else 0.0


def measure_tenant(worker: Sleeper, busy: int, trials: int) -> dict[str, Any]:
    """Fills the worker with jobs of some tenants, and sends the job of another one, many times."""
    sources = [Source(f"busy {number}", tenant=f"busy {number}") for number in range(busy)]
    waited = []
    draw = random.Random(busy)
    for trial in range(trials):
        _fill(worker, sources, draw.uniform(*PAUSE_S))
        waiting = worker.waiting()
        lane = f"lonely {trial}"
        pushed_s = time.monotonic()
        worker.push(Source(lane, tenant=lane), 1)
        while not _ran(worker, lane, pushed_s):
            _fill(worker, sources, 0.0)
        waited.append({**_passed(worker.batches(pushed_s - 1.0), lane, pushed_s), "redis": waiting})
    worker.settle()
    batches = [each["batches"] for each in waited]
    return {
        "busy_tenants": busy,
        "trials": trials,
        "median_batches": statistics.median(batches),
        "most_batches": max(batches),
        "bound_batches": BATCHES_PER_LANE * (busy + 1),
        "median_ms": round(statistics.median(each["ms"] for each in waited), 2),
        "longest_ms": round(max(each["ms"] for each in waited), 2),
        "most_in_redis": max(each["redis"] for each in waited),
        "waited": waited,
    }


def _fill(worker: Sleeper, sources: Sequence[Source], seconds: float) -> None:
    """Keeps the worker full for so long; no job of these waits in Redis for more than a moment."""
    end_s = time.monotonic() + seconds
    while True:
        missing = FILL_JOBS - worker.held() - worker.waiting()
        for source in sources:
            if missing >= len(sources):
                worker.push(source, missing // len(sources))
        worker.wait_until(lambda: not worker.waiting())
        if time.monotonic() >= end_s:
            return


def _ran(worker: Sleeper, lane: str, since_s: float) -> bool:
    return any(lane in each.items for each in worker.batches(since_s))


def _passed(batches: Sequence[Ran], lane: str, pushed_s: float) -> dict[str, Any]:
    """The batches that a job waited for: those that ended between its push and its own begin."""
    own = next(each for each in batches if lane in each.items)
    passed = sum(pushed_s < each.end_s <= own.begin_s for each in batches)
    return {"batches": passed, "ms": round((own.begin_s - pushed_s) * 1e3, 2)}


def verdicts_of(row: Mapping[str, Any], every: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is claimed of a case; `every` is the one in which all classes wait."""
    classes: Mapping[str, Mapping[str, Any]] = row["classes"]
    worst = max(classes, key=lambda name: abs(classes[name]["off_ms"]))
    off_ms = classes[worst]["off_ms"]
    beyond = max(classes, key=lambda name: abs(classes[name]["off_ms"]) / classes[name]["bound_ms"])
    beyond_ms, bound_ms = classes[beyond]["off_ms"], classes[beyond]["bound_ms"]
    made = [
        {
            "claim": f"{row['case']}: each class within one batch of its share over any second",
            "holds": abs(off_ms) <= row["batch_ms"],
            "found": f"{worst} {off_ms:+,} ms; a batch takes {row['batch_ms']:,} ms",
        },
        {
            "claim": f"{row['case']}: within what fair queueing promises of batches of one class",
            "holds": abs(beyond_ms) <= (1 + SLACK) * bound_ms,
            "found": f"{beyond} {beyond_ms:+,} ms; the bound is {bound_ms:,} ms",
        },
    ]
    if len(row["classes"]) < len(CLASSES):
        least = round(FILLED_SHARE * every["busy"], 4)
        made.append(
            {
                "claim": "the others fill the silent class's part",
                "holds": row["busy"] >= least,
                "found": f"the device is busy {row['busy']:.1%}, with all {every['busy']:.1%}",
            }
        )
    return made


def verdict_of_tenant(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is claimed of a tenant with one job."""
    lanes = row["busy_tenants"] + 1
    return {
        "claim": f"with {lanes} active lanes, a tenant's only job waits for two batches of each",
        "holds": row["most_batches"] <= row["bound_batches"],
        "found": f"{row['most_batches']} batches, of {row['bound_batches']}",
    }


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Prints tables and verdicts."""
    console.print(report["hardware"])
    heads = ("", "longest batch", "items", "busy", "class", "share", "had", "of a second")
    table = Table(*heads, "most off in a second", "in items", box=box.MARKDOWN)
    for row in report["rows"]:
        size = f"{row['mean_batch_size']:g}"
        first = (row["case"], f"{row['batch_ms']:,} ms", size, f"{row['busy']:.1%}")
        for number, (name, each) in enumerate(row["classes"].items()):
            seconds = [second[name] for second in row["by_second"]]
            table.add_row(
                *(first if number == 0 else ("",) * 4),
                name,
                f"{each['share']:.1%}",
                f"{each['had']:.1%}",
                f"{min(seconds):.1%} to {max(seconds):.1%}",
                f"{each['off_ms']:+,} ms",
                f"{each['off_items']:+,}",
            )
    console.print(table)
    waits = ("a lonely job waits for batches", "at most", "median", "longest")
    table = Table("busy tenants", *waits, box=box.MARKDOWN)
    for row in report["tenants"]:
        counts = (row["busy_tenants"], f"{row['median_batches']:g}", row["most_batches"])
        times = (f"{row['median_ms']:,} ms", f"{row['longest_ms']:,} ms")
        table.add_row(*map(str, counts), *times)
    console.print(table)
    for each in report["verdicts"]:
        console.print(f"{'yes' if each['holds'] else 'NO'}: {each['claim']}: {each['found']}")


if __name__ == "__main__":
    main()

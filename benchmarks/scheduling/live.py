"""Live jobs among bulk that waits without end: how long they take, and what bulk pays for it.

Bulk jobs of the lowest priority always wait in Redis. Live jobs of the highest one, a short text
each, arrive by chance (Poisson). The latency of a live job is from just before its push to the
arrival of its result. Stretches of bulk alone and of bulk with live jobs take turns on one worker,
so that both rates are of the same minutes.

The yardstick is a pass of the micro-batch budget: the median `forward_ms` of lonely batches that
are one full pass, or one on each stream where a CPU computes several side by side.

    python -m benchmarks.scheduling.live --seconds 60 --rounds 2 --json live.json
"""

import argparse
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine.models import MODELS
from benchmarks.engine.target import about, target_for
from benchmarks.engine.texts import read_texts
from benchmarks.hardware import write_report
from benchmarks.queue.report import WIDTH
from benchmarks.scheduling.arrivals import Answer
from benchmarks.scheduling.bulk import Ended, Seen
from benchmarks.scheduling.side import (
    FOLDERS,
    LIVE_WORKLOAD,
    TEXTS,
    WORKLOAD,
    Plan,
    Round,
    run_round,
    streams_of,
)

PERCENTS = (50, 95, 99)

#: What is allowed on top of two passes, in ms: the way through Redis and back.
ALLOWANCE_MS = 20.0

#: What bulk must keep of the time that live jobs leave.
KEPT_SHARE = 0.95

#: Live jobs that are written one by one.
SLOWEST = 10

#: Rows of the two checkouts.
NOW, BEFORE = "now", "before"

#: Where the time of a live job goes, in order; what is left is the way through Redis and back.
STAGES = ("waited_ms", "prepare_ms", "queued_ms", "forward_ms")


def main() -> None:
    """Measures, prints tables; writes JSON if asked to."""
    options = parse()
    console = Console(highlight=False, width=WIDTH)
    checkouts: dict[str, Path | None] = {NOW: None}
    if options.before:
        checkouts = {BEFORE: options.before, NOW: None}
    rounds: dict[str, list[Round]] = {name: [] for name in checkouts}
    with target_for(options) as target:
        plan = Plan(
            target=target,
            seconds=options.seconds,
            live_per_s=options.live_per_s,
            per_job=options.per_job,
            streams=streams_of(options.device),
            seed=options.seed,
        )
        texts = {name: read_texts(name, TEXTS, target.folder) for name in (WORKLOAD, LIVE_WORKLOAD)}
        about_it = about(target, options, texts)
        for number in range(options.rounds):
            for name in list(checkouts)[:: 1 if number % 2 == 0 else -1]:
                console.print(f"round {number + 1} of {options.rounds}: {name}")
                rounds[name].append(run_round(checkouts[name], plan, number))
    report = {
        **about_it,
        "streams": plan.streams,
        "seconds": options.seconds,
        "live_per_s": options.live_per_s,
        "per_job": options.per_job,
        "max_batch_size": options.batch_size,
        "rounds": options.rounds,
        "seed": options.seed,
        "rows": [row_of(name, each) for name, each in rounds.items()],
    }
    show(console, report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="with live jobs, of each round")
    parser.add_argument("--live-per-s", type=float, default=4.0, help="mean arrivals of live jobs")
    parser.add_argument("--per-job", type=int, default=1, help="texts of each bulk job")
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, help="of torch; its own choice else")
    parser.add_argument("--before", type=Path, help="another checkout, to be measured beside this")
    parser.add_argument("--rounds", type=int, default=2, help="workers of each checkout, in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.before and not all((options.before / each).is_dir() for each in FOLDERS):
        parser.error(f"--before: expected the folders {', '.join(FOLDERS)} in {options.before}")
    return options


def row_of(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of one checkout, with its verdicts."""
    answers = [each for done in rounds for part in done.stretches for each in part.answers]
    latencies_ms = [answer.latency_ms for answer in answers]
    kept = [kept_of([done]) for done in rounds]
    row = {
        "code": name,
        "budget_tokens": rounds[0].budget_tokens,
        "pass_ms": rounded(statistics.median(done.pass_ms for done in rounds)),
        "modelled_pass_ms": [rounded(done.modelled_pass_ms) for done in rounds],
        "lonely_p50_ms": rounded(
            statistics.median(each for done in rounds for each in done.lonely_ms)
        ),
        "live_jobs": len(answers),
        **{f"p{percent}_ms": rounded(cut(latencies_ms, percent)) for percent in PERCENTS},
        "longest_ms": rounded(max(latencies_ms)),
        "stages": stages_of(answers),
        "live_batch_sizes": sizes_of(answers),
        "slowest": slowest_of(answers),
        **kept_of(rounds),
        "kept_by_round": [each["kept_of_left"] for each in kept],
        "bulk_failed": sum(done.bulk.failed for done in rounds),
        "fewest_waiting": min(done.bulk.fewest for done in rounds),
        "longest_lag_ms": rounded(max(each.lag_ms for done in rounds for each in done.stretches)),
        "feeder_cpu_s": rounded(sum(done.bulk.cpu_s for done in rounds)),
    }
    return {**row, "verdicts": verdicts_of(row)}


def kept_of(rounds: Sequence[Round]) -> dict[str, Any]:
    """Rates of bulk with live jobs and without, and what it keeps of the time that they leave."""
    rates: dict[bool, float] = {}
    forward: dict[bool, float] = {}
    for is_live in (False, True):
        parts = [part for done in rounds for part in paces(done, is_live)]
        seconds = sum(part[1] for part in parts)
        rates[is_live] = sum(part[0] for part in parts) / seconds
        forward[is_live] = sum(part[2] for part in parts) / seconds / 1e3
    live = [each for done in rounds for each in done.stretches if each.is_live]
    seconds = sum(each.end_s - each.begin_s for each in live)
    own_s = sum(map(live_device_ms, rounds)) / 1e3
    in_batches_s = sum(batch_device_ms(each.answers) for each in live) / 1e3
    left = 1 - own_s / seconds
    return {
        "bulk_per_s": rounded(rates[False]),
        "bulk_with_live_per_s": rounded(rates[True]),
        "left_by_live": round(left, 4),
        # Of a second: live jobs' part of their batches, with what passes side by side wait there.
        "live_batches_busy": round(in_batches_s / seconds, 4),
        "kept_of_left": round(rates[True] / (rates[False] * left), 4),
        # Of a second: what bulk computed, as its batches say.
        "bulk_busy": round(forward[False], 4),
        "bulk_with_live_busy": round(forward[True], 4),
    }


def paces(done: Round, is_live: bool) -> Iterator[tuple[int, float, float]]:
    """Bulk items of each stretch of a kind, the seconds that they took, and their device time.

    From the last batch that ended before the stretch, to the last one that ended in it: so no part
    of a batch is lost.
    """
    batches = collect_batches(done.bulk)
    times_s = [end_s for end_s, _, _ in batches]
    for stretch in done.stretches:
        first = bisect_right(times_s, stretch.begin_s) - 1
        last = bisect_right(times_s, stretch.end_s) - 1
        if stretch.is_live == is_live and 0 <= first < last:
            inside = batches[first + 1 : last + 1]
            items = sum(count for _, count, _ in inside)
            yield items, times_s[last] - times_s[first], sum(each[2] for each in inside)


def collect_batches(bulk: Seen) -> list[tuple[float, int, float]]:
    """End, bulk items and their device time in ms of each batch, as they ended."""
    jobs: dict[str, list[Ended]] = {}
    for ended in bulk.ended:
        jobs.setdefault(ended.batch, []).append(ended)
    made = []
    for each in jobs.values():
        # Live jobs may be in it, too.
        items = sum(job.items for job in each)
        device_ms = each[0].forward_ms * items / each[0].size
        made.append((max(job.done_s for job in each), items, device_ms))
    return sorted(made)


def live_device_ms(done: Round) -> float:
    """Device time that live jobs need: at most what each needs alone, on an idle device.

    What their batches took among bulk may be more: a pass that waits for a stream counts there,
    and that would be held against nobody.
    """
    answers = [each for part in done.stretches for each in part.answers]
    return min(batch_device_ms(answers), done.lonely_forward_ms * len(answers))


def batch_device_ms(answers: Sequence[Answer]) -> float:
    """Live jobs' part of the time of each batch that they were in."""
    return sum(float(each.info["forward_ms"]) / int(each.info["size"]) for each in answers)


def stages_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Where the time of live jobs goes: median and p99 of each stage, in ms."""
    spent: dict[str, list[float]] = {
        stage: [float(each.info[stage]) for each in answers] for stage in STAGES
    }
    spent["elsewhere_ms"] = [
        each.latency_ms - sum(each.info[stage] for stage in STAGES) for each in answers
    ]
    return {
        stage: {"p50_ms": rounded(cut(values, 50)), "p99_ms": rounded(cut(values, 99))}
        for stage, values in spent.items()
    }


def sizes_of(answers: Sequence[Answer]) -> dict[str, int]:
    """Number of live jobs by the size of their batch: alone, with few, in a full one."""
    sizes = Counter(each.info["size"] for each in answers)
    return {str(size): count for size, count in sorted(sizes.items())}


def slowest_of(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The live jobs that took longest, with what the worker says of their batches."""
    longest = sorted(answers, key=lambda each: each.latency_ms)[: -SLOWEST - 1 : -1]
    return [
        {
            "latency_ms": rounded(each.latency_ms),
            **{key: each.info[key] for key in ("id", "size", *STAGES)},
        }
        for each in longest
    ]


def cut(values: Sequence[float], percent: int) -> float:
    """A percentile."""
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def rounded(value: float | None) -> float | None:
    """A figure for people."""
    return None if value is None else round(value, 2)


def verdicts_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is claimed, whether it holds, and what was found."""
    bound_ms = 2 * row["pass_ms"] + ALLOWANCE_MS
    return [
        {
            "claim": "p99 of live under two passes of the micro-batch budget plus 20 ms",
            "holds": row["p99_ms"] < bound_ms,
            "found": f"{row['p99_ms']:,} ms, of {bound_ms:,.1f} ms",
        },
        {
            "claim": "bulk keeps at least 95 % of the time that live leaves",
            "holds": row["kept_of_left"] >= KEPT_SHARE,
            "found": f"{row['kept_of_left']:.1%}; live leaves {row['left_by_live']:.1%}",
        },
        {
            "claim": "no bulk job fails, and bulk always waits",
            "holds": not row["bulk_failed"] and row["fewest_waiting"] > 0,
            "found": f"{row['bulk_failed']:,} failed; {row['fewest_waiting']:,} waited at least",
        },
    ]


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Prints tables and verdicts."""
    console.print(report["hardware"])
    first = report["rows"][0]
    console.print(
        f"bulk jobs of {report['per_job']} texts, batches of {report['max_batch_size']};"
        f" {report['live_per_s']:g} live jobs/s; {report['streams']} passes side by side, each of"
        f" up to {first['budget_tokens']:,} tokens"
    )
    heads = ("", "full pass", "live alone, p50", *(f"p{each}" for each in PERCENTS), "longest")
    table = Table(*heads, "bulk", "bulk with live", "live leaves", "bulk keeps", box=box.MARKDOWN)
    for row in report["rows"]:
        table.add_row(
            row["code"],
            f"{row['pass_ms']:,} ms",
            f"{row['lonely_p50_ms']:,} ms",
            *(f"{row[f'p{percent}_ms']:,} ms" for percent in PERCENTS),
            f"{row['longest_ms']:,} ms",
            f"{row['bulk_per_s']:,}/s",
            f"{row['bulk_with_live_per_s']:,}/s",
            f"{row['left_by_live']:.1%}",
            f"{row['kept_of_left']:.1%}",
        )
    console.print(table)
    show_stages(console, report["rows"])
    for row in report["rows"]:
        for each in row["verdicts"]:
            holds = "yes" if each["holds"] else "NO"
            console.print(f"{row['code']}: {holds}: {each['claim']}: {each['found']}")


def show_stages(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints where the time of live jobs goes."""
    table = Table("live jobs: p50, p99", *rows[0]["stages"], "alone in its batch", box=box.MARKDOWN)
    for row in rows:
        alone = row["live_batch_sizes"].get("1", 0)
        spent = [f"{each['p50_ms']:,}, {each['p99_ms']:,}" for each in row["stages"].values()]
        table.add_row(row["code"], *spent, f"{alone:,} of {row['live_jobs']:,}")
    console.print(table)


if __name__ == "__main__":
    main()

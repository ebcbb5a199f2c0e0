"""What it costs if something listens to each job: Sentry, OpenTelemetry, hooks, receivers.

Each row runs on Batchery and on Celery's solo pool; all of them in each round, so that whatever the
machine does meets all. The ratios are each system's own: with the listener, of without. Where other
programs use the machine, the worker's processor time per job says more.

    python -m benchmarks.queue.instrumentation --json benchmarks/results/instrumentation.json
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Sample, run_in_turn
from benchmarks.queue.systems import CELERY, WORKER, System

MODULE = "benchmarks.peers.listened_tasks"

#: Name of a listener in the app -> what the table says.
LISTENERS = {
    "nothing": "nothing",
    "sentry": "Sentry, without traces",
    "otel": "OpenTelemetry: a span per batch; Celery's own: per job",
    "otel-jobs": "OpenTelemetry: spans per batch and job; Celery's own: per job",
    "hook": "on_success",
    "receivers": "receivers of prerun, success and postrun",
}

#: Jobs per round, as a multiple of what was asked for.
WEIGHTS = {"batchery": 5.0, "celery": 1.0}


def system(name: str, listener: str) -> System:
    """One listener on Batchery, or on Celery as it is."""
    pool = ("-P", "solo") if name == "celery" else ()
    return System(
        f"{name}, {listener}",
        MODULE,
        (*CELERY, MODULE, *WORKER, *pool),
        environment={"PEER_LISTENER": listener, "PEER_STOCK": str(int(name == "celery"))},
        weight=WEIGHTS[name],
        has_latency=False,
    )


def main() -> None:
    """Runs all rows in turn; prints both systems side by side, with their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000, help="per row and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--listeners", nargs="+", choices=LISTENERS, default=list(LISTENERS))
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    # The ratios need it.
    listeners = ["nothing", *(each for each in options.listeners if each != "nothing")]
    systems = [system(name, listener) for listener in listeners for name in WEIGHTS]
    samples = run_in_turn(systems, options.jobs, 0, options.rounds)
    info = {
        "hardware": hardware(),
        "jobs": options.jobs,
        "rounds": options.rounds,
        "rows": [row(samples, listener) for listener in listeners],
    }
    show(info)
    write_report(options.json, info)


def row(samples: dict[str, list[Sample]], listener: str) -> dict[str, Any]:
    """Medians of both systems, and the medians of the rounds' own ratios."""
    info: dict[str, Any] = {"listener": listener}
    for name in WEIGHTS:
        rates, plain = (
            [each.jobs_per_s for each in samples[system(name, which).name]]
            for which in (listener, "nothing")
        )
        ratios = [rate / without for rate, without in zip(rates, plain, strict=True)]
        info[f"{name}_jobs_per_s"] = round(statistics.median(rates))
        info[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        info[f"{name}_worker_us_per_job"] = round(
            statistics.median(each.worker_us for each in samples[system(name, listener).name])
        )
    return info


def show(info: dict[str, Any]) -> None:
    """Prints the table, ready for a page of docs."""
    heads = (f"{name}{of}" for name in WEIGHTS for of in (", jobs/s", ", of plain", ", CPU"))
    made = Table("what listens", *heads, box=box.MARKDOWN)
    for each in info["rows"]:
        cells: list[str] = []
        for name in WEIGHTS:
            cells += (
                f"{each[f'{name}_jobs_per_s']:,}",
                f"{each[f'{name}_ratio']:.2f}",
                f"{each[f'{name}_worker_us_per_job']:,} µs",
            )
        made.add_row(LISTENERS[each["listener"]], *cells)
    console = Console(highlight=False, width=150)
    console.print(info["hardware"])
    console.print(made)


if __name__ == "__main__":
    main()

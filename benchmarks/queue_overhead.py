"""What the queue costs: no-op jobs through Batchery and through Celery's own pools.

Every system runs the same jobs in the same run, in turn, on a private redis-server: published
before the worker starts, results stored, acknowledged late, no task events unless the row says so.
The clock runs from the first to the last result that the worker stores, so that neither its start
nor the publishing counts.

    python benchmarks/queue_overhead.py --jobs 5000 --rounds 3 --json queue_overhead.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis
from celery import Celery
from rich.console import Console
from rich.table import Table

from batchery.embedded import EmbeddedRedis
from hardware import hardware

#: The app of every system: one task, once as a batch task and once as an ordinary one.
APP = """
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("bench"))
app.conf.update(task_acks_late=True, worker_hijack_root_logger=False)


@app.task(base=BatchTask, max_batch_size=64)
def batched(items):
    return items


@app.task
def ordinary(item):
    return item
"""


@dataclass(frozen=True, slots=True)
class System:
    """One row: which task, and how its worker is started."""

    name: str
    task: str
    arguments: Sequence[str]


SYSTEMS = (
    System("batchery", "tasks.batched", ()),
    System("batchery, with events", "tasks.batched", ("-E",)),
    System("celery solo", "tasks.ordinary", ("-P", "solo")),
    System("celery solo, with events", "tasks.ordinary", ("-P", "solo", "-E")),
    System("celery threads -c 4", "tasks.ordinary", ("-P", "threads", "-c", "4")),
    System("celery prefork -c 2", "tasks.ordinary", ("-P", "celery.concurrency.prefork:TaskPool")),
)

#: Longest time for one system in one round, in seconds.
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Sample:
    """One system in one round."""

    jobs_per_s: float
    #: Processor time of the worker and its children per job, start-up excluded, in microseconds.
    cpu_us_per_job: float


def measure(system: System, jobs: int, folder: Path, server: EmbeddedRedis) -> Sample:
    """Publishes all jobs, starts the worker, and times it from its first result to its last."""
    client = redis.Redis.from_url(server.url)
    client.flushall()
    app = Celery("client", broker=server.url, backend=server.url, set_as_current=False)
    with app.producer_pool.acquire(block=True) as producer:
        for number in range(jobs):
            app.send_task(
                system.task,
                [number],
                producer=producer,
                ignore_result=True,
                headers={"ignore_result": False},
            )
    worker = start(system, folder, server.url)
    try:
        warm = jobs // 10
        begun_s, cpu_s = wait_for_results(client, worker, warm)
        ended_s, cpu_end_s = wait_for_results(client, worker, jobs)
        counted = jobs - warm
        return Sample(counted / (ended_s - begun_s), (cpu_end_s - cpu_s) / counted * 1e6)
    finally:
        worker.terminate()
        worker.wait(30)
        app.close()
        client.close()


def start(system: System, folder: Path, url: str) -> psutil.Popen:
    """Starts one worker, quiet, so that logging costs every system the same: nothing."""
    command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "tasks", "worker"]
    command += ["-l", "ERROR", "--without-mingle", "--without-gossip", *system.arguments]
    environment = {**os.environ, "CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url}
    if "prefork" in system.name:
        # By its plain name Celery would take the pool that the app has configured.
        index = command.index("-P")
        command[index : index + 2] = ["-P", "custom", "-c", "2"]
        environment["CELERY_CUSTOM_WORKER_POOL"] = system.arguments[-1]
    return psutil.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_results(client: Any, worker: psutil.Popen, count: int) -> tuple[float, float]:
    """Waits for so many results; returns the time and the worker's processor time then."""
    deadline_s = time.monotonic() + TIMEOUT_S
    # Results are the only keys with an expiry, so that counting them costs Redis nothing.
    while client.info("keyspace").get("db0", {}).get("expires", 0) < count:
        if worker.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("the worker ended or stopped answering")
        time.sleep(0.01)
    return time.monotonic(), cpu_of(worker)


def cpu_of(worker: psutil.Popen) -> float:
    """Processor time of a worker and its children so far, in seconds."""
    family = [worker, *worker.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def main() -> None:
    """Runs all systems in turn, prints a table, writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=3000, help="per system and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    samples: dict[str, list[Sample]] = {system.name: [] for system in SYSTEMS}
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as server:
        folder = Path(name)
        (folder / "tasks.py").write_text(APP)
        for number in range(options.rounds):
            for system in SYSTEMS:
                console.print(f"round {number + 1} of {options.rounds}: {system.name}")
                samples[system.name].append(measure(system, options.jobs, folder, server))
    rows = [row(name, each) for name, each in samples.items()]
    console.print(hardware())
    print_table(console, rows)
    if options.json:
        report = {"hardware": hardware(), "jobs": options.jobs, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def row(name: str, samples: Sequence[Sample]) -> dict[str, Any]:
    """Median and spread of one system."""
    rates = [sample.jobs_per_s for sample in samples]
    return {
        "system": name,
        "jobs_per_s": round(statistics.median(rates)),
        "spread": [round(min(rates)), round(max(rates))],
        "cpu_us_per_job": round(statistics.median(sample.cpu_us_per_job for sample in samples)),
    }


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows, each beside its ratio to the best stock pool without events."""
    plain = [each for each in rows if each["system"].startswith("celery")]
    best = max(each["jobs_per_s"] for each in plain if "events" not in each["system"])
    table = Table("system", "jobs/s", "spread", "CPU per job", "of stock's best")
    for each in rows:
        table.add_row(
            each["system"],
            f"{each['jobs_per_s']:,}",
            f"{each['spread'][0]:,} to {each['spread'][1]:,}",
            f"{each['cpu_us_per_job']} µs",
            f"{each['jobs_per_s'] / best:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()

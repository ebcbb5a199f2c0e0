"""What makes a worker grow: its memory after each kind of job, again and again, and after faults.

One worker with two processes of Celery's pool, and Celery as it is beside it. Memory is resident,
in MiB, a second after the last job of a step: that of the main process, and of the larger process
of its pool.

    python -m benchmarks.queue.growth --json benchmarks/results/growth.json
"""

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
from redis import Redis
from rich.console import Console
from rich.table import Table

from batchery.transport.redis_schema import Keys
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import TIMEOUT_S, Bench
from benchmarks.queue.systems import CELERY, WORKER, System

MODULE = "benchmarks.peers.growing_tasks"
COMMAND = (*CELERY, MODULE, *WORKER, "-c", "2")

SYSTEMS = {
    "batchery": System("batchery", MODULE, COMMAND),
    "celery": System("celery", MODULE, COMMAND, environment={"PEER_STOCK": "1"}),
}

JOBS = ("succeed", "fail", "retry")

#: What each system is given, in order, and then once more.
STEPS = {
    "batchery": [*(f"{kind}.{job}" for kind in ("batch", "ordinary") for job in JOBS), "cuts"],
    "celery": [*(f"ordinary.{job}" for job in JOBS), "cuts"],
}

#: Pause before memory is read, in seconds: what was freed is given back by then.
SETTLE_S = 1.0

#: Pause between two looks whether all jobs are done, in seconds.
LOOK_S = 0.1


class Growth(Bench):
    """A worker that is given one step after the other."""

    def measure(self, system: System, rounds: int, cuts: int) -> list[dict[str, Any]]:
        """The rows of a system: its memory at the start, and after each step.

        Raises:
            SystemExit: It cannot be started, or stops answering.
        """
        self._redis.flushall()
        with self._worker(system) as worker:
            self._run_jobs(system, worker, STEPS[system.name][0], 100)
            rows = [self._row(system, worker, "start")]
            for step in STEPS[system.name] * rounds:
                if step == "cuts":
                    for _ in range(cuts):
                        self._cut(system, worker)
                else:
                    self._run_jobs(system, worker, step, self._jobs)
                rows.append(self._row(system, worker, step))
        return rows

    def _run_jobs(self, system: System, worker: psutil.Popen, task: str, jobs: int) -> None:
        filling = System(
            system.name, MODULE, (), environment={**system.environment, "PEER_TASK": task}
        )
        self._client(filling, "fill", jobs)
        self._wait_empty(system, worker)

    def _cut(self, system: System, worker: psutil.Popen) -> None:
        """Cuts all connections of the worker, and has it run something on new ones."""
        self._redis.client_kill_filter(_type="normal", skipme=True)
        self._redis.client_kill_filter(_type="pubsub", skipme=True)
        self._run_jobs(system, worker, STEPS[system.name][0], 1)

    def _wait_empty(self, system: System, worker: psutil.Popen) -> None:
        """Waits until no message waits, and none is held."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._count():
            if worker.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{system.name}: the worker ended or stopped answering")
            time.sleep(LOOK_S)

    def _count(self) -> int:
        keys = Keys("")
        workers = self._redis.zrange(keys.workers, 0, -1)
        leases = sum(self._redis.hlen(keys.lease(each.decode())) for each in workers)
        return int(leases + self._redis.hlen("unacked") + self._redis.llen("celery"))

    def _row(self, system: System, worker: psutil.Popen, step: str) -> dict[str, Any]:
        time.sleep(SETTLE_S)
        pool, device = [0], 0
        for each in psutil.Process(worker.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "batchery_worker.device" in each.cmdline():
                    device = each.memory_info().rss
                elif "celery" in " ".join(each.cmdline()):
                    pool.append(each.memory_info().rss)
        main = psutil.Process(worker.pid).memory_info().rss
        return {
            "system": system.name,
            "step": step,
            **{
                f"{name}_mib": round(size / 2**20, 1)
                for name, size in (("main", main), ("pool", max(pool)), ("device", device))
            },
        }


def main() -> None:
    """Measures both, prints a table, and writes it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=3000, help="of each step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cuts", type=int, default=20, help="of connections, in each round")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    console, rows = Console(highlight=False), list[dict[str, Any]]()
    with EmbeddedRedis() as server, Redis.from_url(server.url) as client:
        info: Any = client.info("server")
        for system in SYSTEMS.values():
            console.print(f"{system.name} ...")
            bench = Growth(server, options.jobs, calls=0)
            rows += bench.measure(system, options.rounds, options.cuts)
    report = {"hardware": hardware(), "redis": info["redis_version"], "jobs": options.jobs}
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(report)
    console.print(table)
    write_report(options.json, {**report, "rows": rows})


if __name__ == "__main__":
    main()

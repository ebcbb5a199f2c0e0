"""Memory of a worker over very many no-op jobs: does it grow?

python -m benchmarks.queue.memory --jobs 1000000 --json benchmarks/results/memory.json
"""

import argparse
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.runs import Bench
from benchmarks.queue.systems import System, batchery

#: Jobs that are in the queue together.
WAVE = 20_000


class Soak(Bench):
    """Feeds one worker in waves, and weighs it after each."""

    def weigh(self, system: System, jobs: int) -> list[dict[str, Any]]:
        """Runs so many jobs.

        Returns:
            Jobs done, and resident memory in MiB of the worker's main process and of its device,
            after each wave.
        """
        rows = []
        with self._worker(system) as worker:
            for done in range(WAVE, jobs + 1, WAVE):
                self._client(system, "fill", WAVE)
                self._wait(system, worker, done)
                (device,) = (each for each in worker.children(True) if is_device(each))
                rows.append({"jobs": done, "main_mib": mib(worker), "device_mib": mib(device)})
                print(rows[-1], flush=True)
        return rows


def is_device(process: psutil.Process) -> bool:
    """Whether a child of a worker is one of its devices."""
    return "batchery_worker.device" in process.cmdline()


def mib(process: psutil.Process) -> float:
    """Resident memory, in MiB."""
    rss: int = process.memory_info().rss
    return round(rss / 2**20, 1)


def growth(rows: list[dict[str, Any]], name: str) -> float:
    """By how many MiB the last tenth is above the second tenth: the first warms up."""
    tenth = max(1, len(rows) // 10)
    early, late = rows[tenth : 2 * tenth] or rows[:1], rows[-tenth:]
    grown: float = max(row[name] for row in late) - max(row[name] for row in early)
    return round(grown, 1)


def main() -> None:
    """Runs the jobs and prints the growth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if options.jobs < WAVE:
        parser.error(f"--jobs: expected at least {WAVE:,}, which are in the queue together")
    with EmbeddedRedis() as server:
        bench = Soak(server, options.jobs, calls=0)
        rows = bench.weigh(batchery("batchery", transport="batchery"), options.jobs)
    figures = {name: growth(rows, name) for name in ("main_mib", "device_mib")}
    report = {"hardware": hardware(), "growth": figures, "rows": rows}
    Console(highlight=False).print({name: report[name] for name in ("hardware", "growth")})
    write_report(options.json, report)


if __name__ == "__main__":
    main()

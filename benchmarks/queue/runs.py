"""Runs systems in turn: how fast each worker empties a full queue, and answers when it is idle.

Every finished job leaves a key that expires, whichever the system, so that the number of such keys
says how many are done; Redis keeps count of them, and telling it costs nothing.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from redis import Redis

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.queue.systems import System
from benchmarks.rows import in_turn
from benchmarks.venvs import child_environment, python_of

#: Longest time for one system in one round, in seconds.
TIMEOUT_S = 600.0

#: Pause between two looks, in seconds.
LOOK_S = 0.01

#: How much of the jobs is done before the clock starts: the worker is warm then.
WARM = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One system in one round."""

    jobs_per_s: float
    #: Processor time per job of the worker and its children, and of Redis, in microseconds.
    worker_us: float
    redis_us: float
    #: Single calls, one after the other, on an idle worker; in seconds.
    latencies_s: list[float]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the clocks and counters said at one moment."""

    jobs: float
    at_s: float
    worker_s: float
    redis_s: float


def run_in_turn(
    systems: Sequence[System], jobs: int, calls: int, rounds: int
) -> dict[str, list[Sample]]:
    """Runs every system once a round, on a Redis of its own; returns their samples by name."""
    samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
    with EmbeddedRedis() as server:
        bench = Bench(server, jobs, calls)
        for number, system in in_turn(systems, rounds):
            print(f"round {number + 1} of {rounds}: {system.name}", flush=True)
            samples[system.name].append(bench.run(system))
    return samples


class Bench:
    """Runs systems, one at a time, against one Redis."""

    def __init__(self, server: EmbeddedRedis, jobs: int, calls: int) -> None:
        """Prepares a bench.

        Args:
            server: A Redis of its own; it is emptied before each run.
            jobs: In the queue, before a system's own weight.
            calls: Single calls per run.
        """
        self._url = server.url
        self._redis: Any = Redis.from_url(server.url)
        self._jobs = jobs
        self._calls = calls

    def run(self, system: System) -> Sample:
        """Measures a system.

        Raises:
            SystemExit: It cannot be started, or stops answering.
        """
        self._redis.flushall()
        jobs = int(self._jobs * system.weight)
        self._client(system, "fill", jobs)
        with self._worker(system) as worker:
            begin = self._wait(system, worker, int(jobs * WARM))
            end = self._wait(system, worker, jobs)
            latencies = json.loads(self._latency(system)) if system.has_latency else []
        counted = end.jobs - begin.jobs
        if not counted:
            raise SystemExit(f"{system.name}: too quick to be timed; give it more --jobs")
        return Sample(
            counted / (end.at_s - begin.at_s),
            (end.worker_s - begin.worker_s) / counted * 1e6,
            (end.redis_s - begin.redis_s) / counted * 1e6,
            latencies,
        )

    def _latency(self, system: System) -> str:
        return self._client(system, "latency", self._calls) if self._calls else "[]"

    def _client(self, system: System, action: str, count: int) -> str:
        python = str(python_of(system.requirements))
        answer = subprocess.run(
            [python, "-W", "ignore", "-m", system.module, action, str(count)],
            env=self._environment(system),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        if answer.returncode:
            raise SystemExit(f"{system.name}: cannot {action}: {answer.stderr}")
        return answer.stdout.strip().rpartition("\n")[2]

    @contextlib.contextmanager
    def _worker(self, system: System) -> Iterator[psutil.Popen]:
        python = python_of(system.requirements)
        arguments = [each.format(url=self._url) for each in system.worker]
        # Quiet, so that logging costs every system the same: nothing.
        worker = psutil.Popen(
            [python, "-W", "ignore", *arguments],
            env=self._environment(system),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield worker
        finally:
            worker.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                worker.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(10)

    def _environment(self, system: System) -> dict[str, str]:
        return child_environment(PEER_URL=self._url, **system.environment)

    def _wait(self, system: System, worker: psutil.Popen, jobs: int) -> Reading:
        deadline_s = time.monotonic() + TIMEOUT_S
        while (done := self._done(system)) < jobs:
            if worker.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{system.name}: the worker ended or stopped answering")
            time.sleep(LOOK_S)
        used = self._redis.info("cpu")
        redis_s = used["used_cpu_sys"] + used["used_cpu_user"]
        return Reading(done, time.monotonic(), cpu_of(worker), redis_s)

    def _done(self, system: System) -> float:
        keyspace = self._redis.info("keyspace")
        return float(keyspace.get("db0", {}).get("expires", 0)) / system.keys_per_job


def cpu_of(worker: psutil.Process | psutil.Popen) -> float:
    """Processor time of a worker and its children so far, ended ones included, in seconds."""
    family = [worker, *worker.children(recursive=True)]
    used = 0.0
    for each in family:
        with contextlib.suppress(psutil.Error):
            used += sum(each.cpu_times()[:4])
    return used

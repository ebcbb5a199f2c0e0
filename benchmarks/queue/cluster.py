"""What a job costs each node of a cluster, and one server: jobs whose results are vectors.

The queues of eight tasks are full before the worker starts. The clock runs from a tenth of the
results to the last. Where there are cores, each node has one of its own.

    python -m benchmarks.queue.cluster --rounds 5 --json benchmarks/results/cluster.json
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from celery import Celery
from redis import Redis

from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import command, hardware, write_report
from benchmarks.peers.batchery_vectors import NUMBERS, TASKS
from benchmarks.queue.runs import LOOK_S, TIMEOUT_S, WARM, cpu_of
from benchmarks.redis_clients import connect, find_tag
from benchmarks.redis_cluster import RedisCluster
from benchmarks.rows import in_turn, median_and_spread, print_table, show_spread

NODES = 4

#: Cores for workers and all else, where each node has its own.
OTHER_CORES = 4

MODULE = "benchmarks.peers.batchery_vectors"

#: Messages per LPUSH.
CHUNK = 1_000


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured in one round."""

    jobs_per_s: float
    #: Processor time per job, in microseconds: of all workers, and of each node.
    worker_us: float
    node_us: Sequence[float]


class Place:
    """A broker, and what has the jobs and results."""

    def __init__(self, broker: str, jobs: str, nodes: Sequence[str]) -> None:
        """Connects.

        Args:
            broker: Celery's.
            jobs: The same, or a cluster.
            nodes: URLs of the servers with jobs and results.
        """
        self._environment = {"PEER_URL": broker, "PEER_JOBS_URL": jobs}
        self._url = jobs
        self._redis = connect(jobs)
        self._nodes: list[Any] = [Redis.from_url(each) for each in nodes]

    def run(self, jobs: int, workers: int) -> Row:
        """Measures so many jobs.

        Raises:
            SystemExit: A worker ends, or they do not end the jobs.
        """
        for node in self._nodes:
            node.flushall()
        jobs = self._fill(jobs)
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(self._worker()) for _ in range(workers)]
            begun = self._wait(started, int(jobs * WARM))
            ended = self._wait(started, jobs)
        spent = [after - before for before, after in zip(begun, ended, strict=True)]
        done, seconds, worker_s, *nodes_s = spent
        us = [1e6 * each / done for each in (worker_s, *nodes_s)]
        return Row(done / seconds, us[0], us[1:])

    def _fill(self, jobs: int) -> int:
        """Fills the queues of all tasks; returns the number of jobs."""
        each = jobs // len(TASKS)
        for task in TASKS:
            text = make_message(task)
            tag = json.loads(text)["properties"]["delivery_tag"]
            for start in range(0, each, CHUNK):
                copies = [
                    text.replace(NO_ID, str(uuid.uuid4())).replace(tag, str(uuid.uuid4()))
                    for _ in range(min(CHUNK, each - start))
                ]
                self._redis.lpush(f"{find_tag(self._url, task)}{task}", *copies)
        return each * len(TASKS)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[GuardedProcess]:
        options = ["-l", "ERROR", "--without-mingle", "--without-gossip", "-P", "solo"]
        name = f"{uuid.uuid4()}@bench"
        celery = [sys.executable, "-W", "ignore", "-m", "celery", "-A", MODULE, "worker"]
        worker = GuardedProcess(
            [*celery, *options, "-n", name, "-Q", ",".join(TASKS)],
            env={**os.environ, **self._environment},
        )
        try:
            yield worker
        finally:
            worker.stop(10)

    def _wait(self, workers: Sequence[GuardedProcess], jobs: int) -> list[float]:
        """Jobs done, time, and processor time of the workers and of each node, in seconds."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while (done := sum(map(count_results, self._nodes))) < jobs:
            ended = [each.tail(5) for each in workers if each.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                raise SystemExit(f"{done} of {jobs} jobs are done; workers that ended: {ended}")
            time.sleep(LOOK_S)
        worker_s = sum(cpu_of(psutil.Process(each.pid)) for each in workers)
        return [float(done), time.monotonic(), worker_s, *map(cpu_of_node, self._nodes)]


#: Stands for the id of a job.
NO_ID = "0" * 36


def make_message(task: str) -> str:
    """The message of a job as Celery sends it, with an id of zeros."""
    with EmbeddedRedis() as server, Celery(broker=server.url, set_as_current=False) as app:
        app.send_task(task, [0], queue=task, task_id=NO_ID)
        with contextlib.closing(Redis.from_url(server.url, decode_responses=True)) as redis:
            return str(redis.lpop(task))


def count_results(node: Any) -> int:
    """How many results a node has: each is a key that expires."""
    return int(node.info("keyspace").get("db0", {}).get("expires", 0))


def cpu_of_node(node: Any) -> float:
    """Processor time of a server so far, in seconds."""
    used = node.info("cpu")
    return float(used["used_cpu_sys"] + used["used_cpu_user"])


@contextlib.contextmanager
def one_server() -> Iterator[Place]:
    """A Redis with everything."""
    with EmbeddedRedis() as server:
        pin([server.pid])
        yield Place(server.url, server.url, [server.url])


@contextlib.contextmanager
def cluster_of_four() -> Iterator[Place]:
    """Four primaries without replicas, and a broker beside them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedRedis() as broker,
        # As EmbeddedRedis writes its log.
        RedisCluster(Path(folder, "nodes"), NODES, 0, appendfsync="everysec") as cluster,
    ):
        pin([node.pid for node in cluster.nodes])
        yield Place(broker.url, cluster.url, [node.url for node in cluster.nodes])


def pin(pids: Sequence[int]) -> None:
    """Gives each of these processes a core of its own, where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= NODES + OTHER_CORES:
        for pid, core in zip(pids, cores, strict=False):
            psutil.Process(pid).cpu_affinity([core])


SYSTEMS = {"one server": one_server, "four nodes": cluster_of_four}


def main() -> None:
    """Measures in turn, prints a table; writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="each has a device of its own")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    found: dict[str, list[Row]] = {name: [] for name in SYSTEMS}
    for number, name in in_turn(list(SYSTEMS), options.rounds):
        print(f"round {number + 1} of {options.rounds}: {name}", flush=True)
        with SYSTEMS[name]() as place:
            found[name].append(place.run(options.jobs, options.workers))
    rows = [summarize(name, samples) for name, samples in found.items()]
    origin = {"hardware": hardware(), "command": command("queue.cluster"), "numbers": NUMBERS}
    heads = ("", "jobs/s", "spread", "worker CPU", "all nodes' CPU", "of each node")
    print_table(heads, [cells(row) for row in rows])
    write_report(options.json, {**origin, "jobs": options.jobs, "rows": rows})


def summarize(name: str, samples: Sequence[Row]) -> dict[str, Any]:
    """Medians of the rounds."""
    nodes = [
        statistics.median(each) for each in zip(*(row.node_us for row in samples), strict=True)
    ]
    return {
        "system": name,
        **median_and_spread("jobs_per_s", [row.jobs_per_s for row in samples], None),
        "worker_us_per_job": round(statistics.median(row.worker_us for row in samples)),
        "redis_us_per_job": round(statistics.median(sum(row.node_us) for row in samples), 1),
        "node_us_per_job": [round(each, 1) for each in nodes],
    }


def cells(row: dict[str, Any]) -> Sequence[str]:
    """A row as it is printed."""
    return (
        row["system"],
        f"{row['jobs_per_s']:,}",
        show_spread(row),
        f"{row['worker_us_per_job']:,} µs",
        f"{row['redis_us_per_job']:,} µs",
        ", ".join(f"{each:,}" for each in row["node_us_per_job"]) + " µs",
    )


if __name__ == "__main__":
    main()

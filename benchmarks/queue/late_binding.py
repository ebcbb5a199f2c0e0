"""Whether a job waits in one worker while another has nothing to do: 3 workers that sleep.

A batch of 32 jobs takes a worker a fixed time, in which it only sleeps. The ideal is that whoever
is idle takes up to 32 jobs of those that are left. With short batches, the rate is what counts. Odd
batches take times of a log-normal distribution; the ideal is that of their mean.

    python -m benchmarks.queue.late_binding --rounds 3 --json benchmarks/results/late_binding.json
"""

import argparse
import contextlib
import heapq
import json
import math
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from redis import Redis
from rich import box
from rich.console import Console
from rich.table import Table

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.systems import CELERY, WORKER
from benchmarks.venvs import ROOT

MODULE = "benchmarks.peers.sleeping_tasks"

#: As in the module.
BATCH_SIZE = 32

TEMPLATE = "the-template"

#: Pause between two looks, in seconds.
LOOK_S = 0.005

#: How many results one look asks for.
LOOKED_AT = 256

TIMEOUT_S = 300.0

#: How long all workers have had nothing to do before jobs come, in seconds.
IDLE_S = 1.0

#: Longest batch that is measured by its rate, in seconds.
SHORT_S = 0.02


class Case(NamedTuple):
    """Some workers, and how their jobs come."""

    name: str
    #: How long a batch takes each worker, in seconds.
    batch_s: tuple[float, ...]
    queues: tuple[str, ...] = ("celery",)
    one_by_one: bool = False
    #: Of a log-normal distribution of the times.
    sigma: float = 0.0


class Client:
    """Sends jobs, and sees when they are done."""

    def __init__(self, url: str) -> None:
        redis: Any = Redis.from_url(url)
        self._redis = redis
        app = Celery("client", broker=url, backend=url, set_as_current=False)
        options: Any = {"ignore_result": True, "headers": {"ignore_result": False}}
        app.send_task("sleep", [0], queue=TEMPLATE, **options)
        app.close()
        self._text: str = redis.rpop(TEMPLATE).decode()
        message = json.loads(self._text)
        self._ids = (message["headers"]["id"], message["properties"]["delivery_tag"])

    def run(self, jobs: int, queues: Sequence[str], *, one_by_one: bool) -> float:
        """Sends jobs; returns how many seconds pass until all of their results are there."""
        ids = [str(uuid.uuid4()) for _ in range(jobs)]
        messages = [
            self._message(queues[number % len(queues)], each) for number, each in enumerate(ids)
        ]
        began_s = time.monotonic()
        if one_by_one:
            for number, message in enumerate(messages):
                self._redis.lpush(queues[number % len(queues)], message)
        else:
            with self._redis.pipeline(transaction=True) as pipe:
                for number, queue in enumerate(queues):
                    pipe.lpush(queue, *messages[number :: len(queues)])
                pipe.execute()
        while ids:
            part = [f"celery-task-meta-{each}" for each in ids[-LOOKED_AT:]]
            if self._redis.exists(*part) == len(part):
                del ids[-LOOKED_AT:]
                continue
            if time.monotonic() > began_s + TIMEOUT_S:
                raise SystemExit(f"{len(ids)} or fewer of {jobs} jobs are not done")
            time.sleep(LOOK_S)
        return time.monotonic() - began_s

    def wait_for_workers(self, count: int) -> None:
        """Waits until so many workers consume."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._redis.zcard("batchery:workers") < count:
            if time.monotonic() > deadline_s:
                raise SystemExit("the workers do not start")
            time.sleep(LOOK_S)

    def _message(self, queue: str, task_id: str) -> str:
        copy = self._text.replace(f'"{TEMPLATE}"', f'"{queue}"')
        for each, new in zip(self._ids, (task_id, str(uuid.uuid4())), strict=True):
            copy = copy.replace(each, new)
        return copy


@contextlib.contextmanager
def workers(url: str, case: Case) -> Iterator[None]:
    """Starts a case's workers, each with one device."""
    with contextlib.ExitStack() as stack:
        for number, batch_s in enumerate(case.batch_s):
            arguments = ["-n", f"{number}@bench", "-c", "1", "-Q", ",".join(case.queues)]
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *CELERY, MODULE, *WORKER, *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
                    "PEER_URL": url,
                    "PEER_BATCH_S": str(batch_s),
                    "PEER_SIGMA": str(case.sigma),
                    "PEER_SEED": str(number),
                    "BATCHERY_DEVICES": "cpu",
                },
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        yield


def ideal_s(jobs: int, case: Case) -> float:
    """The time if whoever is idle takes up to a batch of what is left, at once."""
    ends = [(0.0, number) for number in range(len(case.batch_s))]
    last_s = 0.0
    mean_s = [each * math.exp(case.sigma**2 / 2) for each in case.batch_s]
    # What comes one by one is begun one by one.
    sizes = [1] * len(ends) if case.one_by_one else []
    while jobs > 0:
        jobs -= sizes.pop() if sizes else BATCH_SIZE
        free_s, number = heapq.heappop(ends)
        heapq.heappush(ends, (free_s + mean_s[number], number))
        last_s = max(last_s, free_s + mean_s[number])
    return last_s


def measure(case: Case, counts: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Runs a case on a Redis and workers of its own; returns a row for each number of jobs."""
    rows = []
    with EmbeddedRedis() as server, workers(server.url, case):
        client = Client(server.url)
        client.wait_for_workers(len(case.batch_s))
        # The workers learn how long their batches take.
        warm = 2 * BATCH_SIZE * len(case.batch_s)
        for _ in range(2):
            client.run(warm, case.queues, one_by_one=False)
        for jobs in counts:
            samples = []
            for _ in range(rounds):
                time.sleep(IDLE_S)
                samples.append(client.run(jobs, case.queues, one_by_one=case.one_by_one))
                print(f"{case.name}: {jobs} jobs, {samples[-1]:.2f} s", flush=True)
            median_s, ideal = statistics.median(samples), ideal_s(jobs, case)
            rows.append(
                {
                    "case": case.name,
                    "jobs": jobs,
                    "s": round(median_s, 3),
                    "ideal_s": round(ideal, 3),
                    "batches_over": round((median_s - ideal) / max(case.batch_s), 2),
                    "jobs_per_s": round(jobs / median_s, 1),
                }
            )
    return rows


def cases(batch_s: float, short_s: float) -> list[Case]:
    """What is measured: long batches first, then short ones."""
    return [
        Case("at once", (batch_s,) * 3),
        Case("one by one", (batch_s,) * 3, one_by_one=True),
        Case("3 queues", (batch_s,) * 3, queues=("one", "two", "three")),
        Case("a slow worker", (batch_s, batch_s, 4 * batch_s)),
        Case("odd batches", (batch_s / 4,) * 3, sigma=1.0),
        Case("short batches", (short_s,) * 3),
    ]


def main() -> None:
    """Runs all cases; prints how far each is from the ideal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-s", type=float, default=2.0, help="how long a long batch takes")
    parser.add_argument("--short-s", type=float, default=0.005, help="and a short one")
    parser.add_argument("--jobs", type=int, nargs="+", default=[32, 96, 144, 192, 288])
    parser.add_argument("--short-jobs", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", help="names of the cases; all of them if not given")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    known = cases(options.batch_s, options.short_s)
    if unknown := set(options.cases or ()) - {case.name for case in known}:
        parser.error(f"--cases: no {', '.join(unknown)}; {', '.join(case.name for case in known)}")
    rows = []
    for case in known:
        if not options.cases or case.name in options.cases:
            is_short = case.batch_s[0] <= SHORT_S
            counts = [options.short_jobs] if is_short else options.jobs
            rows += measure(case, counts, options.rounds)
    info = {"hardware": hardware(), "batch_s": options.batch_s, "rows": rows}
    show(info)
    write_report(options.json, info)


def show(info: dict[str, Any]) -> None:
    """Prints the table, ready for a page of docs."""
    headings = ("case", "jobs", "s", "ideal", "batches over", "jobs/s")
    made = Table(*headings, box=box.MARKDOWN)
    for each in info["rows"]:
        made.add_row(
            each["case"],
            f"{each['jobs']:,}",
            f"{each['s']:.2f}",
            f"{each['ideal_s']:.2f}",
            f"{each['batches_over']:.2f}",
            f"{each['jobs_per_s']:,.0f}",
        )
    console = Console(highlight=False, width=100)
    console.print(info["hardware"])
    console.print(f"3 workers; a batch of {BATCH_SIZE} takes {info['batch_s']:g} s")
    console.print(made)


if __name__ == "__main__":
    main()

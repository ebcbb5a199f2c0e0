"""What a job costs a device beside the model: CPU time per job, and of what it is made.

A real device process and a private Redis; the model answers at once, with vectors of 384 numbers.
Below it, the steps of one result, each beside what it took the place of.

    python -m benchmarks.queue.device_cost --json benchmarks/results/device_cost.json
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from celery.utils.saferepr import saferepr
from redis import Redis
from rich.console import Console

from batchery_worker.device.reply import format_result
from batchery_worker.devstack.redis_server import EmbeddedRedis
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.ipc.messages import (
    CommitContext,
    Done,
    Ready,
    Setup,
    Work,
    dump_message,
    load_reply,
)
from batchery_worker.models.embedding import encoded_results
from benchmarks.hardware import hardware, write_report
from benchmarks.venvs import ROOT

#: Numbers of a vector, as MiniLM's have.
DIMENSIONS = 384

#: Characters of a result that an event shows.
TEXT_CHARS = 128

SIZE = 64

#: Batches that a device holds beside the one that is sent.
AHEAD = 2

WORKER = "w"
WORKERS_KEY = "batchery:workers"
LEASE_KEY = "batchery:lease:w"


def steps() -> list[dict[str, Any]]:
    """Microseconds of CPU per result of each step, and of what it took the place of."""
    random = np.random.default_rng(0)
    values = random.normal(size=(SIZE, DIMENSIONS)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    full = [{"tokens": 12, "vector": row} for row in values.tolist()]
    heads = [{"tokens": 12}] * SIZE
    short = encoded_results(heads, values)
    stored, stored_before = [each.json for each in short], list(map(json.dumps, full))
    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any] | None]] = [
        ("numbers to Python", lambda: None, values.tolist),
        (
            "JSON",
            lambda: encoded_results(heads, values),
            lambda: list(map(json.dumps, full)),
        ),
        (
            "text of an event",
            lambda: [format_result(each, TEXT_CHARS) for each in short],
            lambda: [saferepr(each, TEXT_CHARS) for each in full],
        ),
        (
            "read by the caller",
            lambda: list(map(json.loads, stored)),
            lambda: list(map(json.loads, stored_before)),
        ),
    ]
    return [
        {"step": name, "us": cost_us(now), "us_before": cost_us(before) if before else None}
        for name, now, before in pairs
    ]


def cost_us(call: Callable[[], Any], rounds: int = 30) -> float:
    """CPU time per result, the least of all rounds."""
    times_s = []
    for _ in range(rounds):
        began_s = time.process_time()
        call()
        times_s.append(time.process_time() - began_s)
    return round(min(times_s) / SIZE * 1e6, 1)


def whole(batches: int, text_chars: int | None) -> dict[str, float]:
    """CPU time per job of a device process, and of Redis."""
    ours, theirs = socket.socketpair()
    with EmbeddedRedis() as server, ours, Redis.from_url(server.url) as client:
        command = [sys.executable, "-m", "batchery_worker.device", str(theirs.fileno())]
        environment = {**os.environ, "DEVICE_COST_REDIS": server.url}
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environment)
        theirs.close()
        app = "benchmarks.peers.device_cost_app"
        setup = Setup("cpu", (str(ROOT), *sys.path), f"{app}:app", [app], ["vectors"], {"": 30})
        write_frame(ours, dump_message(setup))
        assert isinstance(load_reply(read_frame(ours)), Ready)
        client.zadd(WORKERS_KEY, {WORKER: time.time()})
        run(ours, client, range(10), text_chars)
        processes = [psutil.Process(process.pid), psutil.Process(server.pid)]
        before_s = [sum(each.cpu_times()[:2]) for each in processes]
        run(ours, client, range(10, 10 + batches), text_chars)
        after_s = [sum(each.cpu_times()[:2]) for each in processes]
        jobs = batches * SIZE
        device, redis = (
            round((after - before) / jobs * 1e6, 1)
            for after, before in zip(after_s, before_s, strict=True)
        )
        ours.shutdown(socket.SHUT_RDWR)
        process.wait()
    return {"device_us": device, "redis_us": redis}


def run(end: socket.socket, client: Any, ids: range, text_chars: int | None) -> None:
    """Sends batches, two of them ahead as a worker does; each job's lease is held until then."""
    for number in ids:
        names = [f"{number}-{job}" for job in range(SIZE)]
        client.hset(LEASE_KEY, mapping=dict.fromkeys(names, "a message"))
        context = CommitContext(
            WORKER, WORKERS_KEY, LEASE_KEY, 0, [(name, 1.0, {}) for name in names], text_chars
        )
        jobs = [(name, ["a text"], False) for name in names]
        write_frame(
            end, dump_message(Work(number, "vectors", {}, jobs, SIZE, None, commit=context))
        )
        if number - ids.start >= AHEAD:
            expect_commit(end)
    for _ in ids[:AHEAD]:
        expect_commit(end)


def expect_commit(end: socket.socket) -> None:
    """Reads one answer; each of its jobs must be stored."""
    done = load_reply(read_frame(end))
    assert isinstance(done, Done)
    assert {verdict for verdict, _ in done.jobs} == {"committed"}


def main() -> None:
    """Measures, prints and keeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    report = {
        "hardware": hardware(),
        "steps": steps(),
        "per_job": whole(options.batches, None),
        "per_job_with_text": whole(options.batches, TEXT_CHARS),
    }
    Console(highlight=False).print(report)
    write_report(options.json, report)


if __name__ == "__main__":
    main()

"""What a job takes of Redis's memory: while it waits, and as a result that nobody has fetched.

Messages are those of stock Celery, byte for byte but for their ids.

    python -m benchmarks.queue.backlog --json benchmarks/results/backlog.json
"""

import argparse
import json
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from celery import Celery
from redis import Redis
from rich.console import Console

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware, write_report

#: What the item of a job is, by its characters.
ITEMS = {"nothing": 0, "a paragraph, 250 characters": 250, "a page, 2,000 characters": 2_000}

#: Numbers of a vector.
VECTORS = (384, 1_024)

#: How long results are kept by default, in seconds.
EXPIRES_S = 86_400

#: Commands that are sent together.
PIPELINE = 1_000


def read_message(server: EmbeddedRedis, redis: Any, item: str) -> str:
    """The message of a job as Celery sends it, with an id of zeros."""
    with Celery(broker=server.url, set_as_current=False) as app:
        app.send_task("embed", [item], queue="embed", task_id="0" * 36)
    message: str = redis.lpop("embed")
    return message


def write(redis: Any, commands: Iterable[tuple[str, ...]]) -> None:
    """Sends many commands."""
    pipeline = redis.pipeline(transaction=False)
    for number, command in enumerate(commands, 1):
        pipeline.execute_command(*command)
        if number % PIPELINE == 0:
            pipeline.execute()
    pipeline.execute()


def fill_queue(message: str, jobs: int) -> Iterator[tuple[str, ...]]:
    """Commands that send a message so many times, each with an id of its own."""
    tag = json.loads(message)["properties"]["delivery_tag"]
    for _ in range(jobs):
        own = message.replace("0" * 36, str(uuid.uuid4())).replace(tag, str(uuid.uuid4()))
        yield "LPUSH", "embed", own


def fill_results(numbers: int, jobs: int) -> Iterator[tuple[str, ...]]:
    """Commands that store a vector so many times, as a device writes it."""
    vector = np.random.default_rng(0).normal(size=numbers).astype(np.float32)
    for _ in range(jobs):
        name = str(uuid.uuid4())
        meta: dict[str, Any] = {
            "status": "SUCCESS",
            "result": vector,
            "traceback": None,
            "children": [],
        }
        meta |= {"date_done": "2026-01-01T00:00:00.000000+00:00", "task_id": name}
        stored = orjson.dumps(meta, option=orjson.OPT_SERIALIZE_NUMPY).decode()
        yield "SETEX", f"celery-task-meta-{name}", str(EXPIRES_S), stored


def measure(redis: Any, commands: Iterable[tuple[str, ...]], jobs: int) -> float:
    """Bytes for each job, with all that Redis keeps beside it; empties Redis before."""
    redis.flushall()
    before: int = redis.info("memory")["used_memory"]
    write(redis, commands)
    after: int = redis.info("memory")["used_memory"]
    return round((after - before) / jobs)


def main() -> None:
    """Prints the bytes of each kind of job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = {}
    with EmbeddedRedis() as server, Redis.from_url(server.url, decode_responses=True) as redis:
        version = redis.info("server")["redis_version"]
        for name, characters in ITEMS.items():
            message = read_message(server, redis, "x" * characters)
            size = measure(redis, fill_queue(message, options.jobs), options.jobs)
            rows[f"waits: {name}"] = {"message_bytes": len(message), "redis_bytes": size}
        for numbers in VECTORS:
            # A result is larger than a message, so fewer are enough.
            jobs = options.jobs // 10
            size = measure(redis, fill_results(numbers, jobs), jobs)
            rows[f"a result of {numbers:,} numbers"] = {"redis_bytes": size}
    report = {"hardware": hardware(), "redis": version, "jobs": options.jobs, "rows": rows}
    Console(highlight=False).print(report)
    write_report(options.json, report)


if __name__ == "__main__":
    main()

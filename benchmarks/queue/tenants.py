"""What Redis spends on a job that waits among 100,000 others, by how many tenants there are.

python -m benchmarks.queue.tenants
"""

import argparse
import json
import statistics
import time
from typing import Any

import redis

from batchery.transport.redis_schema import SCHEMA, Keys, transport_scripts
from batchery_worker.devstack.redis_server import EmbeddedRedis

KEYS = Keys()

#: How many jobs a worker takes at once.
BATCH = 64

#: Bytes of the body of a message.
BODY_BYTES = 600

#: Name of each case -> the tenants whose jobs came, in blocks or in turn.
CASES = {
    "no tenants": ("", 1),
    "one": ("acme", 1),
    "two, one after the other": ("blocks", 2),
    "two, mixed": ("mixed", 2),
    "1,000": ("mixed", 1000),
}


def tenant_at(case: str, number: int, jobs: int) -> str:
    """The tenant of a job by its number."""
    kind, tenants = CASES[case]
    if tenants == 1:
        return kind
    return f"t{min(number * tenants // jobs, 1) if kind == 'blocks' else number % tenants}"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print(f"{'tenants':26}{'sort all, ms':>14}{'longest, ms':>13}{'a job, us':>11}{'length':>9}")
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        for name in CASES:
            steps, job_us, length = measure(client, name, options.jobs, options.rounds)
            longest = max(steps, default=0.0)
            print(f"{name:26}{sum(steps):14.0f}{longest:13.1f}{job_us:11.2f}{length:9}")


def measure(client: Any, case: str, jobs: int, rounds: int) -> tuple[list[float], float, int]:
    """The time of each step of sorting, that of a job taken while others come, and what waits."""
    client.flushall()
    scripts = transport_scripts(client)
    keys = [KEYS.workers, KEYS.worker_info, KEYS.token, KEYS.schema]
    scripts.run("register", keys, "me", "{}", 0, SCHEMA)
    for start in range(0, jobs, 1000):
        client.lpush(
            "q", *(message(tenant_at(case, at, jobs), at) for at in range(start, start + 1000))
        )
    fetch(client, scripts)
    steps = []
    sorts = hasattr(KEYS, "tenants") and client.hexists(KEYS.tenants, "q")
    while sorts:
        started_s = time.perf_counter()
        sorts = scripts.run("sort_tenants", [KEYS.tenants, "q"])
        steps.append((time.perf_counter() - started_s) * 1e3)
    times_us = []
    for turn in range(rounds):
        first = jobs + turn * BATCH
        client.lpush(
            "q", *(message(tenant_at(case, at, jobs), at) for at in range(first, first + BATCH))
        )
        client.config_resetstat()
        fetch(client, scripts)
        times_us.append(client.info("commandstats")["cmdstat_evalsha"]["usec"] / BATCH)
    return steps, statistics.median(times_us), client.llen("q")


def message(tenant: str, number: int) -> str:
    """A message as Celery sends it."""
    headers = {"id": f"{number:032d}", "task": "tasks.shout"}
    if tenant:
        headers["batchery_tenant"] = tenant
    content = {"body": "x" * BODY_BYTES, "headers": headers, "properties": {"delivery_tag": number}}
    return json.dumps(content)


def fetch(client: Any, scripts: Any) -> None:
    """Takes a batch, and ends its leases."""
    names = ("workers", "token", "suspects", "waiting")
    workers, token, suspects, waiting = (getattr(KEYS, name) for name in names)
    keys = [workers, KEYS.lease("me"), token, suspects, waiting, KEYS.running("me")]
    # What has no tenants can be compared with: the same benchmark runs there.
    keys += [KEYS.tenants] if hasattr(KEYS, "tenants") else []
    scripts.run("fetch", [*keys, "q"], "me", BATCH, 2**24, "", 1, BATCH, 1)
    client.delete(KEYS.lease("me"))


if __name__ == "__main__":
    main()

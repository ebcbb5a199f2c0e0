"""Which queues the jobs come from that wait in a worker, and for how long."""

import time
from collections.abc import Iterable
from typing import Any

from batchery.protocol.headers import read_sent_at
from batchery.transport.dead_letters import find_queue
from batchery_worker.job import Job
from batchery_worker.task_call import TaskCall


def waiting_by_queue(jobs: Iterable[Job[TaskCall]], now_s: float) -> dict[str, dict[str, Any]]:
    """Counts the jobs of each queue, and says how old the oldest is.

    Args:
        jobs: Those that wait for a device.
        now_s: The time, on the clock of their arrival.

    Returns:
        `jobs` and `oldest_s` by queue. An age counts from when the job was sent, where its message
        says so; else from its arrival in this worker.
    """
    found: dict[str, dict[str, Any]] = {}
    unix_s = time.time()
    for job in jobs:
        age_s = max(now_s - job.arrived_s, unix_s - read_sent_at(job.payload.message, unix_s))
        queue = found.setdefault(_find_queue(job.payload), {"jobs": 0, "oldest_s": 0.0})
        queue["jobs"] += 1
        queue["oldest_s"] = max(queue["oldest_s"], round(age_s, 3))
    return found


def _find_queue(call: TaskCall) -> str:
    lease = call.lease
    key = lease.store.get_key(lease.token) if lease is not None else None
    if lease is not None and key is not None:
        return find_queue(key, lease.store.keys.prefix)
    # Another transport: the name of the queue, if nobody has given it another key.
    return str((call.message.get("delivery_info") or {}).get("routing_key") or "")

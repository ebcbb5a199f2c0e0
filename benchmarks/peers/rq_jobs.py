"""RQ."""

from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job

from benchmarks.peers.peer import URL, main

#: Jobs per pipeline while the queue is filled.
CHUNK = 200


def noop(item: Any) -> Any:
    """Does nothing."""
    return item


def send(count: int) -> list[Job]:
    """Puts jobs into the queue."""
    queue = Queue(connection=Redis.from_url(URL))
    jobs: list[Job] = []
    for start in range(0, count, CHUNK):
        some = range(start, min(start + CHUNK, count))
        job = Queue.prepare_data("benchmarks.peers.rq_jobs.noop", (0,), result_ttl=3600)
        jobs += queue.enqueue_many([job for _ in some])
    return jobs


def collect(jobs: list[Job]) -> None:
    """Waits for all results: RQ has no call for many."""
    for job in jobs:
        job.latest_result(timeout=600)


def call() -> None:
    """One job and its result."""
    queue = Queue(connection=Redis.from_url(URL))
    queue.enqueue("benchmarks.peers.rq_jobs.noop", 0, result_ttl=3600).latest_result(timeout=60)


if __name__ == "__main__":
    main(send, call, collect)

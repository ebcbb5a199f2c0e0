"""RQ."""

from typing import Any

from redis import Redis
from rq import Queue

from peers.peer import URL, main

#: Jobs per pipeline while the queue is filled.
CHUNK = 200


def noop(item: Any) -> Any:
    """Does nothing."""
    return item


def fill(count: int) -> None:
    """Puts jobs into the queue."""
    queue = Queue(connection=Redis.from_url(URL))
    for start in range(0, count, CHUNK):
        some = range(start, min(start + CHUNK, count))
        job = Queue.prepare_data("peers.rq_jobs.noop", (0,), result_ttl=3600)
        queue.enqueue_many([job for _ in some])


def call() -> None:
    """One job and its result."""
    queue = Queue(connection=Redis.from_url(URL))
    queue.enqueue("peers.rq_jobs.noop", 0, result_ttl=3600).latest_result(timeout=60)


if __name__ == "__main__":
    main(fill, call)

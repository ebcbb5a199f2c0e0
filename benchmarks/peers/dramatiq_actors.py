"""Dramatiq with its Redis broker and Redis results."""

from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends.redis import RedisBackend

from benchmarks.peers.peer import URL, main

broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL), store_results=True))
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(item: Any) -> Any:
    """Does nothing."""
    return item


def send(count: int) -> dramatiq.group:
    """Puts jobs into the queue."""
    return dramatiq.group(noop.message(0) for _ in range(count)).run()


def collect(jobs: dramatiq.group) -> None:
    """Waits for all results."""
    for _ in jobs.get_results(block=True, timeout=600_000):
        pass


if __name__ == "__main__":
    main(send, lambda: noop.send(0).get_result(block=True, timeout=60_000), collect)

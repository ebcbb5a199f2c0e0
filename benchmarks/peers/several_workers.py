"""Several Celery workers that begin at the same moment: `COUNT APP OPTIONS...`.

The queue is put aside until every worker is ready. Otherwise the first one would be measured while
the last one still starts.
"""

import signal
import subprocess
import sys
from typing import Any

from redis import Redis

from benchmarks.peers.celery_client import QUEUE
from benchmarks.peers.celery_stock import app as client
from benchmarks.peers.peer import URL

ASIDE = "aside"


def main() -> None:
    """Starts the workers, waits until they are ready, and gives them the queue."""
    count, app, *options = sys.argv[1:]
    redis: Any = Redis.from_url(URL)
    redis.rename(QUEUE, ASIDE)
    celery = [sys.executable, "-W", "ignore", "-m", "celery", "-A", app, "worker", *options]
    workers = [
        subprocess.Popen([*celery, "-n", f"worker{number}@%h"]) for number in range(int(count))
    ]

    def terminate(*_: Any) -> None:
        for worker in workers:
            worker.terminate()

    signal.signal(signal.SIGTERM, terminate)
    while len(client.control.ping(timeout=1.0) or ()) < len(workers):
        if any(worker.poll() is not None for worker in workers):
            raise SystemExit("a worker ended before it was ready")
    redis.rename(ASIDE, QUEUE)
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    main()

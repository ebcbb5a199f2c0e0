"""The command line that all peers share; nothing but the standard library."""

import argparse
import json
import os
import time
from collections.abc import Callable

URL = os.environ.get("PEER_URL", "redis://127.0.0.1:1/0")


def main(fill: Callable[[int], None], call: Callable[[], object] | None = None) -> None:
    """Runs one of the two things that a client does.

    Args:
        fill: Puts so many jobs into the queue.
        call: Sends one job and waits for its result.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["fill", "latency"])
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    if options.action == "fill":
        fill(options.count)
    elif call is not None:
        for _ in range(20):  # Connections, imports, caches.
            call()
        print(json.dumps([timed(call) for _ in range(options.count)]))


def timed(call: Callable[[], object]) -> float:
    """How long a call takes, in seconds."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s

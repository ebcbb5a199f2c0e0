"""The command line that all peers share; nothing but the standard library."""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

URL = os.environ.get("PEER_URL", "redis://127.0.0.1:1/0")

#: Jobs before the clock of a bulk call starts.
WARM = 200


def main(
    send: Callable[[int], Any],
    call: Callable[[], object] | None = None,
    collect: Callable[[Any], object] | None = None,
    whole: Callable[[int], object] | None = None,
) -> None:
    """Runs one of the things that a client does.

    Args:
        send: Puts so many jobs into the queue, by a bulk call if there is one; may return handles.
        call: Sends one job and waits for its result.
        collect: Waits for the jobs that these handles are of, and reads their results.
        whole: Sends so many jobs and reads their results; by default one after the other.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["fill", "latency", "publish", "collect", "whole"])
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    if options.action == "fill":
        send(options.count)
    elif options.action == "publish":
        report(options.count, timed_after(lambda: send(WARM), lambda: send(options.count)))
    elif collect is not None and options.action == "collect":
        handles = send(options.count)
        # The first time, it waits for them.
        again = lambda: collect(handles)  # noqa: E731
        report(options.count, timed_after(again, again))
    elif collect is not None and options.action == "whole":
        run = whole or (lambda count: collect(send(count)))
        report(options.count, timed_after(lambda: run(WARM), lambda: run(options.count)))
    elif call is not None:
        for _ in range(20):  # Connections, imports, caches.
            call()
        print(json.dumps([timed(call) for _ in range(options.count)]))
    else:
        parser.error(f"this peer cannot do {options.action}")


def report(items: int, seconds: float) -> None:
    """Prints what a bulk call took, as one line of JSON."""
    print(json.dumps({"items": items, "seconds": seconds, "peak_mib": round(peak_kib() / 1024)}))


def peak_kib() -> int:
    """The most memory that this process has had."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except OSError:
        # On Linux this would include the process that has started this one.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed_after(before: Callable[[], object], call: Callable[[], object]) -> float:
    """How long a call takes, after another one, in seconds."""
    before()
    return timed(call)


def timed(call: Callable[[], object]) -> float:
    """How long a call takes, in seconds."""
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s

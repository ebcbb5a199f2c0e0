"""A client that makes single calls when it is told to: `python -m peers.lonely_calls MODULE`.

Each line of its input says how many; each line of its output is a list of when they began, were
published and returned, in nanoseconds of the clock that all processes of a machine share.
"""

import importlib
import json
import sys
from time import monotonic_ns
from typing import Any

#: Until connections, imports and caches are there.
WARM = 50


def call(app: Any) -> tuple[int, int, int]:
    """Sends one job, and waits for its result."""
    began_ns = monotonic_ns()
    result = app.send_task("noop", [0])
    published_ns = monotonic_ns()
    result.get(timeout=60)
    return began_ns, published_ns, monotonic_ns()


def main() -> None:
    """Does as it is told until its input ends."""
    app: Any = importlib.import_module(sys.argv[1]).app
    for _ in range(WARM):
        call(app)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps([call(app) for _ in range(int(line))]), flush=True)


if __name__ == "__main__":
    main()

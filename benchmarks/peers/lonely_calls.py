"""A client that makes single calls when it is told to: `python -m peers.lonely_calls MODULE`.

Each line of its input says how many; each line of its output lists how long they took, in ms.
"""

import importlib
import json
import sys
from time import perf_counter
from typing import Any

#: Until connections, imports and caches are there.
WARM = 50


def call(app: Any) -> float:
    """Sends one job, and waits for its result; how long that took, in ms."""
    began_s = perf_counter()
    app.send_task("noop", [0]).get(timeout=60)
    return (perf_counter() - began_s) * 1e3


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

"""Tries every decoder for a long time: `make fuzz`, for half an hour each, in turn.

make fuzz [ARGS="--seconds 60 body message"]
"""

import argparse
import subprocess
import sys
import time

from hypothesis import HealthCheck, given, settings

from fuzz.decoders import DECODERS
from fuzz.trial import try_input, watched_memory
from fuzz.values import inputs

#: Inputs between two looks at the clock.
ROUND = 1000


def main() -> int:
    """Tries the decoders that are named, or all; the exit code is 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="DECODER", choices=[[], *DECODERS])
    parser.add_argument("--seconds", type=int, default=1800, help="for each decoder")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(DECODERS)
    if options.here:
        run(names[0], options.seconds)
        return 0
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        # A decoder that takes its process with it is found, too.
        command = [sys.executable, "-m", "fuzz", name, "--here", f"--seconds={options.seconds}"]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "no decoder has failed")
    return int(bool(failed))


def run(name: str, seconds: int) -> None:
    """Tries one decoder in this process, until it fails or the time is over."""
    decoder, end_s = DECODERS[name], time.monotonic() + seconds

    @settings(
        max_examples=ROUND,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(inputs(decoder.examples))
    def check(data: bytes) -> None:
        try_input(decoder, data)

    with watched_memory(decoder):
        while time.monotonic() < end_s:
            check()


if __name__ == "__main__":
    sys.exit(main())

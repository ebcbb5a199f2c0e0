"""Tries every decoder for a long time: `make fuzz`, for half an hour each, in turn.

    make fuzz [ARGS="--seconds 60 body message"]

Where atheris is installed, inputs are made by it, from what they made the decoder do; what is worth
keeping is kept in `build/fuzz`, and is where the next run begins. Else hypothesis makes them.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

from fuzz.values import inputs

#: Whose branches atheris watches; all others' would take minutes to prepare.
WATCHED = ["batchery", "batchery_producer", "batchery_worker"]

HAS_ATHERIS = importlib.util.find_spec("atheris") is not None
if HAS_ATHERIS:
    import atheris

    watching: Any = atheris.instrument_imports(include=WATCHED)
else:
    watching = nullcontext()
with watching:
    from fuzz.decoders import DECODERS
    from fuzz.trial import try_input, watched_memory

CORPUS = Path("build", "fuzz")

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
    if HAS_ATHERIS:
        run_atheris(name, seconds)
        return
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


def run_atheris(name: str, seconds: int) -> None:
    """The same by atheris, which ends the process."""
    decoder, corpus = DECODERS[name], CORPUS / name.replace(" ", "_")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(decoder.examples):
        (corpus / f"example-{number}").write_bytes(data)
    arguments = [
        f"-artifact_prefix={corpus.parent}/",
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-rss_limit_mb=1024",
        "-timeout=20",
    ]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], lambda data: try_input(decoder, data))
    with watched_memory(decoder):
        atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())

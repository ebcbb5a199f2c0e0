"""Text generation, measured: its speed beside transformers' own, streams, live jobs, and resume.

Four parts, each on its own Redis and worker: `throughput`, `streams`, `live` and `resume`.

    python -m benchmarks.generation --json benchmarks/results/generation.json
    python -m benchmarks.generation --parts throughput --model tiny --texts 64
"""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchery.cli.main import one_line_errors
from benchmarks.engine.gpu import gpu_name
from benchmarks.generation import live, resume, streams, throughput
from benchmarks.generation.models import MODELS, generation_folder
from benchmarks.hardware import command, hardware, without_folder, write_report
from benchmarks.rows import print_verdicts

#: Name of each part, and the module that measures it.
PARTS: Mapping[str, Any] = {
    "throughput": throughput,
    "streams": streams,
    "live": live,
    "resume": resume,
}


def main() -> None:
    """Measures the parts, prints tables and verdicts; writes JSON if asked to."""
    options = parse()
    if options.threads:
        # All processes inherit it.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    report: dict[str, Any] = {
        "hardware": {**hardware(), "gpu": gpu_name(options.device)},
        "command": command("generation"),
        "model": without_folder(options.model),
        "device": options.device,
        "dtype": options.dtype,
        "threads": options.threads,
    }
    print(report["hardware"])
    with one_line_errors(), tempfile.TemporaryDirectory(prefix="batchery-bench-") as temporary:
        folder = generation_folder(options.model, Path(temporary))
        for name in options.parts:
            report[name] = PARTS[name].measure(folder, options)
            PARTS[name].show(report[name])
            print_verdicts(report[name]["verdicts"])
            # After each part, as the next one may take long.
            write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--model", default=MODELS[0], help=f"{', '.join(MODELS)}, or a folder")
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--threads", type=int, help="of torch in every system; its own choice else")
    parser.add_argument("--slots", type=int, default=16, help="texts at once, in all systems")
    parser.add_argument("--longest", type=int, default=512, help="most new tokens of a text")
    parser.add_argument("--max-length", type=int, default=1024, help="with its prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    group = parser.add_argument_group("throughput")
    group.add_argument("--texts", type=int, default=128, help="of a round")
    group.add_argument("--rounds", type=int, default=3)
    group.add_argument("--one-in", type=int, default=4, help="one by one: so few of the texts")
    group.add_argument(
        "--systems", nargs="+", metavar="NAME", help="only rows whose name begins with one of these"
    )
    group.add_argument(
        "--vllm-python", type=Path, help="that has vLLM, as `make vllm` makes one: for its rows"
    )
    group = parser.add_argument_group("streams and live")
    group.add_argument("--seconds", type=float, default=30.0, help="of each rate and stretch")
    group.add_argument("--streams", type=int, default=200, help="at once")
    group.add_argument(
        "--in-slots", type=int, help="so many have a slot at a time; all if not given"
    )
    group.add_argument(
        "--step-ms", type=float, nargs="+", default=[200.0, 50.0, 20.0], help="between two pieces"
    )
    group.add_argument("--live-per-s", type=float, default=0.5, help="live chats per second")
    group.add_argument("--stretches", type=int, default=3, help="of bulk alone and with chats")
    group = parser.add_argument_group("resume")
    group.add_argument("--jobs", type=int, default=200)
    group.add_argument("--kill-rounds", type=int, default=10, help="with two kills each")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Transcription of recordings whose lengths are log-normal: rate and padding, side by side.

One by one and in fixed batches are transformers' own pipeline; slots are the model of a worker, in
this process. All read the same files, cut them into the same windows, and must say the same.

    python -m benchmarks.speech --json benchmarks/results/speech.json
    python -m benchmarks.speech --model FOLDER --recordings 20
"""

import argparse
import io
import statistics
import tempfile
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchery.cli.main import one_line_errors
from benchmarks.engine.gpu import gpu_name
from benchmarks.hardware import command, hardware, without_folder, write_report
from benchmarks.rows import in_turn, print_table, print_verdicts
from benchmarks.speech.models import SMALL, speech_folder
from benchmarks.speech.systems import Systems

RATE = 16_000

#: Lengths of recordings: their median and the deviation of their logarithm, as voice messages and
#: calls have them, and the shortest one, in seconds.
MEDIAN_S, SIGMA, LEAST_S = 12.0, 1.0, 1.0


def main() -> None:
    """Measures the ways in turn, prints a table and verdicts; writes JSON if asked to."""
    options = parse()
    with one_line_errors(), tempfile.TemporaryDirectory(prefix="batchery-bench-") as temporary:
        report = measure(speech_folder(options.model, Path(temporary)), options)
    show(report)
    write_report(options.json, report)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMALL, help=f"{SMALL}, with random weights, or a folder")
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--recordings", type=int, default=200)
    parser.add_argument("--longest", type=float, default=300.0, help="of a recording, in seconds")
    parser.add_argument("--slots", type=int, default=16, help="and windows of a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of each way: the median of its rounds."""
    generator = np.random.default_rng(options.seed)
    drawn = generator.lognormal(np.log(MEDIAN_S), SIGMA, options.recordings)
    seconds = np.clip(drawn, LEAST_S, options.longest)
    recordings = [make_recording(each, generator) for each in seconds]
    systems = Systems(folder, options.device, options.dtype, options.slots)
    # Nobody pays for what the first passes load.
    for way in systems.ways:
        systems.measure(way, recordings[:2], 1.0)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in systems.ways}
    texts: dict[str, Sequence[str]] = {}
    for _, way in in_turn(list(systems.ways), options.rounds):
        row = systems.measure(way, recordings, float(seconds.sum()))
        texts[way] = row.pop("texts")
        found[way].append(row)
    rows = {
        way: {
            **each[0],
            "took_s": statistics.median(row["took_s"] for row in each),
            "sound_per_s": statistics.median(row["sound_per_s"] for row in each),
        }
        for way, each in found.items()
    }
    alone = texts["one by one"]
    same = sum(one == other for one, other in zip(alone, texts["slots"], strict=True))
    return {
        "hardware": {**hardware(), "gpu": gpu_name(options.device)},
        "command": command("speech"),
        "model": without_folder(options.model),
        "device": options.device,
        "dtype": options.dtype,
        "recordings": options.recordings,
        "sound_s": round(float(seconds.sum()), 1),
        "rows": rows,
        "verdicts": [
            {
                "claim": "in slots, recordings have the texts that they have one by one",
                "holds": same == len(alone),
                "found": f"{same} of {len(alone)}",
            }
        ],
    }


def make_recording(seconds: float, generator: np.random.Generator) -> bytes:
    """A melody of random tones and noise, as a file."""
    times = np.arange(int(seconds * RATE)) / RATE
    notes = generator.uniform(100, 2_000, int(seconds * 6) + 1)
    pitch = notes[(times * 6).astype(int)]
    samples = 0.3 * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    samples += 0.05 * generator.standard_normal(len(times))
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes((samples * 20_000).astype("<i2").tobytes())
    return file.getvalue()


def show(report: dict[str, Any]) -> None:
    """Prints the table."""
    print(report["hardware"])
    heads = ["", "seconds of sound/s", "passes", "rows", "silence", "steps of ended rows"]
    rows = [
        [
            way,
            f"{row['sound_per_s']:,.1f}",
            f"{row['passes']:,}",
            f"{row['rows']:,}",
            f"{row['silence']:.0%}",
            f"{row['ended_rows']:.0%}",
        ]
        for way, row in report["rows"].items()
    ]
    print_table(heads, rows, f"{report['recordings']} recordings, {report['sound_s']:,} s of sound")
    print_verdicts(report["verdicts"])


if __name__ == "__main__":
    main()

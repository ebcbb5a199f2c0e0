"""Four stages of a model, each of which computes another pass at the same time, or one pass at all.

Our device process, fed directly. First a BERT of four layers that sleep, one on each part: what a
pipeline itself loses. Then a BERT of twelve layers that compute, three on each part, all of them on
the cores of this machine: there the best is what passes side by side reach.

    python -m benchmarks.engine.pipeline --json pipeline.json
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine.device import DirectDevice
from benchmarks.engine.models import SHAPES, model_folder
from benchmarks.engine.target import resolve_target
from benchmarks.engine.texts import SPECIAL_TOKENS
from benchmarks.hardware import command, hardware

STAGES = 4

#: Tokens of each text, and texts of a batch: it is cut into a pass for each stage.
LENGTH, BATCH = 32, 16

ONE_PART, PARTS = "cpu", "+".join(f"cpu:{part}" for part in range(STAGES))


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run one model.

    Attributes:
        name: For the table.
        model: Layers that sleep, or that compute.
        device: Its parts.
        split: The setting.
        depth: Batches that the device has at a time.
        ideal: Whether its rate is the ideal of the other rows of that model.
    """

    name: str
    model: str
    device: str
    split: str
    depth: int = 2
    ideal: bool = False


ROWS = (
    Row("one pass at a time", "sleeps", PARTS, "layers"),
    Row("pipeline", "sleeps", PARTS, "pipeline"),
    Row("pipeline, a lone batch at a time", "sleeps", PARTS, "pipeline", depth=1),
    Row("one pass at a time", "computes", PARTS, "layers"),
    Row("pipeline", "computes", PARTS, "pipeline"),
    Row("whole, passes side by side", "computes", ONE_PART, "layers", ideal=True),
)


#: What layers do.
WAYS = ("sleeps", "computes")


class SleepingDevice(DirectDevice):
    """The device process with layers that sleep."""

    app = "benchmarks.peers.sleeping_stages:app"


def main() -> None:
    """Measures all rows in turn, several rounds; prints a table, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batches", type=int, default=40, help="of sleeping layers, in a round")
    parser.add_argument("--real-batches", type=int, default=4, help="of layers that compute")
    parser.add_argument("--text-s", type=float, default=0.0125, help="sleep of a layer, for a text")
    parser.add_argument("--shape", choices=SHAPES, default="bert-base", help="what computes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates: dict[Row, list[float]] = {row: [] for row in ROWS if row.model in options.layers}
    with tempfile.TemporaryDirectory(prefix="pipeline-") as made:
        folders = {
            "sleeps": model_folder("tiny-4", Path(made, "sleeps")),
            "computes": model_folder(options.shape, Path(made, "computes")),
        }
        for _ in range(options.rounds):
            for row, found in rates.items():
                found.append(measure(row, folders[row.model], options))
                print(f"{row.model}: {row.name}: {found[-1]:.1f} texts/s", flush=True)
    rows = list(describe(rates, options.text_s))
    print_rows(rows)
    if options.json:
        report = {
            "hardware": hardware(),
            "command": command("engine.pipeline"),
            "stages": STAGES,
            "text_s": options.text_s,
            "shape": options.shape,
            "batches": {"sleeps": options.batches, "computes": options.real_batches},
            "texts_per_batch": BATCH,
            "tokens_per_text": LENGTH,
            "load_average": round(os.getloadavg()[0], 1),
            "rounds": options.rounds,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(row: Row, folder: Path, options: argparse.Namespace) -> float:
    """Texts per second of a fresh device."""
    target = resolve_target(folder, row.device, None, BATCH)
    sleeps = row.model == "sleeps"
    configure(row, folder, options.text_s)
    device = (SleepingDevice if sleeps else DirectDevice)(target)
    device.depth = row.depth
    try:
        device.wait_ready()
        texts = [" ".join(["word"] * (LENGTH - SPECIAL_TOKENS))] * BATCH
        device.run(texts * 2)
        count = options.batches if sleeps else options.real_batches
        seconds: float = device.run(texts * count).seconds
        rate: float = count * BATCH / seconds
        return rate
    finally:
        device.stop()


def configure(row: Row, folder: Path, text_s: float) -> None:
    """Tells the next device process, which inherits the environment, of its model."""
    model = {"kind": "embedding", "model": str(folder), "split": row.split, "forward": "padded"}
    if row.model == "sleeps":
        os.environ["SLEEPING_STAGES"] = json.dumps({**model, "text_s": text_s})
    else:
        os.environ["BATCHERY_MODELS"] = json.dumps({"embed": model})


def describe(rates: Mapping[Row, list[float]], text_s: float) -> Iterator[dict[str, Any]]:
    """A row of the table for each, against the ideal of its round."""
    bounds = {row.model: found for row, found in rates.items() if row.ideal}
    # All layers sleep at the same time.
    bounds["sleeps"] = [1 / text_s] * len(next(iter(rates.values())))
    for row, found in rates.items():
        ideal = bounds[row.model]
        shares = [rate / best for rate, best in zip(found, ideal, strict=True)]
        yield {
            "model": row.model,
            "system": row.name,
            "texts_per_s": round(statistics.median(found), 1),
            "spread": [round(min(found), 1), round(max(found), 1)],
            "of_ideal": round(statistics.median(shares), 3),
        }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Prints the table, ready for a page of docs."""
    table = Table("layers", "", "texts/s", "spread", "of the ideal", box=box.MARKDOWN)
    for row in rows:
        spread = f"{row['spread'][0]} to {row['spread'][1]}"
        share = f"{row['of_ideal']:.2f}"
        table.add_row(row["model"], row["system"], f"{row['texts_per_s']}", spread, share)
    Console(highlight=False, width=110).print(table)


if __name__ == "__main__":
    main()

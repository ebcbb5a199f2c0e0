"""Whether models are packed, and where the time of their passes goes."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.forward import RandomTexts
from batchery_worker.models.tokenizer import Prepared
from benchmarks.engine.models import VOCABULARY
from benchmarks.gpu_check.check import Check

#: Models that must be packed.
PACKED = ("minilm", "bert-base", "bert-large", "roberta-base", "modernbert-base")

#: Numbers and lengths of the texts whose passes are timed.
SHAPES = ((1, 32), (64, 28), (64, 256))
DRY_SHAPES = ((1, 32), (4, 28))

#: Passes of a measurement; the median counts.
TIMED = 20


def packed_or_why(check: Check) -> dict[str, Any]:
    """Loads five models as users do: packed, or the reason."""
    rows = []
    for name in PACKED:
        row: dict[str, Any] = {"model": name}
        started_s = time.perf_counter()
        try:
            model = check.model(name)
            forward: Any = model._pass
            row |= {
                "forward": forward.name,
                "why_padded": model.why_padded,
                "worst_difference": getattr(forward, "worst", None),
            }
        except Exception as error:  # noqa: BLE001 (the next model may load)
            row |= {"forward": "", "error": f"{type(error).__name__}: {error}"[:300]}
        row["load_s"] = round(time.perf_counter() - started_s, 2)
        rows.append(row)
    padded = [row["model"] for row in rows if row["forward"] != "packed"]
    found: dict[str, Any] = {"rows": rows, "note": f"{len(rows) - len(padded)} of 5 packed"}
    if padded:
        found["problem"] = f"not packed: {', '.join(padded)}"
    return found


def host_against_device(check: Check) -> dict[str, Any]:
    """Time to launch a pass against time to compute it, per model and shape."""
    rows = []
    for name in ("minilm", "bert-base", "bert-large"):
        for forward in ("packed", "padded"):
            model = check.model(name, forward=forward)
            for count, length in DRY_SHAPES if check.dry else SHAPES:
                batch = texts(model, count, length)
                row: dict[str, Any] = {"model": name, "forward": forward}
                row["texts"], row["length"] = count, length
                rows.append(row | _times(check, model, batch))
    large = next(row for row in reversed(rows) if row["forward"] == "packed")
    note = (
        f"bert-large, 64 x 256, packed: {large['host_ms']} ms host, {large['device_ms']} ms device"
    )
    return {"rows": rows, "note": note}


def _times(check: Check, model: EmbeddingModel, batch: Sequence[Prepared]) -> dict[str, float]:
    def run() -> Any:
        return model.forward(batch)

    for _ in range(3):
        run().pending.wait()
    host_ms, device_ms, whole_ms = [], [], []
    for _ in range(check.repeats(TIMED)):
        check.wait()
        started_s = time.perf_counter()
        outputs = run()
        host_ms.append((time.perf_counter() - started_s) * 1e3)
        outputs.pending.wait()
        whole_ms.append((time.perf_counter() - started_s) * 1e3)
        check.wait()
        device_ms.append(check.device_ms(run))
    started_s = time.perf_counter()
    model.postprocess(run())
    return {
        "host_ms": round(statistics.median(host_ms), 3),
        "device_ms": round(statistics.median(device_ms), 3),
        "whole_ms": round(statistics.median(whole_ms), 3),
        "with_results_ms": round((time.perf_counter() - started_s) * 1e3, 3),
    }


def texts(model: EmbeddingModel, count: int, length: int) -> list[Prepared]:
    """Random texts of one length, tokenized."""
    make = RandomTexts(len(model._tokenize.names), np.arange(1000, VOCABULARY - 1))
    return make([length] * count)


#: As in `kernels.py`.
STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "packed or why not": packed_or_why,
    "host against device": host_against_device,
}

"""CUDA graphs, and memory after many passes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from batchery_worker.device.start import find_memory
from batchery_worker.models.forward.cuda_graphs import Graphed, Shape
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.passes import texts

#: Passes after which memory must be what it was.
PASSES = 1000

#: By how much the memory of tensors may differ from one time to another, in bytes: a tensor counts
#: with the block that the allocator finds for it, which is up to 1 MiB larger than it must be.
BLOCK_BYTES = 4 << 20

#: Requests of one text that are timed.
TIMED = 50

#: By how much faster graphs must make single requests to be kept.
WORTH = 1.2


def graphs(check: Check) -> dict[str, Any]:
    """How many shapes are captured, why no more, and what a single text gains."""
    rows = []
    for name in ("minilm", "mpnet-base", "bert-base", "bert-large"):
        row: dict[str, Any] = {"model": name}
        try:
            row |= _row(check, name)
        except Exception as error:  # noqa: BLE001 (the next model may work)
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    if not check.dry:
        # An allocator that still believes to capture would raise.
        torch.cuda.empty_cache()
    gains = {row["model"]: row.get("gain") for row in rows}
    found: dict[str, Any] = {"rows": rows, "note": f"gain of a single text: {gains}"}
    slow = [name for name, gain in gains.items() if not (gain or 0) >= WORTH]
    if slow and not check.dry:
        found["problem"] = f"graphs gain less than {WORTH} for {', '.join(slow)}"
    return found


def _row(check: Check, name: str) -> dict[str, Any]:
    usual = check.model(name)
    started_s = time.perf_counter()
    graphed = check.model(name, cuda_graphs="auto")
    row: dict[str, Any] = {"load_s": round(time.perf_counter() - started_s, 2)}
    forward: Any = graphed._pass
    captured: list[Shape] = list(forward._graphs) if isinstance(forward, Graphed) else []
    row["graphs"] = len(captured)
    row["largest_tokens"] = max((each.tokens for each in captured), default=0)
    batch = texts(usual, 1, 30)
    expected, found = (model.forward(batch).pending.wait() for model in (usual, graphed))
    row["difference"] = float((expected - found).norm() / expected.norm())
    times_ms: dict[str, list[float]] = {"usual": [], "graphs": []}
    for _ in range(check.repeats(TIMED)):
        for kind, model in (("usual", usual), ("graphs", graphed)):
            check.wait()
            started_s = time.perf_counter()
            model.forward(batch).pending.wait()
            times_ms[kind].append((time.perf_counter() - started_s) * 1e3)
    medians = {kind: round(statistics.median(each), 3) for kind, each in times_ms.items()}
    gain = round(medians["usual"] / medians["graphs"], 2)
    return row | {f"{kind}_ms": each for kind, each in medians.items()} | {"gain": gain}


def flat_memory(check: Check) -> dict[str, Any]:
    """Memory of tensors after many passes of many shapes, and what the allocator holds."""
    model = check.model("minilm")
    memory = find_memory(check.device)
    batches = [texts(model, 1 + number % 9, 8 + 5 * number) for number in range(20)]

    def run() -> int:
        for batch in batches:
            model.postprocess(model.forward(batch))
        check.wait()
        return memory.allocated_bytes()

    before_bytes = run()
    held = [run() for _ in range(check.repeats(PASSES // len(batches)))]
    memory.release()
    found: dict[str, Any] = {
        "before_bytes": before_bytes,
        "after_bytes": held[-1],
        "figures": memory.figures(),
        "note": f"{(held[-1] - before_bytes) / 2**20:+.1f} MiB after {len(held) * 20} passes",
    }
    if held[-1] > before_bytes + BLOCK_BYTES:
        found["problem"] = "memory grows"
    return found


#: As in `kernels.py`.
STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "graphs": graphs,
    "memory flat": flat_memory,
}

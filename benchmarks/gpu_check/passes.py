"""Whether models are packed, and where the time of their passes goes."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

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

#: Passes that must not wait for the device.
UNWAITED = 20

#: Calls of CUDA that make the host wait, or the device.
WAITING_CALLS = frozenset(
    {
        *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost", "cudaFreeHost"),
        *("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize"),
        *("cudaMemcpy", "cuMemAlloc_v2", "cuMemCreate", "cuCtxSynchronize"),
    }
)

#: Passes of a measurement; the median counts.
TIMED = 20

#: Padded shapes that no pass had before.
FRESH_SHAPES = 20


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


def hidden_waits(check: Check) -> dict[str, Any]:
    """Passes under a mode in which torch raises where the host waits for the device."""
    rows = []
    for name in ("bert-base", "modernbert-base"):
        for forward in ("packed", "padded"):
            model = check.model(name, forward=forward)
            row: dict[str, Any] = {"model": name, "forward": forward}
            batches = [texts(model, count, length) for count, length in ((1, 32), (8, 28))]
            batches.append([*batches[0], *batches[1]])
            for batch in batches * 2:
                model.forward(batch).pending.wait()
            try:
                with check.no_waiting():
                    for number in range(check.repeats(UNWAITED)):
                        model.forward(batches[number % len(batches)])
            except Exception as error:  # noqa: BLE001 (that is what is looked for)
                row["waits"] = f"{type(error).__name__}: {error}"[:300]
            check.wait()
            row["calls"] = _waiting_calls(check, model, batches)
            rows.append(row)
    # With windows, a mask must be made on the device, and transformers looks at it.
    waiting = [
        f"{row['model']} {row['forward']}"
        for row in rows
        if "waits" in row and (row["model"], row["forward"]) != ("modernbert-base", "padded")
    ]
    calling = [f"{row['model']} {row['forward']}: {row['calls']}" for row in rows if row["calls"]]
    note = "; ".join(calling) or ("no pass waits" if not waiting else "")
    found: dict[str, Any] = {"rows": rows, "note": note}
    if waiting:
        found["problem"] = f"the host waits in {', '.join(waiting)}"
    return found


def _waiting_calls(
    check: Check, model: EmbeddingModel, batches: Sequence[Sequence[Prepared]]
) -> dict[str, int]:
    """How often passes call what torch's mode does not see: allocations, waits for events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not check.dry:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for batch in batches:
            model.forward(batch)
        check.wait()
    counts = {each.key: each.count for each in profile.key_averages() if each.key in WAITING_CALLS}
    if not check.dry:
        # The one that ends the measurement.
        counts["cudaDeviceSynchronize"] = counts.get("cudaDeviceSynchronize", 1) - 1
    return {name: count for name, count in counts.items() if count}


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


def cudnn_on_and_off(check: Check) -> dict[str, Any]:
    """Padded passes of fresh shapes, with cuDNN's attention and without."""
    model = check.model("bert-base", forward="padded")
    rows = []
    for allowed in (False, True):
        with _cudnn(allowed):
            times_ms = []
            for number in range(check.repeats(FRESH_SHAPES)):
                # Other lengths than those of the other row, for which plans may be kept.
                length = 41 + 2 * number + allowed
                # All of one length: cuDNN's attention is chosen only where there is no mask.
                batch = texts(model, 8, length)
                check.wait()
                started_s = time.perf_counter()
                model.forward(batch).pending.wait()
                times_ms.append((time.perf_counter() - started_s) * 1e3)
        rows.append(
            {
                "cudnn": allowed,
                "median_ms": round(statistics.median(times_ms), 2),
                "worst_ms": round(max(times_ms), 2),
            }
        )
    off, on = (row["median_ms"] for row in rows)
    return {"rows": rows, "note": f"a fresh shape takes {off} ms without, {on} ms with cuDNN"}


@contextmanager
def _cudnn(allowed: bool) -> Iterator[None]:
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)


def texts(model: EmbeddingModel, count: int, length: int) -> list[Prepared]:
    """Random texts of one length, tokenized."""
    make = RandomTexts(len(model._tokenize.names), np.arange(1000, VOCABULARY - 1))
    return make([length] * count)


#: As in `kernels.py`.
STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "packed or why not": packed_or_why,
    "hidden waits": hidden_waits,
    "host against device": host_against_device,
    "cudnn on and off": cudnn_on_and_off,
}

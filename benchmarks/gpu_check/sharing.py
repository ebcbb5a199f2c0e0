"""Two models on one card: one that is put aside and comes back, and passes on a stream each."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from batchery_worker.device.loading import find_memory
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.tokenizer import Prepared
from benchmarks.gpu_check.check import CUDA, Check
from benchmarks.gpu_check.passes import texts

#: The models that share the card.
MODELS = ("minilm", "bert-base")

#: Numbers and lengths of the texts of a pass: one that leaves most of a GPU idle, and a full one.
SHAPES = ((1, 32), (8, 28), (64, 256))
DRY_SHAPES = ((1, 32),)

#: Passes of each model.
PASSES = 50

#: How much of its weights a model that is put aside must give back.
GIVEN_BACK = 0.9


def put_aside(check: Check) -> dict[str, Any]:
    """The memory that a model leaves, how long its return takes, and what it answers after that."""
    memory = find_memory(check.device)
    before_bytes, started_s = memory.allocated_bytes(), time.perf_counter()
    # Other steps go on with theirs.
    model = EmbeddingModel(check.model("bert-base").settings)
    model.load(check.device)
    check.wait()
    loaded_s = time.perf_counter()
    batch = texts(model, 8, 28)
    expected = _run(model, batch)
    held_bytes = memory.allocated_bytes() - before_bytes
    model.put_aside()
    left_bytes = memory.allocated_bytes() - before_bytes
    aside_s = time.perf_counter()
    model.take_back()
    check.wait()
    returned_s = time.perf_counter()
    found: dict[str, Any] = {
        "held_mib": held_bytes >> 20,
        "left_mib": left_bytes >> 20,
        "load_s": round(loaded_s - started_s, 3),
        "return_s": round(returned_s - aside_s, 3),
    }
    found["note"] = f"{found['return_s']} s to return, {found['load_s']} s to load"
    if not torch.equal(_run(model, batch), expected):
        found["problem"] = "vectors differ after its return"
    elif held_bytes and left_bytes > (1 - GIVEN_BACK) * held_bytes:
        found["problem"] = f"{left_bytes >> 20} of {held_bytes >> 20} MiB are left on the card"
    return found


def two_on_streams(check: Check) -> dict[str, Any]:
    """Passes of two models one after the other, and at the same time on a stream each."""
    rows = []
    models = [check.model(name) for name in MODELS]
    for count, length in DRY_SHAPES if check.dry else SHAPES:
        batches = [texts(model, count, length) for model in models]
        pairs = list(zip(models, batches, strict=True))
        expected = [_run(*pair) for pair in pairs]
        alone_s, _ = _time(check, partial(_one_by_one, check, pairs))
        both_s, made = _time(check, partial(_at_once, check, pairs))
        is_equal = all(map(torch.equal, made, expected))
        row = {"texts": count, "length": length, "gain": round(alone_s / both_s, 2)}
        rows.append({**row, "alone_ms": alone_s * 1e3, "both_ms": both_s * 1e3, "equal": is_equal})
    gains = [row["gain"] for row in rows]
    found: dict[str, Any] = {"rows": rows, "note": f"streams are {gains} times as fast"}
    if not all(row["equal"] for row in rows):
        found["problem"] = "vectors differ on streams of their own"
    return found


def _run(model: EmbeddingModel, batch: Sequence[Prepared]) -> torch.Tensor:
    return torch.as_tensor(model.forward(batch).pending.wait()).clone()


def _repeat(
    check: Check, model: EmbeddingModel, batch: Sequence[Prepared], stream: Any = None
) -> torch.Tensor:
    with nullcontext() if stream is None else CUDA.stream(stream):
        passes = [model.forward(batch) for _ in range(check.repeats(PASSES))]
        return torch.as_tensor([each.pending.wait() for each in passes][-1]).clone()


def _one_by_one(check: Check, pairs: Sequence[Any]) -> list[torch.Tensor]:
    return [_repeat(check, model, batch) for model, batch in pairs]


def _at_once(check: Check, pairs: Sequence[Any]) -> list[torch.Tensor]:
    """The last vectors of each model, whose passes a thread of its own launches."""
    made: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        stream = None if check.dry else CUDA.Stream(check.device)
        model, batch = pairs[number]
        made[number] = _repeat(check, model, batch, stream)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(pairs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [made[number] for number in range(len(pairs))]


def _time(check: Check, run: Callable[[], list[torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    """How long it takes, in seconds, and what it makes; the second time counts."""
    run()
    check.wait()
    started_s = time.perf_counter()
    made = run()
    check.wait()
    return time.perf_counter() - started_s, made


STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "a model put aside": put_aside,
    "two models on streams": two_on_streams,
}

"""Two models on one card: one that is put aside and comes back, and passes on a stream each."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from batchery_worker.device.loading import find_memory
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.tokenizer import Prepared
from benchmarks.gpu_check.check import Check
from benchmarks.gpu_check.passes import texts

#: The models that share the card.
MODELS = ("minilm", "bert-base")

#: Settings of `cuda_stream`: the usual one comes first.
STREAMS = ("shared", "own")

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
    """Passes of two models in turn, on one stream and on a stream each, as a device starts them."""
    rows = []
    shared, own = ([check.model(name, cuda_stream=how) for name in MODELS] for how in STREAMS)
    for count, length in DRY_SHAPES if check.dry else SHAPES:
        batches = [texts(model, count, length) for model in shared]
        expected = [_run(*pair) for pair in zip(shared, batches, strict=True)]
        (shared_s, _), (own_s, made) = (_time(check, each, batches) for each in (shared, own))
        gain, is_equal = round(shared_s / own_s, 2), all(map(torch.equal, made, expected))
        row = {"texts": count, "length": length, "gain": gain, "equal": is_equal}
        rows.append({**row, "shared_ms": shared_s * 1e3, "own_ms": own_s * 1e3})
    gains = [row["gain"] for row in rows]
    found: dict[str, Any] = {"rows": rows, "note": f"streams are {gains} times as fast"}
    if not all(row["equal"] for row in rows):
        found["problem"] = "vectors differ on streams of their own"
    return found


def _run(model: EmbeddingModel, batch: Sequence[Prepared]) -> torch.Tensor:
    return torch.as_tensor(model.forward(batch).pending.wait()).clone()


def _run_in_turn(
    check: Check, models: Sequence[EmbeddingModel], batches: Sequence[Sequence[Prepared]]
) -> list[torch.Tensor]:
    """The last vectors of each model; the next pass is started before a result is awaited."""
    pairs = list(zip(models, batches, strict=True)) * check.repeats(PASSES)
    made: deque[torch.Tensor] = deque(maxlen=len(models))
    started = None
    for model, batch in pairs:
        earlier, started = started, model.forward(batch)
        if earlier is not None:
            made.append(earlier.pending.wait().clone())
    assert started is not None
    made.append(started.pending.wait().clone())
    return list(made)


def _time(check: Check, *run: Any) -> tuple[float, list[torch.Tensor]]:
    """How long it takes, in seconds, and what it makes; the second time counts."""
    _run_in_turn(check, *run)
    check.wait()
    started_s = time.perf_counter()
    made = _run_in_turn(check, *run)
    check.wait()
    return time.perf_counter() - started_s, made


STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "a model put aside": put_aside,
    "two models on streams": two_on_streams,
}

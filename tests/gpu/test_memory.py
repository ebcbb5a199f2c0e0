"""The memory of a CUDA device: counted, run out of, and given back."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from batchery import Model
from batchery_worker.device.start import find_memory
from batchery_worker.memory import Memory
from batchery_worker.models.hardware.devices import CudaMemory
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"

#: What one token takes in `Greedy`.
TOKEN_BYTES = 64 << 20


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = find_memory(DEVICE)
    made.release()
    yield made
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    made.release()


def limited(memory: Memory, tokens: int) -> Memory:
    """The same device, with room for about so many tokens."""
    fraction = tokens * TOKEN_BYTES / memory.figures()["total_bytes"]
    return find_memory(DEVICE, min(0.99, fraction))


class Greedy(Model):
    """Items are their own lengths; takes so much memory per token that it soon runs out."""

    def warm_up(self) -> Sequence[int]:
        return [1, 2, 4]

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        held = torch.zeros(max(batch) * len(batch) * TOKEN_BYTES, dtype=torch.uint8, device=DEVICE)
        return [int(held[0]) + length for length in batch]


def test_memory_of_tensors_is_counted(memory: Memory) -> None:
    assert isinstance(memory, CudaMemory)
    before_bytes = memory.allocated_bytes()
    memory.forget_peak()
    tensor = torch.zeros(1 << 26, dtype=torch.uint8, device=DEVICE)
    assert memory.allocated_bytes() - before_bytes == 1 << 26
    del tensor
    assert memory.allocated_bytes() == before_bytes
    assert memory.peak_bytes() >= before_bytes + (1 << 26)
    figures = memory.figures()
    assert 0 <= figures["allocated_bytes"] <= figures["reserved_bytes"] < figures["total_bytes"]


def test_jobs_that_run_out_of_memory_succeed_and_the_budget_learns(memory: Memory) -> None:
    # However large the device is.
    memory = limited(memory, tokens=32)
    served = LoadedModel("greedy", Greedy(), DEVICE, memory)
    items = [1 + number % 4 for number in range(64)]
    for _ in range(4):
        outcomes, _, _ = served.compute(items, Work(1, "greedy", {}, [], 64, None), nullcontext)
        assert outcomes == items
    figures = served.figures()
    assert figures["chosen_by"] == "memory"
    assert 8 <= figures["max_batch_tokens"] <= 40
    assert figures["peak_bytes"] >= 8 * TOKEN_BYTES

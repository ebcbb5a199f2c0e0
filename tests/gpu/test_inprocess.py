"""`batched` on a CUDA device: batches are copied while it computes, and arrive whole."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from batchery_worker.inprocess.batcher import batched
from batchery_worker.inprocess.options import BatcherOptions
from batchery_worker.inprocess.tensors import Collator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Untyped in part.
CUDA: Any = torch.cuda

#: Clock cycles for which the device is kept busy: some hundred milliseconds.
BUSY_CYCLES = 500_000_000


def stacked(collator: Collator, *lengths: int) -> dict[str, Any]:
    """The batch of items that hold their own length."""
    items = [{"ids": np.full(length, length)} for length in lengths]
    return collator.stack([collator.features(each) for each in items])


def test_arrays_arrive_whole_however_many_are_under_way() -> None:
    collator = Collator(BatcherOptions(pad={"ids": 0}, mask="mask", device="cuda:0"))
    stacked(collator, 1)
    # What was sent is read much later than the next ones are written.
    CUDA._sleep(BUSY_CYCLES)
    sums = []
    for number in range(1, 201):
        batch = stacked(collator, 2000 + number, number)
        sums.append(((batch["ids"] * batch["mask"]).sum(), (2000 + number) ** 2 + number**2))
        del batch
    assert all(int(found) == wanted for found, wanted in sums)


def test_batches_are_copied_while_the_device_computes() -> None:
    collator = Collator(BatcherOptions(pad={"ids": 0}, device="cuda:0"))
    stacked(collator, 1000, 10)
    torch.cuda.synchronize()
    CUDA._sleep(BUSY_CYCLES)
    computed = CUDA.Event()
    computed.record()
    stacked(collator, 1000, 10)
    copied = CUDA.Event()
    assert collator._to_device is not None
    copied.record(collator._to_device._stream)
    copied.synchronize()
    assert not computed.query()
    torch.cuda.synchronize()


def test_results_of_many_threads_are_those_of_single_items() -> None:
    torch.manual_seed(0)
    table = torch.rand(1000, 64, device="cuda:0")
    wrong: list[int] = []

    @batched(pad={"ids": 999}, mask="mask", trim=True, device="cuda:0", max_batch_size=16)
    def embed(batch: dict[str, torch.Tensor]) -> Any:
        return table[batch["ids"]] * batch["mask"][..., None]

    def call(number: int) -> None:
        for length in range(1, 60):
            ids = torch.arange(number, number + length)
            vectors = embed({"ids": ids if number % 2 else ids.numpy()})
            if vectors.device != table.device or not torch.equal(vectors, table[ids.cuda()]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    with embed:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


def test_tensors_that_are_on_the_device_stay_there() -> None:
    collator = Collator(BatcherOptions(pad={"x": 0.0}, mask="mask", device="cuda:0"))
    items = [{"x": torch.ones(length, device="cuda:0")} for length in (3, 1)]
    batch = collator.stack([collator.features(each) for each in items])
    assert {each.device for each in batch.values()} == {torch.device("cuda:0")}
    assert batch["x"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_a_row_is_a_copy_that_frees_its_batch() -> None:
    with batched(lambda _: torch.ones(64, 1_000_000, device="cuda:0")) as function:
        rows = function(list(range(64)))
    kept = rows[0]
    del rows
    assert kept.untyped_storage().nbytes() == kept.nbytes

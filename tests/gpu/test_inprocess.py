"""`batched` with tensors on a CUDA device, which stay there."""

import threading
from typing import Any

import pytest
import torch

from batchery_worker.inprocess.batcher import batched
from batchery_worker.inprocess.options import BatcherOptions
from batchery_worker.inprocess.tensors import Collator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_results_of_many_threads_are_those_of_single_items() -> None:
    torch.manual_seed(0)
    table = torch.rand(1000, 64, device="cuda:0")
    wrong: list[int] = []

    @batched(pad={"ids": 999}, mask="mask", trim=True, max_batch_size=16)
    def embed(batch: dict[str, torch.Tensor]) -> Any:
        return table[batch["ids"]] * batch["mask"][..., None]

    def call(number: int) -> None:
        for length in range(1, 60):
            ids = torch.arange(number, number + length, device="cuda:0")
            vectors = embed({"ids": ids})
            if vectors.device != table.device or not torch.equal(vectors, table[ids]):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    with embed:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not wrong


def test_tensors_that_are_on_the_device_stay_there() -> None:
    collator = Collator(BatcherOptions(pad={"x": 0.0}, mask="mask"))
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

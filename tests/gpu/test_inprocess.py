"""`batched` with tensors on a CUDA device, which stay there."""

import pytest
import torch

from batchery_worker.inprocess.batcher import batched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_row_is_a_copy_that_frees_its_batch() -> None:
    with batched(lambda _: torch.ones(64, 1_000_000, device="cuda:0")) as function:
        rows = function(list(range(64)))
    kept = rows[0]
    del rows
    assert kept.untyped_storage().nbytes() == kept.nbytes

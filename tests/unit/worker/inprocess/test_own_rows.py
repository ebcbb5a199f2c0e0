"""Results that are rows of arrays: whoever keeps one keeps no whole batch."""

from typing import Any

import numpy as np
import pytest
import torch

from batchery_worker.inprocess.batcher import batched


@pytest.mark.parametrize("make", [np.ones, torch.ones])
@pytest.mark.parametrize(
    "answer", [lambda rows: rows, list, lambda rows: [{"row": (row, 1)} for row in rows]]
)
def test_a_row_that_is_kept_does_not_keep_its_batch_alive(make: Any, answer: Any) -> None:
    # The array is a view itself: what counts is the memory behind it.
    def compute(_: list[Any]) -> Any:
        return answer(make((3, 4, 9))[:, :, 0])

    with batched(compute) as function:
        kept, *_ = function([1] * 3)
    if isinstance(kept, dict):
        assert kept["row"][1] == 1
        kept = kept["row"][0]
    assert kept.tolist() == [1.0] * 4
    behind = kept.base if make is np.ones else kept.untyped_storage()
    assert behind is None or behind.nbytes == kept.nbytes or behind.nbytes() == kept.nbytes


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_a_row_of_half_of_its_batch_is_no_copy(make: Any) -> None:
    whole = make((2, 4))
    with batched(lambda _: whole) as function:
        results = function(["a", "b"])
    whole[:] = 7
    assert [row.tolist() for row in results] == [[7.0] * 4] * 2

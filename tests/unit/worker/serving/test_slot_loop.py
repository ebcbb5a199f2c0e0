"""What a device with slots says of its texts, whatever a model of the user's own returns."""

import json
from typing import Any

import numpy as np
import pytest

from batchery_worker.serving.slot_loop import _time_texts


class Odd:
    """Its own code raises what nobody expects."""

    def __getitem__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [int, np.int64, np.float64])
def test_numbers_of_any_kind_are_numbers_that_json_can_write(kind: Any) -> None:
    timings = {"first_token_ms": kind(250), "total_ms": kind(1000)}
    text = {"timings": timings, "tokens_in": kind(3), "tokens_out": kind(4)}
    (times,) = _time_texts([text], 1.5)
    assert json.loads(json.dumps(times)) == [0.75, 0.25, 3, 4]


@pytest.mark.parametrize(
    "outcome",
    [
        None,
        "text",
        [1],
        Odd(),
        {"timings": {"first_token_ms": "1", "total_ms": 2}, "tokens_in": 1, "tokens_out": 2},
        {"timings": {"first_token_ms": 1, "total_ms": 2}, "tokens_in": 1, "tokens_out": [2]},
        {"timings": {"first_token_ms": 1, "total_ms": 2}, "tokens_in": 1, "tokens_out": 1e999},
    ],
)
def test_what_is_no_text_has_no_times(outcome: Any) -> None:
    assert list(_time_texts([outcome], 1.5)) == []

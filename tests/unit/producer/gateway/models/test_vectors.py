"""Vectors in base64 are cut as the model itself would cut them."""

import base64

import numpy as np
import pytest

from batchery_producer.gateway.models.vectors import numbers, shorten


def spelled(*values: float) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode("ascii")


def test_the_leading_dimensions_are_kept() -> None:
    assert numbers(shorten(spelled(3, 4, 12), 2, scale=False)).tolist() == [3, 4]


def test_what_is_kept_gets_length_1() -> None:
    assert numbers(shorten(spelled(3, 4, 12), 2, scale=True)) == pytest.approx([0.6, 0.8])


def test_a_vector_of_zeros_stays_one() -> None:
    assert numbers(shorten(spelled(0, 0, 1), 2, scale=True)).tolist() == [0, 0]


def test_a_vector_with_fewer_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="dimensions = 4: the model's vectors have 3"):
        shorten(spelled(1, 2, 3), 4, scale=True)

"""What the gateway reads of vectors."""

import base64

import numpy as np
import pytest

from batchery_producer.gateway.models import (
    numbers,
    shorten,
)


def spelled(*values: float) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode("ascii")


@pytest.mark.parametrize(
    ("vector", "scale", "kept"),
    [((3, 4, 12), False, [3, 4]), ((3, 4, 12), True, [0.6, 0.8]), ((0, 0, 1), True, [0, 0])],
)
def test_the_leading_dimensions_are_kept(
    vector: tuple[float, ...], kept: list[float], *, scale: bool
) -> None:
    assert numbers(shorten(spelled(*vector), 2, scale=scale)) == pytest.approx(kept)


def test_a_vector_with_fewer_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="dimensions = 4"):
        shorten(spelled(1, 2, 3), 4, scale=True)

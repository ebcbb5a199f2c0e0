"""Nine digits of a float32 are all of it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from batchery_worker.models.embedding import DIGITS, shortened


@given(values=arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32)))
def test_every_float32_comes_back_to_the_last_bit(values: Any) -> None:
    short = shortened(values)
    finite = np.isfinite(values)
    assert short.dtype == np.float64
    assert short[finite].astype(np.float32).tobytes() == values[finite].tobytes()
    assert not np.isfinite(short[~finite]).any()


@given(value=st.floats(2**-20, 2**20, width=32) | st.floats(-(2**20), -(2**-20), width=32))
def test_no_number_has_more_than_nine_digits(value: float) -> None:
    written = repr(float(shortened(np.array([value], np.float32))[0]))
    digits = written.partition("e")[0].replace("-", "").replace(".", "").strip("0")
    assert len(digits) <= DIGITS


@pytest.mark.parametrize("power", range(-12, 12))
def test_neighbours_of_powers_of_ten_keep_apart(power: int) -> None:
    ten = np.float32(10.0) ** power
    around = np.array([np.nextafter(ten, np.float32(0)), ten, np.nextafter(ten, np.float32(1e30))])
    assert (shortened(around).astype(np.float32) == around).all()

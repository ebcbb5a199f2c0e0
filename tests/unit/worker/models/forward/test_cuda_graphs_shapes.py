"""Shapes that small forward passes are rounded up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.models.forward.cuda_graphs import MAX_TOKENS, Shape, rounded, shapes


@pytest.mark.parametrize("max_length", [None, 8, 80, 128, 512, 8192])
def test_shapes_are_few_and_within_the_limits(max_length: int | None) -> None:
    found = shapes(max_length)
    assert len(found) == len(set(found)) <= 42
    assert [shape.tokens for shape in found] == sorted(shape.tokens for shape in found)
    assert all(shape.tokens <= MAX_TOKENS for shape in found)
    longest = max(shape.length for shape in found)
    assert longest == min(max_length or 512, 512)


@given(st.integers(1, 80), st.integers(1, 600))
def test_a_pass_gets_the_smallest_shape_that_has_room(texts: int, length: int) -> None:
    there = shapes(None)
    shape = rounded(texts, length, there)
    roomy = [each for each in there if each.texts >= texts and each.length >= length]
    if shape is None:
        assert not roomy
    else:
        assert shape in roomy
        assert shape.tokens == min(each.tokens for each in roomy)
        assert shape.tokens <= 4 * texts * max(length, 16)


def test_without_shapes_nothing_is_rounded() -> None:
    assert rounded(1, 1, []) is None
    assert rounded(3, 9, [Shape(2, 16), Shape(4, 8)]) is None

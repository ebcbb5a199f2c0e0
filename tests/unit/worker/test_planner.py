"""The planner, for arbitrary lengths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.planner import plan

Lengths = st.lists(st.integers(1, 3_000), max_size=200)


def padded(lengths: list[int], micro_batches: list[list[int]]) -> int:
    return sum(max(lengths[index] for index in part) * len(part) for part in micro_batches)


@given(lengths=Lengths, max_batch_tokens=st.integers(1, 5_000), max_batch_size=st.integers(1, 64))
def test_a_plan_keeps_every_promise(
    lengths: list[int], max_batch_tokens: int, max_batch_size: int
) -> None:
    micro_batches = plan(lengths, max_batch_tokens, max_batch_size)
    flat = [index for part in micro_batches for index in part]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths, reverse=True)
    for part in micro_batches:
        assert 1 <= len(part) <= max_batch_size
        assert len(part) == 1 or lengths[part[0]] * len(part) <= max_batch_tokens
    assert plan(lengths, max_batch_tokens, max_batch_size) == micro_batches


@given(lengths=Lengths, max_batch_size=st.integers(1, 64))
def test_sorting_never_pads_full_micro_batches_more_than_arrival_order(
    lengths: list[int], max_batch_size: int
) -> None:
    unlimited = 10**9
    # A last one that is not full may pad more: [1, 1, 2] in pairs is better left as it is.
    lengths = lengths[: len(lengths) // max_batch_size * max_batch_size]
    places = list(range(len(lengths)))
    chunks = [places[at : at + max_batch_size] for at in range(0, len(places), max_batch_size)]
    micro_batches = plan(lengths, unlimited, max_batch_size)
    assert [len(part) for part in micro_batches] == [len(chunk) for chunk in chunks]
    assert padded(lengths, micro_batches) <= padded(lengths, chunks)


@given(lengths=Lengths, max_batch_tokens=st.integers(1, 5_000), max_batch_size=st.integers(1, 64))
def test_a_micro_batch_ends_only_where_a_limit_says_so(
    lengths: list[int], max_batch_tokens: int, max_batch_size: int
) -> None:
    for part in plan(lengths, max_batch_tokens, max_batch_size)[:-1]:
        too_many = len(part) == max_batch_size
        assert too_many or lengths[part[0]] * (len(part) + 1) > max_batch_tokens


@given(lengths=Lengths, max_batch_tokens=st.integers(1, 5_000), max_batch_size=st.integers(1, 64))
def test_the_order_of_results_can_be_restored(
    lengths: list[int], max_batch_tokens: int, max_batch_size: int
) -> None:
    results: list[int | None] = [None] * len(lengths)
    for part in plan(lengths, max_batch_tokens, max_batch_size):
        for index in part:
            results[index] = lengths[index]
    assert results == lengths


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], [[0]]),
        ([1, 1, 1, 1], [[0, 1], [2, 3]]),
        ([3, 50, 4, 1], [[1], [2, 0], [3]]),
        ([0, 0], [[0, 1]]),
    ],
)
def test_small_windows(lengths: list[int], expected: list[list[int]]) -> None:
    assert plan(lengths, max_batch_tokens=10, max_batch_size=2) == expected

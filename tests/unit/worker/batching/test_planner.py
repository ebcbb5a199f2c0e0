"""The planner, for arbitrary lengths."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.planner import plan

Lengths = st.lists(st.integers(1, 3_000), max_size=200)
Tokens = st.integers(1, 5_000)
Size = st.integers(1, 64)
Pass = st.integers(0, 2_000)


def padded(lengths: list[int], part: list[int]) -> int:
    return max(lengths[index] for index in part) * len(part)


def packed(lengths: list[int], part: list[int]) -> int:
    return sum(lengths[index] for index in part)


def cost(lengths: list[int], parts: list[list[int]], pass_tokens: int, *, pads: bool) -> int:
    tokens = padded if pads else packed
    return sum(tokens(lengths, part) + pass_tokens for part in parts)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put items into micro-batches, in whatever order."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def fits(lengths: list[int], part: list[int], tokens: int, size: int, *, pads: bool) -> bool:
    count = padded if pads else packed
    return len(part) == 1 or (len(part) <= size and count(lengths, part) <= tokens)


@given(
    lengths=Lengths,
    tokens=Tokens,
    size=Size,
    pads=st.booleans(),
    pass_tokens=Pass,
    streams=st.just(1) | st.integers(2, 16),
)
def test_plan_has_each_item_once_in_order_and_within_limits(
    lengths: list[int], tokens: int, size: int, pads: bool, pass_tokens: int, streams: int
) -> None:
    parts = plan(lengths, tokens, size, pads=pads, pass_tokens=pass_tokens, streams=streams)
    flat = [index for part in parts for index in part]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths, reverse=True)
    assert all(part and fits(lengths, part, tokens, size, pads=pads) for part in parts)
    assert plan(lengths, tokens, size, pads=pads, pass_tokens=pass_tokens, streams=streams) == parts


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    tokens=st.integers(1, 90),
    size=st.integers(1, 7),
    pass_tokens=st.integers(0, 40),
)
def test_no_padded_plan_costs_less(
    lengths: list[int], tokens: int, size: int, pass_tokens: int
) -> None:
    best = min(
        cost(lengths, parts, pass_tokens, pads=True)
        for parts in partitions(list(range(len(lengths))))
        if all(fits(lengths, part, tokens, size, pads=True) for part in parts)
    )
    parts = plan(lengths, tokens, size, pass_tokens=pass_tokens)
    assert cost(lengths, parts, pass_tokens, pads=True) == best


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    tokens=st.integers(1, 90),
    size=st.integers(1, 7),
)
def test_no_packed_plan_that_keeps_the_order_has_fewer_passes(
    lengths: list[int], tokens: int, size: int
) -> None:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    in_order = [
        parts for parts in partitions(order) if [each for part in parts for each in part] == order
    ]
    best = min(
        len(parts)
        for parts in in_order
        if all(fits(lengths, part, tokens, size, pads=False) for part in parts)
    )
    assert len(plan(lengths, tokens, size, pads=False)) == best


@given(
    lengths=st.lists(st.integers(1, 900), min_size=1, max_size=9),
    tokens=st.integers(1, 2_000),
    size=st.integers(1, 9),
    streams=st.integers(2, 4),
)
def test_cut_for_streams_minimizes_the_largest_micro_batch(
    lengths: list[int], tokens: int, size: int, streams: int
) -> None:
    parts = plan(lengths, tokens, size, pads=False, streams=streams)
    order = sorted(lengths, reverse=True)
    largest = min(
        max(sum(order[start:end]) for start, end in pairwise(cuts))
        for count in range(1, len(parts) + 1)
        for inner in combinations(range(1, len(order)), count - 1)
        for cuts in [[0, *inner, len(order)]]
        if all(
            end - start == 1 or (end - start <= size and sum(order[start:end]) <= tokens)
            for start, end in pairwise(cuts)
        )
    )
    assert max(packed(lengths, part) for part in parts) == largest


@pytest.mark.parametrize(
    ("lengths", "streams", "sizes"),
    [
        # Two passes would do, and two streams are busy.
        ([100] * 20, 2, [1000, 1000]),
        # One would do, but then the other stream would be idle.
        ([100] * 10, 2, [500, 500]),
        # Three would do: four keep both streams busy to the end.
        ([100] * 24, 2, [600, 600, 600, 600]),
        # So small that a second pass costs more than it wins.
        ([100] * 2, 2, [200]),
        # As many streams as there is work for.
        ([100] * 10, 16, [200, 200, 200, 200, 200]),
        # A text longer than the limit has a pass of its own.
        ([2000, 100, 100], 2, [2000, 200]),
    ],
)
def test_packed_batch_is_cut_so_that_every_stream_is_busy(
    lengths: list[int], streams: int, sizes: list[int]
) -> None:
    parts = plan(lengths, 1024, 64, pads=False, streams=streams)
    assert [packed(lengths, part) for part in parts] == sizes


def test_padded_batch_is_cut_for_all_streams() -> None:
    assert [len(part) for part in plan([100] * 10, 1024, 64, streams=2)] == [5, 5]


def test_items_without_tokens_share_a_pass() -> None:
    assert plan([0, 0], max_batch_tokens=10, max_batch_size=2) == [[0, 1]]
    assert plan([0, 0], max_batch_tokens=10, max_batch_size=2, pads=False) == [[0, 1]]

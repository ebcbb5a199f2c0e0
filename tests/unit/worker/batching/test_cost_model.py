"""What a forward pass costs, from a few that were measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.cost_model import MIN_TOKENS, Calibration, Point, calibrate

SHAPES = [(1, 8), (1, 32), (1, 128), (4, 8), (4, 32), (4, 128), (16, 32), (16, 128)]


def points(token_ms: float, item_ms: float, pass_ms: float, token_bytes: int = 0) -> list[Point]:
    return [
        Point(
            tokens=count * length,
            items=count,
            ms=token_ms * count * length + item_ms * count + pass_ms,
            peak_bytes=token_bytes * count * length,
        )
        for count, length in SHAPES
    ]


@given(token_ms=st.floats(1e-4, 10), item_ms=st.floats(0, 10), pass_ms=st.floats(0, 100))
def test_the_costs_are_found(token_ms: float, item_ms: float, pass_ms: float) -> None:
    measured = points(token_ms, item_ms, pass_ms)
    found = calibrate(measured)
    # Where something else costs ten thousand times as much, tokens need not be seen at all.
    if found is None:
        assert token_ms < 1e-3 * (item_ms + pass_ms)
        return
    for point in measured:
        ms = found.token_ms * point.tokens + found.item_ms * point.items + found.pass_ms
        assert ms == pytest.approx(point.ms, rel=1e-3)


@given(
    noise=st.lists(st.floats(0.8, 1.25), min_size=len(SHAPES), max_size=len(SHAPES)),
)
def test_no_cost_is_negative_however_noisy_it_was(noise: list[float]) -> None:
    measured = [
        Point(point.tokens, point.items, point.ms * factor)
        for point, factor in zip(points(0.1, 0.0, 2.0), noise, strict=True)
    ]
    found = calibrate(measured)
    assert found is None or min(found.token_ms, found.item_ms, found.pass_ms) >= 0


def test_nothing_follows_from_too_little_or_from_chaos() -> None:
    assert calibrate([]) is None
    assert calibrate(points(1, 1, 1)[:3]) is None
    assert calibrate([Point(100, 1, 5.0)] * 8) is not None
    chaos = [
        Point(point.tokens, point.items, 5.0 + 95.0 * (at % 2))
        for at, point in enumerate(points(1, 1, 1))
    ]
    assert calibrate(chaos) is None


def test_a_pass_has_nineteen_times_the_tokens_that_it_costs_by_itself() -> None:
    found = Calibration(0.1, 0.0, 10.0, 0.0, measured_tokens=100_000)
    assert found.pass_tokens == pytest.approx(100)
    assert found.max_batch_tokens(None) == pytest.approx(1900, abs=1)


def test_no_budget_is_beyond_what_was_measured_or_below_one_text() -> None:
    assert Calibration(0.1, 0.0, 10.0, 0.0, 1000).max_batch_tokens(None) == 1000
    assert Calibration(0.1, 0.0, 0.0, 0.0, 100_000).max_batch_tokens(None) == MIN_TOKENS


def test_no_budget_is_beyond_the_free_memory() -> None:
    found = Calibration(0.1, 0.0, 100.0, token_bytes=1000.0, measured_tokens=100_000)
    assert found.max_batch_tokens(None) == pytest.approx(19_000, abs=1)
    assert found.max_batch_tokens(1_000_000) == 800
    assert found.max_batch_tokens(10) == 1

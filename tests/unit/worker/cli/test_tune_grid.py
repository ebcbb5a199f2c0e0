"""The grid of limits, measured on a clock of our own."""

from collections.abc import Sequence
from typing import Any

import pytest

from batchery import Model
from batchery_worker.cli.tune import MEMORY_SHARE, ROUNDS, Case, Grid, recommend
from batchery_worker.memory import Memory


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Priced(Model):
    """Items are their own lengths; a pass takes 10 us per token, padding counted, and 1 ms."""

    pass_streams = 1

    def __init__(self, clock: Clock, fits: int = 10**9) -> None:
        self.clock = clock
        self.fits = fits
        #: As long as the machine is busy with something else.
        self.slowness = 1

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        tokens = max(batch) * len(batch)
        if tokens > self.fits:
            raise MemoryError
        self.clock.now_s += self.slowness * (1e-5 * tokens + 1e-3)
        return list(batch)


ITEMS = [10 + (number * 37) % 90 for number in range(512)]
SIZES = (1, 16, 64)
TOKENS = (256, 512, 1024, 2048, 4096, 8192)


def grid(fits: int = 10**9, items: Sequence[int] = ITEMS) -> Grid:
    clock = Clock()
    return Grid(Priced(clock, fits), items, "cpu", Memory(), clock)


def test_each_case_is_measured_three_times_if_there_is_time() -> None:
    trials = grid()
    seen: list[Case] = []
    cases = trials.run(SIZES, TOKENS, 60, seen.append)
    assert {case.max_batch_size for case in cases} == set(SIZES)
    assert {len(case.rates) for case in cases} == {ROUNDS}
    assert len(seen) == sum(len(case.rates) for case in cases)
    assert trials.left_out == 0


@pytest.mark.parametrize("slowness", [1, 100, 10_000])
def test_slow_machine_ends_in_time_and_measures_each_size(slowness: int) -> None:
    clock = Clock()
    model = Priced(clock)
    trials = Grid(model, ITEMS, "cpu", Memory(), clock)
    model.slowness = slowness
    cases = trials.run(SIZES, TOKENS, limit_s=30)
    assert {case.max_batch_size for case in cases} == set(SIZES)
    # One batch of each size is the least, and the last one may have just begun.
    batch_s = slowness * (1e-5 * sum(ITEMS[:64]) * 2 + 1e-3 * 64)
    assert clock.now_s <= 30 + len(SIZES) * batch_s
    assert (trials.left_out == 0) if slowness == 1 else (trials.left_out > 0)
    assert recommend(cases).rates


def test_machine_that_becomes_busy_ends_in_time() -> None:
    clock = Clock()
    model = Priced(clock)
    trials = Grid(model, ITEMS, "cpu", Memory(), clock)

    def slow_down(case: Case) -> None:
        model.slowness = 50

    trials.run(SIZES, TOKENS, 30, slow_down)
    assert clock.now_s <= 40


def test_trials_over_different_items_are_compared_by_tokens() -> None:
    clock = Clock()
    items = [10] * 256 + [90] * 256
    trials = Grid(Priced(clock), items, "cpu", Memory(), clock)
    (case,) = trials.run((1,), TOKENS, limit_s=0.3)
    for rate in case.rates:
        assert rate == pytest.approx(1 / (1e-3 + 1e-5 * 50), rel=0.25)


def test_rates_follow_the_clock_and_batches_beat_single_items() -> None:
    cases = grid().run(SIZES, TOKENS, limit_s=30)
    single = cases[0]
    assert (single.max_batch_size, single.max_batch_tokens, single.padding_waste) == (1, 0, 0.0)
    assert single.items_per_s == pytest.approx(1 / (1e-3 + 1e-5 * 54), rel=0.1)
    assert recommend(cases).max_batch_size == 64
    assert recommend(cases).items_per_s > 1.5 * single.items_per_s


def test_batches_are_cut_for_all_streams_as_in_a_worker() -> None:
    clock = Clock()
    model = Priced(clock)
    model.pass_streams = 4
    (case,) = Grid(model, [100] * 64, "cpu", Memory(), clock).run((64,), (8192,), limit_s=1)
    assert case.largest_pass == 1600


def test_budgets_beyond_the_largest_batch_are_left_out() -> None:
    cases = grid().run((4,), TOKENS, limit_s=1)
    # Four items have at most 400 tokens.
    assert [case.max_batch_tokens for case in cases] == [256, 512]


def test_budgets_beyond_memory_are_left_out_and_not_recommended() -> None:
    trials = grid(fits=2000, items=[50] * 512)
    cases = trials.run(SIZES, TOKENS, limit_s=1)
    failed = [case for case in cases if case.out_of_memory]
    assert failed
    assert all(case.items_per_s == 0 and case.row()["spread"] is None for case in failed)
    assert {case.max_batch_tokens for case in failed} == {4096}
    assert max(case.max_batch_tokens for case in cases) == 4096
    assert trials.left_out == 0
    fits = max(case.largest_pass for case in cases if not case.out_of_memory)
    assert fits == 2000
    best = recommend(cases, fits)
    assert not best.out_of_memory
    assert best.max_batch_tokens <= MEMORY_SHARE * fits


def test_where_nothing_fits_the_smallest_limits_are_the_answer() -> None:
    cases = grid(fits=0).run(SIZES, TOKENS, 1)
    assert recommend(cases, 0).max_batch_size == 1


def test_smallest_limits_within_5_percent_of_the_best_are_recommended() -> None:
    cases = [Case(16, 512, [95.1]), Case(64, 512, [100.0]), Case(64, 1024, [99.0])]
    assert recommend(cases) is cases[0]
    cases[0].rates = [94.0]
    assert recommend(cases) is cases[1]
    assert recommend(cases, fits=100) is cases[0]

"""A model is measured before it is served; whatever goes wrong, it is served all the same."""

from collections.abc import Sequence
from typing import Any

import pytest

from batchery import Failed, InvalidItem, Model
from batchery_worker.batching import calibration
from batchery_worker.batching.calibration import MAX_ITEMS, MAX_TOKENS, TRIAL_S, calibrated, shapes
from batchery_worker.memory import Memory


class Clock:
    """Passes only when a model computes."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Steady(Model):
    """Takes 10 us per token, 100 us per item and 2 ms per pass."""

    lengths: tuple[int, ...] = (3, 10, 34, 130)

    def __init__(self, clock: Clock, slowness: float = 1.0) -> None:
        self.clock = clock
        self.slowness = slowness
        self.passes: list[tuple[int, int]] = []

    def warm_up(self) -> Sequence[int]:
        return self.lengths

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        tokens = max(batch) * len(batch)
        self.passes.append((tokens, len(batch)))
        self.clock.now_s += self.slowness * (10e-6 * tokens + 100e-6 * len(batch) + 2e-3)
        return list(batch)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_costs_of_a_model_are_found(clock: Clock) -> None:
    found = calibrated(Steady(clock), Memory(), clock)
    assert found is not None
    assert found.token_ms == pytest.approx(0.01)
    assert found.item_ms == pytest.approx(0.1)
    assert found.pass_ms == pytest.approx(2.0)


def test_a_trial_ends_in_time_however_slow_the_model(clock: Clock) -> None:
    for slowness in (0.01, 1, 10, 100):
        began_s = clock.now_s
        calibrated(Steady(clock, slowness), Memory(), clock)
        # The first pass of all may be slower than anybody could know.
        assert clock.now_s - began_s <= TRIAL_S + 3 * slowness * 2.2e-3


def test_a_model_that_counts_no_tokens_is_not_measured(clock: Clock) -> None:
    class Plain(Steady):
        def tokens(self, prepared: int) -> int:
            return 1

    model = Plain(clock)
    assert calibrated(model, Memory(), clock) is None
    assert not model.passes


def test_a_model_without_warm_up_items_is_not_measured(clock: Clock) -> None:
    class Cold(Steady):
        lengths = ()

    assert calibrated(Cold(clock), Memory(), clock) is None


def test_warm_up_items_that_are_refused_are_left_out(clock: Clock) -> None:
    class Picky(Steady):
        def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Sequence[Any]:
            return [each if each > 3 else Failed(InvalidItem("short")) for each in items]

    model = Picky(clock)
    assert calibrated(model, Memory(), clock) is not None
    assert min(tokens // items for tokens, items in model.passes) == 10


def test_memory_that_runs_out_ends_the_trial_and_is_released(clock: Clock) -> None:
    class Small(Steady):
        def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
            if max(batch) * len(batch) > 1000:
                raise MemoryError
            return super().forward(batch)

    class Counted(Memory):
        releases = 0

        def release(self) -> None:
            self.releases += 1

    model, memory = Small(clock), Counted()
    found = calibrated(model, memory, clock)
    assert found is not None
    assert found.measured_tokens <= 1000
    assert memory.releases == 1


def test_a_model_that_fails_is_reported_and_ends_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Steady):
        def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
            raise ArithmeticError("broken")

    assert calibrated(Broken(clock), Memory(), clock) is None
    assert "Broken cannot be calibrated" in caplog.text


def test_shapes_grow_and_end() -> None:
    lengths = [3, 10, 34, 130]
    tokens = [lengths[place] * count for place, count in shapes(lengths)]
    assert tokens == sorted(tokens)
    assert (tokens[0], max(count for _, count in shapes(lengths))) == (3, MAX_ITEMS)
    assert MAX_TOKENS / 5 < tokens[-1] <= MAX_TOKENS
    assert calibration.shapes([MAX_TOKENS + 1]) == []

"""A model on a device whose memory ends somewhere: its jobs succeed, its budget learns."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from batchery import Failed, Model
from batchery_worker.calibration import Calibration
from batchery_worker.calibration_cache import CalibrationCache
from batchery_worker.memory import Memory, memory_of
from batchery_worker.served import Served
from batchery_worker.wire import Work

#: Tokens of the passes that fit.
FITS = 300


class Counted(Memory):
    """Memory of a device of which a token takes a byte."""

    def __init__(self) -> None:
        self.peak = 0
        self.releases = 0

    def forget_peak(self) -> None:
        self.peak = 0

    def peak_bytes(self) -> int:
        return self.peak

    def release(self) -> None:
        self.releases += 1


class Tight(Model):
    """Items are their own lengths."""

    def __init__(self, memory: Counted) -> None:
        self.memory = memory
        self.passes: list[int] = []

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        padded = max(batch) * len(batch)
        self.passes.append(padded)
        if padded > FITS:
            raise MemoryError("no room")
        self.memory.peak = max(self.memory.peak, padded)
        return list(batch)


@pytest.fixture
def memory() -> Counted:
    return Counted()


@pytest.fixture
def model(memory: Counted) -> Tight:
    return Tight(memory)


@pytest.fixture
def served(model: Tight, memory: Counted) -> Served:
    return Served("tight", model, "cpu", memory, weights_bytes=70)


def work(max_batch_tokens: int | None = None) -> Work:
    return Work(1, "tight", {}, [], 256, max_batch_tokens)


def run(served: Served, items: list[int], max_batch_tokens: int | None = None) -> list[Any]:
    outcomes, _, _ = served.compute(items, work(max_batch_tokens), nullcontext)
    return outcomes


def test_all_jobs_succeed_and_the_budget_is_found_within_a_few_batches(
    served: Served, model: Tight
) -> None:
    items = [10 + number % 7 for number in range(128)]
    for _ in range(6):
        assert run(served, items) == items
    assert sum(padded > FITS for padded in model.passes) <= 3
    model.passes.clear()
    for _ in range(10):
        assert run(served, items) == items
    learned = len(model.passes)
    model.passes.clear()
    for _ in range(10):
        run(served, items, max_batch_tokens=FITS)
    assert learned <= 1.1 * len(model.passes)


def test_what_is_left_of_a_batch_is_cut_anew_when_memory_ran_out(
    served: Served, model: Tight
) -> None:
    items = [10] * 400
    assert run(served, items) == items
    # One pass fails, however many were planned.
    assert sum(padded > FITS for padded in model.passes) == 1


def test_an_item_that_does_not_fit_alone_fails_alone(served: Served) -> None:
    outcomes = run(served, [FITS + 1, 5, 5])
    assert isinstance(outcomes[0], Failed)
    assert outcomes[1:] == [5, 5]


def test_one_line_warns_of_the_new_budget_and_the_cache_is_released(
    served: Served, memory: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "batchery.device"):
        run(served, [8] * 100)
        run(served, [8] * 10)
    (line,) = caplog.messages
    budget = served.figures()["max_batch_tokens"]
    assert line.startswith("tight on cpu: no memory for forward passes of 512 tokens;")
    assert f"at most {budget} from now on" in line
    assert memory.releases == 1


def test_the_figures_say_what_chose_the_budget(served: Served) -> None:
    assert served.figures() == {
        "max_batch_tokens": 512,
        "chosen_by": "default",
        "out_of_memory": 0,
    }
    run(served, [10] * 4, max_batch_tokens=200)
    assert (served.figures()["max_batch_tokens"], served.figures()["chosen_by"]) == (200, "setting")
    run(served, [8] * 100)
    figures = served.figures()
    assert 256 <= figures.pop("max_batch_tokens") <= FITS
    assert 256 <= figures.pop("peak_bytes") <= FITS
    assert figures == {"chosen_by": "memory", "out_of_memory": 1, "weights_bytes": 70}


def test_nobody_counts_the_memory_of_a_cpu() -> None:
    memory = memory_of("cpu")
    memory.forget_peak()
    memory.release()
    memory.wait()
    assert (memory.figures(), memory.free_bytes()) == ({}, None)
    assert memory.allocated_bytes() == memory.peak_bytes() == 0


def test_a_calibrated_model_begins_with_its_own_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Tight
) -> None:
    found = Calibration(0.01, 0.0, 20.0, 0.0, measured_tokens=16_000)
    measured: list[Any] = []

    def measure(*_: Any) -> Calibration:
        measured.append(1)
        return found

    monkeypatch.setattr("batchery_worker.served.calibrated", measure)
    for _ in range(2):
        served = Served("tight", model, "cpu", Memory())
        served.calibrate(CalibrationCache(str(tmp_path)))
        assert served.figures() == {
            "max_batch_tokens": 16_000,
            "chosen_by": "calibration",
            "out_of_memory": 0,
            "token_us": 10.0,
            "item_us": 0.0,
            "pass_ms": 20.0,
        }
        run(served, [10] * 4, max_batch_tokens=200)
        assert served.figures()["chosen_by"] == "setting"
        run(served, [10] * 4)
        assert served.figures()["max_batch_tokens"] == 16_000
    assert measured == [1]


def test_a_model_that_cannot_be_measured_keeps_the_default(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr("batchery_worker.served.calibrated", lambda *_: None)
    served.calibrate(CalibrationCache(None))
    assert served.figures()["chosen_by"] == "default"


def test_a_measurement_that_fails_in_any_way_leaves_the_default(
    monkeypatch: pytest.MonkeyPatch, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Calibration:
        raise ArithmeticError("broken")

    monkeypatch.setattr("batchery_worker.served.calibrated", broken)
    served.calibrate(CalibrationCache(None))
    assert served.figures()["chosen_by"] == "default"
    assert "tight on cpu cannot be calibrated" in caplog.text

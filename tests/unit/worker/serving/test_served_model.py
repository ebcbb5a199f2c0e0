"""A model on a device whose memory ends somewhere: its jobs succeed, its budget learns."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from batchery import Failed, Model
from batchery_worker.batching.cost_model import Costs
from batchery_worker.device.start import find_memory
from batchery_worker.memory import Memory
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

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
def served(model: Tight, memory: Counted, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr(
        "batchery_worker.serving.served_model.DEFAULT_MAX_BATCH_TOKENS", {"cpu": 512}
    )
    return LoadedModel("tight", model, "cpu", memory, loaded_bytes=70)


def work(max_batch_tokens: int | None = None) -> Work:
    return Work(1, "tight", {}, [], 256, max_batch_tokens)


def run(served: LoadedModel, items: list[int], max_batch_tokens: int | None = None) -> list[Any]:
    outcomes, _, _ = served.compute(items, work(max_batch_tokens), nullcontext)
    return outcomes


def test_all_jobs_succeed_and_the_budget_is_found_within_a_few_batches(
    served: LoadedModel, model: Tight
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


def test_rest_of_a_batch_is_cut_anew_after_memory_ran_out(
    served: LoadedModel, model: Tight
) -> None:
    items = [10] * 400
    assert run(served, items) == items
    # One pass fails, however many were planned.
    assert sum(padded > FITS for padded in model.passes) == 1


def test_an_item_that_does_not_fit_alone_fails_alone(served: LoadedModel) -> None:
    outcomes = run(served, [FITS + 1, 5, 5])
    assert isinstance(outcomes[0], Failed)
    assert outcomes[1:] == [5, 5]


def test_one_line_warns_of_the_new_budget_and_the_cache_is_released(
    served: LoadedModel, memory: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "batchery.device"):
        run(served, [8] * 100)
        run(served, [8] * 10)
    (line,) = caplog.messages
    budget = served.figures()["max_batch_tokens"]
    assert line.startswith("tight on cpu: no memory for forward passes of 512 tokens;")
    assert f"at most {budget} from now on" in line
    assert memory.releases == 1


def test_the_figures_say_what_chose_the_budget(served: LoadedModel) -> None:
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
    assert figures == {"chosen_by": "memory", "out_of_memory": 1, "loaded_bytes": 70}


def test_figures_count_operations_without_padding(
    served: LoadedModel, model: Tight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "flops_per_token", 3, raising=False)
    run(served, [10, 4])
    assert served.figures()["flops"] == 3.0 * 14


def test_cpu_memory_is_not_counted() -> None:
    memory = find_memory("cpu")
    memory.forget_peak()
    memory.release()
    memory.wait()
    assert memory.figures() == {}
    assert memory.allocated_bytes() == memory.peak_bytes() == 0


class Clocked(Tight):
    """Takes exactly what its costs say, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__(Counted())
        self.now_s = 0.0
        self.costs = Costs(0.01, 0.0, 20.0)

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        self.now_s += self.costs.expected_ms(max(batch) * len(batch), len(batch)) / 1e3
        return list(batch)


def clocked(model: Clocked) -> LoadedModel:
    return LoadedModel("clocked", model, "cpu", Memory(), clock=lambda: model.now_s)


def run_mixed(served: LoadedModel, batches: int) -> None:
    for number in range(batches):
        run(served, [4 + number * 7 % 60] * (1 + number * 13 % 64))


def test_costs_are_learned_from_batches_that_ran_and_leave_the_budget_alone() -> None:
    model = Clocked()
    served = clocked(model)
    assert "token_us" not in served.figures()
    run_mixed(served, 400)
    figures = served.figures()
    assert figures["token_us"] == pytest.approx(10, rel=0.05)
    assert figures["pass_ms"] == pytest.approx(20, rel=0.05)
    assert figures["useful_items"] > 64
    assert figures["fitted_batches"] >= 384
    assert (figures["max_batch_tokens"], figures["chosen_by"]) == (1024, "default")


def test_batches_with_a_failed_pass_teach_no_costs() -> None:
    model = Clocked()
    served = clocked(model)
    whole = model.forward

    def fail_once(batch: Sequence[int], *places: Any, **keywords: Any) -> Any:
        if len(batch) > 1:
            model.now_s += 1
            raise ValueError("not together")
        return whole(batch)

    model.forward = fail_once  # type: ignore[method-assign]
    run_mixed(served, 100)
    # Only those of one item ran as they were planned.
    assert "token_us" not in served.figures()


class DeadContext(Memory):
    """Memory of a device whose context an error has ended, once it has."""

    is_dead = False
    waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.is_dead:
            raise RuntimeError("CUDA error: device-side assert triggered")


class Asserting(Tight):
    """An item of 13 ends the context of its device: whatever comes after fails, too."""

    memory: Any

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        self.memory.is_dead |= 13 in batch
        if 7 in batch:
            raise ValueError("seven")
        self.memory.wait()
        return list(batch)


def test_an_error_that_ends_the_context_of_the_device_fails_no_job() -> None:
    memory = DeadContext()
    served = LoadedModel("asserting", Asserting(memory), "cpu", memory)  # type: ignore[arg-type]
    assert run(served, [1, 2, 3]) == [1, 2, 3]
    assert memory.waits == 1
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(served, [4, 13, 5])


def test_a_bad_item_fails_alone_and_the_device_is_asked_whether_it_lives() -> None:
    memory = DeadContext()
    served = LoadedModel("asserting", Asserting(memory), "cpu", memory)  # type: ignore[arg-type]
    failed = Failed("not a text")
    outcomes = run(served, [1, failed, 2])  # type: ignore[list-item]
    assert (outcomes, memory.waits) == ([1, failed, 2], 1)
    outcomes = run(served, [1, 7, 2])
    assert (outcomes[0], str(outcomes[1].exception), outcomes[2]) == (1, "seven", 2)
    # One in the pass of the other two items, and one to be sure.
    assert memory.waits == 1 + 1 + 1

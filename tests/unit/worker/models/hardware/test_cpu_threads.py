"""Forward passes side by side on a CPU: their threads, and their results."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from batchery import Failed
from batchery.execution.batch import compute, prepare
from batchery_worker.batching.planner import plan
from batchery_worker.models.hardware.cpu_threads import PassStreams
from support.patience import patient
from support.tiny_models import Build, Load, run

#: Longest wait for another thread, in seconds.
TIMEOUT_S = patient(30)


class Passes:
    """Passes that note on which thread they ran, and how many threads of torch they had."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.ran_on: list[str] = []

    def __call__(self, value: float = 0.0) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            self.threads.append(torch.get_num_threads())
            self.ran_on.append(threading.current_thread().name)
            return torch.full((1,), value)

        return compute


@pytest.fixture
def passes() -> Passes:
    return Passes()


def test_lone_pass_has_all_threads_and_runs_on_the_waiting_thread(passes: Passes) -> None:
    torch.set_num_threads(4)
    pending = PassStreams(2, threads=4).submit(passes(7.0))
    assert passes.threads == []
    assert pending.wait().tolist() == [7.0]
    assert passes.threads == [4]
    assert passes.ran_on == [threading.current_thread().name]


def test_passes_of_two_streams_run_at_the_same_time() -> None:
    meet = threading.Barrier(2, timeout=TIMEOUT_S)

    def computing() -> Tensor:
        meet.wait()
        return torch.ones(1)

    streams = PassStreams(2, threads=2)
    pending = [streams.submit(computing), streams.submit(computing)]
    assert [each.wait().tolist() for each in pending] == [[1.0], [1.0]]


@pytest.mark.parametrize(("count", "threads", "each"), [(2, 4, 2), (3, 4, 1), (2, 1, 1), (4, 8, 4)])
def test_passes_share_the_threads(passes: Passes, count: int, threads: int, each: int) -> None:
    streams = PassStreams(count, threads)
    asked = 2 if count == 4 else count
    pending = [streams.submit(passes()) for _ in range(asked)]
    for one in pending:
        one.wait()
    assert passes.threads == [each] * asked
    assert all(name.startswith("batchery-stream") for name in passes.ran_on)


@pytest.mark.parametrize("ask", ["submit", "run_now"])
def test_threads_that_begin_have_as_many_as_before(passes: Passes, ask: str) -> None:
    torch.set_num_threads(3)
    streams = PassStreams(2, threads=3)
    for _ in range(2):
        for one in [getattr(streams, ask)(passes()) for _ in range(2)]:
            one.wait()
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(torch.get_num_threads).result() == 3
        assert torch.get_num_threads() == 3
    assert passes.threads == [1] * 4


def test_passes_begin_as_soon_as_all_streams_are_taken() -> None:
    began = threading.Semaphore(0)

    def computing() -> Tensor:
        began.release()
        return torch.ones(1)

    streams = PassStreams(2, threads=2)
    pending = [streams.submit(computing)]
    assert not began.acquire(blocking=False)
    pending.append(streams.submit(computing))
    assert began.acquire(timeout=TIMEOUT_S)
    assert began.acquire(timeout=TIMEOUT_S)
    for each in pending:
        each.wait()


def test_error_of_a_pass_is_raised_to_its_waiter(passes: Passes) -> None:
    def failing() -> Tensor:
        raise MemoryError("no room")

    streams = PassStreams(2, threads=2)
    bad, good = streams.submit(failing), streams.submit(passes(3.0))
    with pytest.raises(MemoryError, match="no room"):
        bad.wait()
    assert good.wait().tolist() == [3.0]
    assert good.wait().tolist() == [3.0]


@pytest.mark.parametrize("architecture", ["bert", "llama", "t5", "xlnet-left"])
def test_every_architecture_gives_the_same_results_side_by_side(
    architecture: str, build: Build, embedder: Load, texts: list[str]
) -> None:
    alone, beside = (embedder(build(architecture), cpu_streams=streams) for streams in (1, 4))
    many = texts * 20
    expected, found = (
        compute(
            model,
            prepare(model, many, {}),
            {},
            partial(plan, max_batch_tokens=64, max_batch_size=4, pads=model.pads),
        )[0]
        for model in (alone, beside)
    )
    assert found == expected


def test_pass_without_memory_is_halved(
    build: Build, embedder: Load, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedder(build("bert"), cpu_streams=2)
    prepared = prepare(model, texts * 4, {})
    expected, _, _ = compute(model, prepared, {}, lambda lengths: plan(lengths, 500, 2))
    usual = model._pass.values

    def tight(batch: list[object], reading: str) -> Tensor:
        if len(batch) > 2:
            raise MemoryError
        values: Tensor = usual(batch, reading)
        return values

    monkeypatch.setattr(model._pass, "values", tight)
    found, _, _ = compute(model, prepared, {}, lambda lengths: plan(lengths, 500, 8))
    assert not [each for each in found if isinstance(each, Failed)]
    for one, other in zip(found, expected, strict=True):
        assert one["vector"] == pytest.approx(other["vector"], abs=1e-5)


def test_a_model_may_be_asked_by_several_threads(
    build: Build, embedder: Load, texts: list[str]
) -> None:
    alone, asked = (embedder(build("bert"), cpu_streams=streams) for streams in (1, 2))
    expected = [run(alone, [text])[0]["vector"] for text in texts * 4]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: run(asked, [text])[0]["vector"], texts * 4))
    assert found == expected

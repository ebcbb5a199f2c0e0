"""An engine: a model in this process, with all that serves it on a device of a worker."""

import asyncio
import gc
import threading
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchery import (
    BatchArgumentError,
    BatcherClosed,
    DeviceDied,
    DeviceUnavailable,
    Engine,
    Failed,
    InvalidItem,
    Model,
    ModelLoadError,
    ModelSettings,
    OutOfMemory,
    SettingsError,
)
from batchery_worker.inprocess import engine as engine_module
from batchery_worker.memory import Memory
from batchery_worker.models.embedding import EmbeddingModel
from support.gate import WAIT_S, batcher_threads
from support.harness import wait_for
from support.tiny_models import run, save_model

#: Greatest difference of any number of a unit vector.
TOLERANCE = 1e-5

TEXTS = [" ".join(["the cat sat on the mat"] * count) for count in (1, 7, 2, 11, 1, 4, 9, 3)]


class Doubling(Model):
    """Items are numbers, and their own lengths; keeps a record of what happened."""

    pads = True

    def __init__(self, fits: int = 10**9) -> None:
        self.fits = fits
        self.said: list[Any] = []

    def load(self, device: str) -> None:
        self.said.append(("load", device, threading.current_thread().name))

    def unload(self) -> None:
        self.said.append(("unload", threading.current_thread().name))

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> list[Any]:
        self.said.append(("preprocess", list(items)))
        return [
            each if isinstance(each, int) else Failed(InvalidItem(f"{each!r}: no number"))
            for each in items
        ]

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        self.said.append(("forward", list(batch)))
        if max(batch) * len(batch) > self.fits:
            raise MemoryError("no room")
        if 666 in batch:
            raise ZeroDivisionError("the number of the beast")
        return [each * keywords.get("times", 2) for each in batch]

    def passes(self) -> list[list[int]]:
        return [each[1] for each in self.said if each[0] == "forward"]


class Held(Doubling):
    """Its `forward` waits until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = threading.Event()
        self.go = threading.Event()

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        self.first.set()
        assert self.go.wait(30)
        return super().forward(batch, **keywords)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_of_torch() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save_model(folder, "bert")
    return folder


def settings_of(folder: Path | str, **options: Any) -> ModelSettings:
    return ModelSettings(kind="embedding", model=str(folder), **options)


def one_by_one(settings: ModelSettings, texts: Sequence[str], **keywords: Any) -> Any:
    """Vectors of the model alone, (N, D)."""
    model = EmbeddingModel(settings)
    model.load("cpu")
    results = [run(model, [text], **keywords)[0] for text in texts]
    model.unload()
    return vectors(results)


def vectors(results: Sequence[Any]) -> Any:
    return np.array([each["vector"] for each in results], np.float32)


#: Threads that were there before the test.
OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _note_other_threads() -> None:
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def batchery_threads() -> list[str]:
    """Names of the threads that the test has started, and that live."""
    return [each.name for each in set(batcher_threads()) - OTHERS]


@pytest.mark.parametrize("max_batch_tokens", [None, 20])
def test_results_are_those_of_the_model_alone_however_it_is_called(
    bert: Path, max_batch_tokens: int | None
) -> None:
    made = partial(Engine, settings_of(bert), device="cpu", max_batch_tokens=max_batch_tokens)

    async def serve() -> tuple[list[Any], int]:
        async with made() as engine:
            return await asyncio.gather(*map(engine, TEXTS)), engine.stats.batches

    with made() as engine:
        results, stats = engine.call(TEXTS), engine.stats
    awaited, batches = asyncio.run(serve())
    expected = one_by_one(settings_of(bert), TEXTS)
    for found in (results, awaited):
        assert np.abs(vectors(found) - expected).max() < TOLERANCE
        assert [each["tokens"] for each in found] == [len(text.split()) + 2 for text in TEXTS]
    # Packed passes: no padding is computed.
    assert (stats.items, stats.batches, stats.padding_waste) == (len(TEXTS), 1, 0.0)
    assert batches < len(TEXTS)


def test_passes_side_by_side_end_with_the_engine(bert: Path) -> None:
    settings = settings_of(bert, cpu_streams=2, forward="padded")
    with Engine(settings, device="cpu", max_batch_tokens=64) as engine:
        results = engine.call(TEXTS * 3)
        assert any("batchery-stream" in name for name in batchery_threads())
    assert not batchery_threads()
    expected = one_by_one(settings_of(bert), TEXTS)
    assert np.abs(vectors(results) - np.concatenate([expected] * 3)).max() < TOLERANCE


def test_calls_with_other_keywords_share_no_batch(bert: Path) -> None:
    settings = settings_of(bert)
    with Engine(settings, device="cpu") as engine:
        short = [engine.submit(text, dimensions=4) for text in TEXTS]
        raw = [engine.submit(text, normalize=False) for text in TEXTS]
        for futures, keywords in ((short, {"dimensions": 4}), (raw, {"normalize": False})):
            found = vectors([each.result(60) for each in futures])
            assert np.allclose(found, one_by_one(settings, TEXTS, **keywords), atol=TOLERANCE)
        with pytest.raises(InvalidItem, match="keyword colour: no such keyword"):
            engine.call("the cat", colour="red")


def test_a_name_of_the_settings_brings_their_limits(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batchery.toml").write_text(
        'devices = ["cpu"]\nmax_batch_size = 5\nmax_wait_ms = 3\n[models.embed]\n'
        f'kind = "embedding"\nmodel = "{bert}"\nmax_batch_tokens = 50\nmax_wait_ms = 7\n'
    )
    with Engine("embed") as engine:
        assert engine.figures["max_batch_tokens"] == 50
        assert len(engine.call("the cat")["vector"]) == 32
        assert engine.figures["chosen_by"] == "setting"
        engine.call(["the cat"] * 11)
        # Alone, then 5, 5 and 1 at a time.
        assert engine.stats.batches == 4
    with pytest.raises(SettingsError, match=r"Engine\('embd'\): no such model .* there is embed"):
        Engine("embd")
    with Engine("embed", max_batch_size=11) as engine:
        engine.call(["the cat"] * 11)
        assert engine.stats.batches == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 3}, "no option max_batch; there are device, max_batch_size"),
        ({"length": len}, "no option length"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens=0: give a whole number above 0"),
    ],
)
def test_an_impossible_option_is_refused_where_it_is_written(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchArgumentError, match=message):
        Engine(Doubling(), **options)


def test_what_is_no_model_or_device_is_refused() -> None:
    with pytest.raises(BatchArgumentError, match="give the name of a model"):
        Engine(Doubling)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="device='gpu': not a device"):
        Engine(Doubling(), device="gpu")
    with pytest.raises(SettingsError, match=r"'tiny'.* is of kind generation, which runs in slots"):
        Engine(ModelSettings(kind="generation", model="tiny"))
    with (
        pytest.raises(DeviceUnavailable, match="'cuda:77': not on this machine"),
        Engine(Doubling(), device="cuda:77"),
    ):
        pass


def test_a_model_of_your_own_is_planned_by_tokens() -> None:
    model = Doubling()
    with Engine(model, device="cpu", max_batch_tokens=12) as engine:
        assert engine.call([1, 6, 2, 6, 1, 2]) == [2, 12, 4, 12, 2, 4]
        assert engine.call([5], times=3) == [15]
        assert engine.call([]) == []
    assert model.passes()[0] == [6, 6]
    assert all(max(each) * len(each) <= 12 for each in model.passes())


def test_memory_that_ran_out_is_a_lesson_and_fails_only_what_does_not_fit_alone() -> None:
    model = Doubling(fits=300)
    with Engine(model, device="cpu") as engine:
        items = [100] * 8 + [301, 3]
        results = engine.options(return_exceptions=True).call(items)
        figures = engine.figures
        before = len(model.passes())
        assert engine.call([100] * 3) == [200] * 3
    assert [*results[:8], results[9]] == [200] * 8 + [6]
    assert isinstance(results[8], OutOfMemory)
    assert "even alone" in str(results[8])
    assert figures["max_batch_tokens"] <= 300
    assert figures["chosen_by"] == "memory"
    assert figures["out_of_memory"] > 0
    assert all(max(each) * len(each) <= 300 for each in model.passes()[before:])


def test_an_exception_of_the_model_shows_where_it_was_raised() -> None:
    with Engine(Doubling(), device="cpu") as engine:
        futures = [engine.submit(each) for each in (1, 666, 3)]
        error = futures[1].exception(60)
        assert [futures[0].result(60), futures[2].result(60)] == [2, 6]
    assert isinstance(error, ZeroDivisionError)
    shown = "".join(traceback.format_exception(error))
    assert 'in forward\n    raise ZeroDivisionError("the number of the beast")' in shown


def test_entering_loads_once_on_the_thread_that_computes_and_frees() -> None:
    model = Doubling()
    with Engine(model, device="cpu") as engine:
        assert model.said == [("load", "cpu", "batchery-Doubling")]
        assert engine.stats.items == 0
    assert model.said[1:] == [("unload", "batchery-Doubling")]
    assert not batchery_threads()
    assert engine.figures == {}


def test_without_entering_the_first_call_loads() -> None:
    model = Doubling()
    engine = Engine(model, device="cpu")
    assert model.said == []
    assert engine.call(4) == 8
    engine.close()
    assert [each[0] for each in model.said] == ["load", "preprocess", "forward", "unload"]


def test_a_model_that_cannot_be_loaded_fails_whoever_enters(tmp_path: Path) -> None:
    engine = Engine(settings_of(tmp_path), device="cpu")
    with pytest.raises(ModelLoadError), engine:
        pytest.fail("it was entered")

    async def enter() -> None:
        async with Engine(settings_of(tmp_path), device="cpu"):
            pytest.fail("it was entered")

    with pytest.raises(ModelLoadError):
        asyncio.run(enter())
    with pytest.raises(BatcherClosed):
        engine.call("a text")
    wait_for(lambda: not batchery_threads(), "the thread ends")


def test_an_entry_that_is_cancelled_while_a_batch_runs_hurts_no_call() -> None:
    model = Held()
    engine = Engine(model, device="cpu")
    first = engine.submit(1)
    assert model.first.wait(WAIT_S)

    async def enter() -> None:
        entering = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait([entering])

    asyncio.run(enter())
    model.go.set()
    assert first.result(WAIT_S) == 2
    # Nobody uses what could not be entered.
    with pytest.raises(BatcherClosed, match="it is closed"):
        engine.call(1)


def test_an_engine_that_nobody_holds_ends_its_thread() -> None:
    engine = Engine(Doubling(), device="cpu")
    keeper = engine.options(timeout_s=60)
    del engine
    gc.collect()
    assert keeper.call(3) == 6
    del keeper
    gc.collect()
    wait_for(lambda: not batchery_threads(), "the thread ends")


class DeadContext(Memory):
    """Memory of a device whose context some pass has ended."""

    is_dead = False

    def wait(self) -> None:
        if self.is_dead:
            raise DeviceDied("the CUDA context of cuda:0 has ended: device-side assert")


def test_an_engine_whose_device_is_dead_closes_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, model = DeadContext(), Doubling()
    monkeypatch.setattr(engine_module, "find_memory", lambda *_: memory)
    with Engine(model, device="cpu") as engine:
        assert engine.call([1, 2]) == [2, 4]
        memory.is_dead = True
        # The bad item ends the context, so nobody knows what became of its neighbours.
        with pytest.raises(DeviceDied, match="only a new process can use this device"):
            engine.call([3, 666])
        with pytest.raises(BatcherClosed, match="context of cuda:0 has ended"):
            engine.call(4)
    assert [4] not in model.passes()
    # What gives back its memory would raise, too.
    assert not any(each[0] == "unload" for each in model.said)

"""The models of a device: which are loaded, and dropped."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from batchery import Model
from batchery.errors import ModelLoadError
from batchery_worker.ipc.messages import Setup
from batchery_worker.memory import Memory
from batchery_worker.serving.model_pool import FIRST_DEMAND, ModelPool
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

MIB = 2**20


class Weighty(Model):
    """Notes what becomes of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.dimensions = log, name, 8

    def forward(self, batch: Any, *_: Any, **__: Any) -> Any:
        return batch

    def unload(self) -> None:
        self.log.append(f"unload {self.name}")


class Pool(ModelPool):
    """Models named by letters; each takes as long to load as it holds MiB."""

    def __init__(self, limit: float | None, pinned: str = "", **sizes: int) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.sizes = sizes
        self.estimates: dict[str, int] = {}
        #: Models that run out of memory while more than so many are loaded.
        self.crowded: dict[str, int] = {}
        setup = Setup(
            *("cpu", (), "", (), (), {}),
            models=dict.fromkeys(sizes, "all devices"),
            pinned=frozenset(pinned),
            model_memory_bytes=None if limit is None else int(limit * MIB),
        )
        super().__init__(self.load, self.estimate, setup, Memory(), self.clock)

    def clock(self) -> float:
        return self.now_s

    def estimate(self, name: str) -> int | None:
        return self.estimates.get(name)

    def load(self, name: str) -> LoadedModel:
        self.log.append(f"load {name}")
        if len(self.loaded) > self.crowded.get(name, 100):
            error = ModelLoadError("no")
            raise error from MemoryError("full")
        self.now_s += self.sizes[name]
        return self.make(name, self.sizes[name])

    def make(self, name: str, size: int) -> LoadedModel:
        model = Weighty(self.log, name)
        return LoadedModel(name, model, "cpu", Memory(), size * MIB, self.clock)

    def use(self, name: str) -> LoadedModel:
        self.now_s += 1.0
        served = self.serve(name)
        served.compute([1], Work(1, name, {}, [], 4, None), nullcontext)
        return served

    def states(self) -> dict[str, str]:
        return {name: figures["state"] for name, figures in self.figures().items()}


def test_without_a_limit_all_are_loaded_and_stay() -> None:
    pool = Pool(None, a=1, b=1)
    pool.load_first(["a", "b"])
    assert pool.states() == {"a": "loaded", "b": "loaded"}
    assert pool.use("a") is pool.loaded["a"]
    assert pool.log == ["load a", "load b"]


def test_the_start_loads_what_fits_and_the_pinned_ones_first() -> None:
    pool = Pool(3, a=2, b=2, c=1, pinned="b")
    pool.load_first(["a", "b", "c"])
    # Nothing is known of a before it is loaded.
    assert pool.log == ["load b", "load a", "unload a", "load c"]
    assert pool.states() == {"a": "not loaded", "b": "loaded", "c": "loaded"}
    pool = Pool(3, a=2, b=2, c=1)
    pool.estimates = {name: size * MIB for name, size in pool.sizes.items()}
    pool.load_first(["a", "b", "c"])
    assert pool.log == ["load a", "load c"]


def test_what_was_used_least_recently_makes_room() -> None:
    pool = Pool(2, a=1, b=1, c=1)
    for name in ("a", "b", "a", "c", "b"):
        pool.use(name)
    assert pool.log == ["load a", "load b", "load c", "unload b", "unload a", "load b"]
    assert pool.states() == {"a": "not loaded", "b": "loaded", "c": "loaded"}
    assert [each["loads"] for each in pool.figures().values()] == [1, 2, 1]


def test_room_is_made_before_the_load_where_the_size_is_known() -> None:
    pool = Pool(2, a=1, b=1, c=1)
    pool.estimates = {"c": MIB}
    for name in ("a", "b", "c", "a"):
        pool.use(name)
    assert pool.log[2:] == ["unload a", "load c", "unload b", "load a"]


def test_jobs_wait_for_what_stays() -> None:
    pool = Pool(2, a=1, b=1, c=1)
    pool.use("a")
    pool.use("b")
    pool.serve("c", {"a"})
    assert pool.states() == {"a": "loaded", "b": "not loaded", "c": "loaded"}


def explain(pool: Pool, act: Callable[[], object]) -> str:
    with pytest.raises(ModelLoadError) as raised:
        act()
    return str(raised.value)


def test_what_can_never_fit_is_said_with_the_sums_and_nothing_else_has_gone() -> None:
    pool = Pool(4, a=1, b=2, big=5, pinned="ab")
    pool.estimates = {"big": 6 * MIB}
    pool.load_first(["a", "b"])
    text = (
        "model 'big': needs 6.0 MiB on cpu, and its models may have 4.0 MiB, of which pinned models"
        " hold 3.0 MiB; raise model_memory_bytes, or give it other devices"
    )
    assert explain(pool, lambda: pool.serve("big")) == text
    assert pool.states() == {"a": "loaded", "b": "loaded", "big": "not loaded"}


def test_model_that_turns_out_too_large_goes_again() -> None:
    pool = Pool(4, a=1, big=5)
    pool.use("a")
    for _ in range(2):
        assert "needs 5.0 MiB" in explain(pool, lambda: pool.serve("big"))
    # Its size is known now.
    assert pool.log == ["load a", "load big", "unload big"]
    assert pool.states() == {"a": "loaded", "big": "not loaded"}


def test_pinned_models_that_do_not_fit_together_end_the_start() -> None:
    pool = Pool(4, a=3, b=2, pinned="ab")
    text = explain(pool, lambda: pool.load_first(["a", "b"]))
    assert "model 'b': needs 2.0 MiB" in text
    assert "pinned models hold 3.0 MiB" in text


def test_load_that_runs_out_of_memory_has_others_make_room() -> None:
    pool = Pool(None, a=1, b=1, c=1)
    pool.crowded = {"c": 0}
    for name in ("a", "b", "c"):
        pool.use(name)
    assert pool.states() == {"a": "not loaded", "b": "not loaded", "c": "loaded"}
    pool.crowded = {"a": -1}
    assert explain(pool, lambda: pool.serve("a")) == "no"


def test_model_of_a_queue_that_is_consumed_later_is_there_for_its_first_demand() -> None:
    pool = Pool(None, a=1)
    pool.sizes["later"] = 1
    pool.use("later")
    assert pool.figures()["later"]["why"] == FIRST_DEMAND
    assert pool.figures()["a"]["why"] == "all devices"


def test_time_of_a_load_is_guessed_from_others_until_it_is_known() -> None:
    pool = Pool(2, a=2, b=1)
    assert pool.expect_load_s("b") == 1.0
    pool.use("a")
    assert pool.expect_load_s("b") == 2.0
    pool.use("b")
    assert (pool.expect_load_s("b"), pool.expect_load_s("a")) == (0.0, 2.0)

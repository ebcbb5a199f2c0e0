"""What a device need not compute, over several batches; the cache is a dictionary."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from batchery import Model
from batchery.errors import ModelLoadError
from batchery_worker.plain_values import Encoded
from batchery_worker.result_cache import SingleFlight
from batchery_worker.serving.loading import build_identity
from batchery_worker.work import CachePolicy, Work


class Store:
    """A cache in the place of Redis."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.asked: list[int] = []
        self.away = False

    def get(self, _: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        self.asked.append(len(digests))
        return {} if self.away else {each: self.kept[each] for each in digests if each in self.kept}

    def put(self, _: str, results: Mapping[bytes, bytes], ttl_s: float) -> None:
        assert ttl_s == 60
        if not self.away:
            self.kept.update(results)

    def take_errors(self) -> dict[str, Any]:
        return {"errors": 1, "error": "away"} if self.away else {}


class Device:
    """The three stages, each called when the test wants it."""

    def __init__(self) -> None:
        self.store = Store()
        self.reuse = SingleFlight(self.store)  # type: ignore[arg-type]
        self.computed: list[Any] = []

    def prepare(self, *items: Any, version: str = "1", identity: str = "", **keywords: Any) -> Any:
        cache = CachePolicy(version, 60) if version else None
        jobs = [(str(number), [item], False) for number, item in enumerate(items)]
        work = Work(1, "task", keywords, jobs, 64, None, cache=cache)
        return work, items, cache and self.reuse.begin(work, cache, items, identity)

    def forward(self, batch: Any) -> list[Any]:
        _, items, deduped = batch
        chosen = items if deduped is None else [items[place] for place in deduped.positions]
        outcomes = self.reuse.run(deduped, chosen, self._run)
        return [each.value if isinstance(each, Encoded) else each for each in outcomes]

    def commit(self, batch: Any) -> dict[str, Any]:
        work, _, deduped = batch
        deduped.encode()
        return self.reuse.keep(deduped, work)

    def all(self, *items: Any, **options: Any) -> list[Any]:
        batch = self.prepare(*items, **options)
        outcomes = self.forward(batch)
        self.commit(batch)
        return outcomes

    def _run(self, items: list[Any]) -> list[Any]:
        self.computed += items
        return [item.upper() for item in items]


def test_task_without_a_cache_computes_each_item_and_never_asks() -> None:
    device = Device()
    batch = device.prepare("a", "a", version="")
    assert batch[2] is None
    assert device.forward(batch) == ["A", "A"]
    assert device.computed == ["a", "a"]
    assert not device.store.asked


def test_cache_is_asked_once_per_batch_with_each_key_once() -> None:
    device = Device()
    assert device.all("a", "b", "a") == ["A", "B", "A"]
    assert device.all("a", "c", "c", "b") == ["A", "C", "C", "B"]
    assert device.computed == ["a", "b", "c"]
    assert device.store.asked == [2, 3]


def test_batch_takes_results_of_the_batch_that_ran_while_it_was_prepared() -> None:
    device = Device()
    first, second = device.prepare("a", "b"), device.prepare("b", "c")
    device.forward(first)
    third = device.prepare("c", "a")
    assert device.forward(second) == ["B", "C"]
    device.commit(first)
    counts = {"items": 2, "hits": 0, "deduplicated": 1, "computed": 1}
    assert device.commit(second) == counts
    # `a` is stored by now, but was not when the third one was prepared: it was sent too early for
    # what a worker does, which sends it when the first one is answered for.
    assert device.forward(third) == ["C", "A"]
    assert device.computed == ["a", "b", "c", "a"]


def test_another_version_identity_or_keyword_shares_nothing() -> None:
    device = Device()
    for options in ({}, {"version": "2"}, {"identity": "model"}, {"mark": "!"}, {"mark": "?"}):
        first, second = (device.prepare("a", **options) for _ in range(2))
        device.forward(first)
        device.forward(second)
        device.commit(first)
    assert device.computed == ["a"] * 5


def test_equal_items_are_computed_once_while_the_cache_is_away() -> None:
    device = Device()
    device.store.away = True
    batch = device.prepare("a", "a")
    assert device.forward(batch) == ["A", "A"]
    assert device.commit(batch)["errors"] == 1
    assert device.all("b") == ["B"]
    assert device.all("a", "a") == ["A", "A"]
    assert device.computed == ["a", "b", "a"]


class Told(Model):
    def __init__(self, identity: Any) -> None:
        self._identity = identity

    def identity(self) -> str:
        if isinstance(self._identity, Exception):
            raise self._identity
        return str(self._identity)


def test_identity_of_a_model_is_asked_only_with_a_cache() -> None:
    cached: Any = SimpleNamespace(name="embed", cache="1")
    plain: Any = SimpleNamespace(name="embed", cache=None)
    broken = Told(PermissionError("model.safetensors"))
    assert build_identity(cached, Model()) == ""
    assert build_identity(cached, Told("weights 7")) == "weights 7"
    assert build_identity(plain, broken) == ""
    with pytest.raises(ModelLoadError, match=r"'embed': .* PermissionError: model.safetensors"):
        build_identity(cached, broken)

"""A device that swaps a model: who runs on which version, and when the old one is freed."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from batchery import Model, ModelLoadError, ModelSettings
from batchery_worker.device.reload import PassTurn, Reloader, describe
from batchery_worker.device.served_model import LoadedModel
from batchery_worker.ipc.messages import (
    Reload,
    Reloaded,
    dump_message,
    dump_reply,
    load_message,
    load_reply,
)
from batchery_worker.memory import Memory
from support.harness import wait_for

SETTINGS = ModelSettings(kind="embedding", model="new")


class Versioned(Model):
    """Knows its version, and whether it was unloaded."""

    def __init__(self, name: str = "v2", dimensions: int = 8) -> None:
        self.name, self.dimensions, self.is_unloaded = name, dimensions, False

    def version(self) -> str:
        return self.name

    def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> list[str]:
        return [self.name for _ in batch]

    def unload(self) -> None:
        self.is_unloaded = True


def loaded(model: Versioned) -> LoadedModel:
    made = LoadedModel("embed", model, "cpu", Memory())
    made.version = model.name
    return made


class Scene:
    """A reloader whose next version is the test's."""

    def __init__(self) -> None:
        self.old, self.new = Versioned("v1"), Versioned("v2")
        self.served = {"embed": loaded(self.old)}
        self.dimensions = {"embed": 8}
        self.gate = threading.Event()
        self.gate.set()
        self.replies: list[Any] = []
        self.asked: list[tuple[str, ModelSettings | None]] = []
        self.released = 0
        self.reloader = Reloader(
            self.dimensions.get, self.load, self.swap, self.release, self.replies.append
        )

    def load(self, task: str, settings: ModelSettings | None) -> LoadedModel:
        self.asked.append((task, settings))
        assert self.gate.wait(30)
        if self.new.name == "broken":
            raise ModelLoadError("there is no such folder")
        return loaded(self.new)

    def swap(
        self, new: LoadedModel, settings: ModelSettings | None, load_s: float
    ) -> LoadedModel | None:
        assert (settings, load_s > 0) == (SETTINGS, True)
        old = self.served.get("embed")
        self.served["embed"] = new
        return old

    def release(self) -> None:
        self.released += 1

    def reload(self, *, force: bool = False) -> None:
        self.reloader.begin(Reload("embed", SETTINGS, force))

    def answer(self) -> Reloaded:
        wait_for(lambda: self.replies, "the parent hears of it")
        reply = self.replies.pop()
        assert isinstance(reply, Reloaded)
        return reply


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_batches_that_were_prepared_before_keep_the_old_version(scene: Scene) -> None:
    scene.reloader.unanswered.add(1)
    scene.reload()
    wait_for(lambda: scene.served["embed"].version == "v2", "it is swapped")
    # What is prepared now has the new one, and is not waited for.
    scene.reloader.unanswered.add(2)
    time.sleep(0.05)
    assert not scene.old.is_unloaded
    assert not scene.replies
    scene.reloader.unanswered.discard(1)
    assert scene.answer()[:2] == ("embed", "v2")
    assert (scene.old.is_unloaded, scene.released) == (True, 1)
    assert scene.asked == [("embed", SETTINGS)]


def test_old_version_serves_until_the_new_one_is_loaded(scene: Scene) -> None:
    scene.gate.clear()
    scene.reload()
    wait_for(lambda: scene.asked, "it is being loaded")
    assert scene.served["embed"].model is scene.old
    scene.gate.set()
    assert scene.answer().error == ""


@pytest.mark.parametrize(
    ("new", "error"),
    [
        (Versioned("broken"), "there is no such folder"),
        (Versioned("v2", dimensions=9), "model 'embed': the vectors of the new version have 9"),
    ],
)
def test_version_that_cannot_take_its_place_leaves_the_old_one(
    scene: Scene, new: Versioned, error: str
) -> None:
    scene.new = new
    scene.reload()
    answer = scene.answer()
    assert (answer.version, answer.error[: len(error)]) == ("", error)
    assert scene.served["embed"].model is scene.old
    assert not scene.old.is_unloaded


def test_other_dimensions_may_be_forced(scene: Scene) -> None:
    scene.new = Versioned("v2", dimensions=9)
    scene.reload(force=True)
    assert (scene.answer().error, scene.served["embed"].version) == ("", "v2")


def test_model_that_is_not_loaded_yet_is_loaded(scene: Scene) -> None:
    scene.served.clear()
    scene.dimensions.clear()
    scene.reload()
    assert (scene.answer().version, scene.served["embed"].version) == ("v2", "v2")


def test_unload_that_fails_is_no_failure(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("cannot")

    scene.old.unload = fail  # type: ignore[method-assign]
    scene.reload()
    assert scene.answer().error == ""
    assert "embed: unload has failed" in caplog.text


def test_a_lack_of_memory_is_explained() -> None:
    error = ModelLoadError("CUDA out of memory")
    assert describe(error) == (
        "CUDA out of memory; while a model is reloaded, its device holds it twice"
    )
    assert describe(KeyError("x")) == "KeyError: 'x'"


def test_a_thread_that_builds_a_model_has_its_turn_between_two_batches() -> None:
    turn, done, batches = PassTurn(), threading.Event(), 0

    def build() -> None:
        with turn:
            done.set()

    thread = threading.Thread(target=build)
    with turn.running:
        thread.start()
        wait_for(turn.gate.locked, "it waits for the batch that runs")
        assert not done.is_set()
    while not done.is_set():
        with turn.gate:
            pass  # As a device does, before each batch.
        with turn.running:
            batches += 1
    assert batches <= 1
    thread.join()


def test_messages_of_an_order_cross_the_pipe() -> None:
    order = Reload("embed", SETTINGS, True)
    assert load_message(dump_message(order)) == order
    reply = Reloaded("embed", "v2", 1.5, "")
    assert load_reply(dump_reply(reply)) == reply

"""An engine whose model runs in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from apps.engine_models import Obedient
from batchery import (
    BatcherClosed,
    DeviceDied,
    DeviceUnavailable,
    Engine,
    InvalidItem,
    ItemFailed,
    ModelLoadError,
    ModelSettings,
    UnserialisableResult,
)
from support.harness import wait_for
from support.patience import patient

TEXTS = [" ".join(["the cat sat on the mat"] * count) for count in (1, 7, 2, 11, 1, 4, 9, 3)]


class Local:
    """An item whose class the process cannot find: this module has no place in its path."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Serves all tests that leave it able to go on, whatever becomes of its process."""
    with Engine(Obedient(), device="cpu", process=True) as made:
        yield made


def settings_of(folder: Path) -> ModelSettings:
    return ModelSettings(kind="embedding", model=str(folder))


def vectors(results: list[Any]) -> Any:
    return np.array([each["vector"] for each in results], np.float32)


def children() -> list[int]:
    return [each.pid for each in psutil.Process().children(recursive=True)]


def test_results_are_those_of_the_engine_in_this_process(minilm_path: Path) -> None:
    with Engine(settings_of(minilm_path), device="cpu") as here:
        alone = [here.call(text) for text in TEXTS]

    async def serve() -> tuple[list[Any], Any, int]:
        async with Engine(settings_of(minilm_path), device="cpu", process=True) as engine:
            results = await asyncio.gather(*map(engine, TEXTS * 10))
            raw = await engine("the cat", dimensions=8, normalize=False)
            with pytest.raises(InvalidItem, match="text: must be a string, not int"):
                await engine(3)
            assert engine.figures["max_batch_tokens"] == 1024
            return results, raw, engine.stats.batches

    results, raw, batches = asyncio.run(serve())
    assert np.abs(vectors(results) - np.concatenate([vectors(alone)] * 10)).max() < 1e-5
    assert [each["tokens"] for each in results[:8]] == [each["tokens"] for each in alone]
    assert len(raw["vector"]) == 8
    assert batches < 80


def test_entering_starts_the_process_and_leaving_ends_it(tmp_path: Path) -> None:
    before, threads_before = children(), set(threading.enumerate())
    engine = Engine(Obedient(str(tmp_path)), device="cpu", process=True)
    assert children() == before
    with engine:
        (pid,) = set(children()) - set(before)
        assert (tmp_path / f"loaded-{pid}").exists()
        assert engine.call("pid") == pid != os.getpid()
    assert children() == before
    wait_for(lambda: set(threading.enumerate()) <= threads_before, "its threads end")
    with pytest.raises(BatcherClosed):
        engine.call(1)


def test_each_caller_gets_its_own_outcome(engine: Engine) -> None:
    futures = [engine.submit(each) for each in (1, "bad", "two parts", "a function", 5)]
    errors = [each.exception(patient(60)) for each in futures]
    assert [futures[0].result(), futures[4].result()] == [2, 10]
    assert isinstance(errors[1], InvalidItem)
    assert isinstance(errors[2], ItemFailed)
    assert str(errors[2]) == "TwoPartsError: 7: seven"
    assert isinstance(errors[3], UnserialisableResult)


def test_an_item_that_cannot_travel_fails_alone(engine: Engine) -> None:
    items = [1, threading.Lock(), 3, Local(), 5]
    results = engine.options(return_exceptions=True).call(items)
    assert [results[0], results[2], results[4]] == [2, 6, 10]
    assert isinstance(results[1], TypeError)
    assert "cannot pickle" in str(results[1])
    assert isinstance(results[3], InvalidItem | TypeError)


def test_full_batches_are_sent_before_their_turn_and_answered_in_order() -> None:
    with Engine(Obedient(), device="cpu", process=True, max_batch_size=4) as engine:
        futures = [engine.submit(each) for each in range(403)]
        for each in futures[10:50]:
            each.cancel()
        done = [each for each in futures if not each.cancelled()]
        assert [each.result(patient(60)) for each in done] == [
            2 * number for number, each in enumerate(futures) if not each.cancelled()
        ]


def test_batches_larger_than_the_pipe_go_both_ways_at_once() -> None:
    items = [str(each) * 500_000 for each in range(1, 9)]
    with Engine(Obedient(), device="cpu", process=True, max_batch_size=2) as engine:
        futures = [engine.submit(each) for each in items * 2]
        assert [each.result(patient(60)) for each in futures] == [2 * each for each in items * 2]


def test_a_process_that_died_between_batches_is_replaced_and_nobody_notices(
    engine: Engine,
) -> None:
    pid = engine.call("pid")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "it is dead")
    assert engine.call("pid") not in (pid, os.getpid())


def test_the_item_that_kills_the_process_fails_and_its_batch_mates_do_not(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    results = engine.options(return_exceptions=True).call([1, "die", 3, 4])
    assert [results[0], *results[2:]] == [2, 6, 8]
    assert isinstance(results[1], DeviceDied)
    assert str(results[1]) == "Obedient: its device process died: killed by signal 9"
    assert engine.call(6) == 12
    assert "the next batch starts another one" in caplog.text


def test_the_item_that_ends_the_context_of_a_device_fails_alone_and_the_engine_goes_on(
    engine: Engine,
) -> None:
    """A CUDA context that an error has ended computes nothing any more; a new process has one."""
    results = engine.options(return_exceptions=True).call([1, "context", 3])
    assert [results[0], results[2]] == [2, 6]
    assert isinstance(results[1], DeviceDied)
    assert str(results[1]) == "Obedient: its device process died: exit code 70"
    assert engine.call(6) == 12


def kill_when_it_computes(pid: int) -> None:
    process = psutil.Process(pid)
    started_s = process.cpu_times().user
    wait_for(lambda: process.cpu_times().user > started_s + 1.5, "it computes", patient(60))
    process.kill()


def test_a_call_that_is_killed_from_outside_fails_and_the_engine_goes_on(engine: Engine) -> None:
    pid = engine.call("pid")
    # A process that computes for ever does not keep this one from anything.
    future = engine.submit("hold")
    kill_when_it_computes(pid)
    # The first one may have died of something else, so the item has another one.
    device: Any = engine._device
    wait_for(
        lambda: device.pid not in (None, pid) and engine.figures,
        "another one is ready",
        patient(60),
    )
    kill_when_it_computes(device.pid)
    assert isinstance(future.exception(patient(60)), DeviceDied)
    assert engine.call(2) == 4


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Obedient("die"), "'Obedient': its device process died while it loaded: killed by"),
        (Obedient("/no/such/folder"), "'Obedient' cannot be loaded on cpu: FileNotFoundError"),
        (ModelSettings(kind="embedding", model="/no/such/folder"), "/no/such/folder"),
    ],
)
def test_a_model_that_cannot_be_loaded_fails_whoever_enters(model: Any, message: str) -> None:
    before = children()
    engine = Engine(model, device="cpu", process=True)
    with pytest.raises(ModelLoadError, match=message), engine:
        pytest.fail("it was entered")
    wait_for(lambda: children() == before, "the process ends")


def test_a_model_that_cannot_travel_is_named() -> None:
    model = Obedient()
    model.lock = threading.Lock()  # type: ignore[attr-defined]
    with (
        pytest.raises(ModelLoadError, match="'Obedient': it cannot be pickled for its device"),
        Engine(model, device="cpu", process=True),
    ):
        pass


def test_a_model_of_a_script_is_refused_with_what_to_do() -> None:
    script = """
from batchery import Engine, Model, ModelLoadError

class Mine(Model):
    def forward(self, batch):
        return batch

assert Engine(Mine(), device="cpu").call(1) == 1
try:
    Engine(Mine(), device="cpu", process=True).call(1)
except ModelLoadError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
        timeout=patient(60),
    )
    assert "model 'Mine': its device process cannot read it: AttributeError" in done.stdout
    assert "define its class in a module that can be imported" in done.stdout


def test_the_caller_of_a_process_never_loads_torch(minilm_path: Path) -> None:
    script = """
import sys
from batchery import Engine, ModelSettings

settings = ModelSettings(kind="embedding", model=sys.argv[1])
Engine(settings)
with Engine(settings, device="cpu", process=True) as engine:
    print(len(engine.call("the cat")["vector"]), {"torch", "transformers"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(minilm_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(120),
    )
    assert done.stdout == "384 set()\n"


def test_a_device_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(DeviceUnavailable, match="'cuda:77': not on this machine"),
        Engine(Obedient(), device="cuda:77", process=True),
    ):
        pass


def test_a_model_that_loads_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHERY_DEVICE_START_TIMEOUT_S", "3")
    before = children()
    engine = Engine(Obedient("sleep"), device="cpu", process=True)
    with pytest.raises(ModelLoadError, match="not ready within 3 s"):
        engine.call(1)
    assert children() == before
    engine.close()


def test_a_process_that_hangs_is_ended_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s, before = patient(2), children()
    monkeypatch.setenv("BATCHERY_MAX_PASS_S", str(limit_s))
    with Engine(Obedient(), device="cpu", process=True, max_batch_size=1) as engine:
        held, other = engine.submit("hold"), engine.submit(4)
        with pytest.raises(DeviceDied, match=rf"no answer for {limit_s:g} s \(setting max_pass_s"):
            held.result(patient(60))
        assert other.result(patient(60)) == 8
    assert children() == before


SCRIPT = """
import os, sys
from apps.engine_models import Obedient
from batchery import Engine

engine = Engine(Obedient(), device="cpu", process=True)
print(engine.call("pid"), flush=True)
if sys.argv[1] == "wait":
    future = engine.submit("hold")
    sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["wait", "exit"])
def test_the_process_ends_with_the_one_that_started_it(ending: str) -> None:
    """Killed while it computes; and at the end of a script that closes nothing."""
    command = [sys.executable, "-c", SCRIPT, ending]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        if ending == "wait":
            owner.kill()
        assert owner.wait(patient(60)) == (-signal.SIGKILL if ending == "wait" else 0)
    wait_for(lambda: not psutil.pid_exists(pid), "the device process ends", patient(60))

"""The first pass of the next batch is begun while the device computes the last of this one."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from batchery import Model
from batchery_worker.device import __main__ as device_module
from batchery_worker.device.__main__ import Device
from batchery_worker.device.reply import DeviceBatch
from batchery_worker.device.served_model import LoadedModel
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.messages import Began, Work, load_reply
from batchery_worker.memory import Memory
from batchery_worker.result_cache import DedupedBatch


class Launched(Model):
    """Items are their own lengths; its passes return early, and it notes what happens when."""

    passes_ahead = 1

    def __init__(self) -> None:
        self.log: list[str] = []

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> list[int]:
        self.log.append(f"forward {batch}")
        return list(batch)

    def postprocess(self, outputs: Any, *_: Any, **keywords: Any) -> list[int]:
        self.log.append(f"results {outputs}")
        return [each * 10 for each in outputs]


class NoReuse:
    """Computes everything."""

    def run(self, deduped: Any, items: list[Any], run: Any) -> list[Any]:
        return list(run(items))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    one, other = socket.socketpair()
    with one, other:
        made: Any = Device(one)
        made._app, made._reuse, made.parent = None, NoReuse(), other
        monkeypatch.setattr(device_module, "find_task", lambda *_: None)
        yield made


@pytest.fixture
def model() -> Launched:
    return Launched()


def batch(
    model: Model, items: list[int], deduped: Any = None, size: int = 2, *, urgent: bool = False
) -> DeviceBatch:
    jobs = [(str(each), [each], False) for each in items]
    work = Work(1, "launched", {}, jobs, size, None, urgent=urgent)
    return DeviceBatch(work, items, LoadedModel("launched", model, "cpu", Memory()), deduped)


def forward(device: Any, batch: DeviceBatch) -> list[Any]:
    outcomes: list[Any] = device._forward(batch, None).outcomes
    return outcomes


def test_next_batch_is_started_behind_the_last_pass(device: Any, model: Launched) -> None:
    device._intake._ready.put(batch(model, [9, 9, 1]))
    assert forward(device, batch(model, [5, 5, 4, 4])) == [50, 50, 40, 40]
    assert model.log == [
        *("forward [5, 5]", "forward [4, 4]", "results [5, 5]"),
        *("forward [9, 9]", "results [4, 4]"),
    ]
    model.log.clear()
    assert forward(device, device._ahead.popleft()) == [90, 90, 10]
    # The pass that was started is not computed again.
    assert model.log == ["forward [1]", "results [9, 9]", "results [1]"]


def test_device_does_not_wait_for_a_next_batch(device: Any, model: Launched) -> None:
    assert forward(device, batch(model, [5])) == [50]
    assert not device._ahead


def test_batch_with_single_flight_is_not_started_early(device: Any, model: Launched) -> None:
    device._intake._ready.put(batch(model, [9], deduped=DedupedBatch([None], {})))
    assert forward(device, batch(model, [5])) == [50]
    assert device._ahead[0].items == [9]
    assert model.log == ["forward [5]", "results [5]"]


def test_model_without_lookahead_takes_turns(device: Any, model: Launched) -> None:
    model.passes_ahead = 0
    device._intake._ready.put(batch(model, [9]))
    assert forward(device, batch(model, [5])) == [50]
    assert not device._ahead
    assert model.log == ["forward [5]", "results [5]"]


def test_first_started_pass_is_the_first_of_the_plan(model: Launched) -> None:
    served = LoadedModel("launched", model, "cpu", Memory())
    one = batch(model, [1, 7, 3, 7])
    served.start(one.items, one.work)
    assert model.log == ["forward [7, 7]"]
    served.start([], one.work)
    assert model.log == ["forward [7, 7]"]


def test_urgent_batch_runs_between_two_passes(device: Any, model: Launched) -> None:
    bulk, behind = batch(model, [5, 5, 4, 4, 3, 3]), batch(model, [9])
    urgent = batch(model, [1], urgent=True)
    urgent.served = bulk.served
    device._intake._ready.put(behind)

    def forward_and_hear(*args: Any) -> list[int]:
        if len(model.log) == 1:
            # It comes while the first pass runs.
            device._intake._ready.put(urgent)
        return Launched.forward(model, *args)

    model.forward = forward_and_hear  # type: ignore[method-assign, assignment]
    assert forward(device, bulk) == [50, 50, 40, 40, 30, 30]
    assert model.log == [
        *("forward [5, 5]", "forward [4, 4]", "results [5, 5]"),
        *("forward [1]", "results [1]"),
        # What had been started for the bulk is still its own, and is not computed again.
        *("forward [3, 3]", "results [4, 4]", "forward [9]", "results [3, 3]"),
    ]
    # Its results are on their way while the rest is computed.
    assert device._computed.get().outcomes == [10]
    assert [each.items for each in device._ahead] == [[9]]
    assert device.current is None
    assert load_reply(read_frame(device.parent)) == Began(1)


def test_urgent_batch_goes_before_those_that_are_prepared(device: Any, model: Launched) -> None:
    for prepared in (batch(model, [9]), batch(model, [8], urgent=True)):
        device._intake._ready.put(prepared)
    device._look_ahead()
    assert [each.items for each in device._ahead] == [[8], [9]]


@pytest.mark.parametrize("is_closed", [False, True])
def test_error_of_a_model_is_not_taken_for_the_end_of_the_pipe(
    device: Any, is_closed: bool
) -> None:
    def fail(*_: Any) -> None:
        raise EOFError

    intake = SimpleNamespace(run=list, closed=threading.Event())
    device._intake, device._run_next = intake, fail
    if is_closed:
        intake.closed.set()
    with nullcontext() if is_closed else pytest.raises(EOFError):
        device.run()

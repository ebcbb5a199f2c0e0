"""Inputs on their way to the device."""

from typing import Any

import pytest
import torch

from batchery_worker.models import staging
from batchery_worker.models.staging import Staging


def test_on_a_cpu_inputs_are_there_already() -> None:
    inputs = {"input_ids": torch.arange(6).view(2, 3)}
    assert Staging(torch.device("cpu")).send(inputs)["input_ids"] is inputs["input_ids"]


class Events:
    """Stands in for CUDA's events: says which were waited for, and which recorded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._count = 0

    def event(self) -> Any:
        self._count += 1
        name, log = f"slot {self._count}", self.log

        class Event:
            def synchronize(self) -> None:
                log.append(f"wait for {name}")

            def record(self) -> None:
                log.append(f"mark {name}")

        return Event()


class PretendCuda:
    """A device that says it is CUDA's, where tensors stay on the CPU."""

    type = "cuda"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events.event)
    empty, to = torch.empty, torch.Tensor.to

    def unpinned(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*size, **options)

    def sent(tensor: torch.Tensor, device: Any, *, non_blocking: bool = False) -> torch.Tensor:
        assert isinstance(device, PretendCuda)
        assert non_blocking
        # A copy: the buffer is written again while the device still has this.
        return to(tensor, "cpu", copy=True)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "to", sent)
    monkeypatch.setattr(staging, "FIRST_NUMBERS", 8)
    return events


def test_one_copy_takes_all_inputs_and_buffers_take_turns(events: Events) -> None:
    path = Staging(PretendCuda())  # type: ignore[arg-type]
    passes = [
        {"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.ones(2, 3).long()},
        {"input_ids": torch.arange(100).view(4, 25), "ends": torch.tensor([3, 9])},
        {"input_ids": torch.tensor([[7]])},
    ]
    arrived = [path.send(inputs) for inputs in passes]
    for there, inputs in zip(arrived, passes, strict=True):
        assert list(there) == list(inputs)
        for name, tensor in inputs.items():
            assert torch.equal(there[name], tensor)
    # A buffer is written only when the device has read what was in it.
    assert events.log == [
        *("wait for slot 2", "mark slot 2"),
        *("wait for slot 1", "mark slot 1"),
        *("wait for slot 2", "mark slot 2"),
    ]

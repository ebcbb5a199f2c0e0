"""Inputs on their way to the device, and results on their way back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from batchery_worker.models.hardware.transfers import DeviceToHost, HostToDevice


def test_cpu_inputs_are_not_copied() -> None:
    numbers = np.arange(6).reshape(2, 3)
    sent = HostToDevice(torch.device("cpu")).send(numbers)
    assert sent.tolist() == numbers.tolist()
    assert sent.data_ptr() == numbers.ctypes.data


def test_cpu_results_are_not_copied() -> None:
    values = torch.ones(2, 3)
    pending = DeviceToHost(torch.device("cpu")).start(values)
    assert pending.wait() is values
    assert pending.wait() is values


class PretendCuda:
    """A device that says it is CUDA's, where tensors stay on the CPU; its streams keep a log."""

    type = "cuda"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.stream("compute")

    def stream(self, name: str) -> Any:
        log = self.log

        class Stream:
            def wait_stream(self, other: Any) -> None:
                log.append(f"{name} waits for {other}")

            def __str__(self) -> str:
                return name

        return Stream()

    def event(self) -> Any:
        log = self.log

        class Event:
            def record(self, stream: Any) -> None:
                log.append(f"event on {stream}")

            def synchronize(self) -> None:
                log.append("host waits for event")

        return Event()

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendCuda:
    pretended = PretendCuda()
    log, empty, to, copy = pretended.log, torch.empty, torch.Tensor.to, torch.Tensor.copy_

    def unpinned(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*size, **options)

    def sent(tensor: torch.Tensor, device: Any, *, non_blocking: bool = False) -> torch.Tensor:
        assert device is pretended
        assert non_blocking
        log.append(f"in on {pretended.current}")
        return to(tensor, "cpu", copy=True)

    def copied(there: torch.Tensor, values: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        log.append(f"out on {pretended.current}")
        return copy(there, values)

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: pretended.stream("copies"))
    monkeypatch.setattr(torch.cuda, "Event", pretended.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: pretended.current)
    monkeypatch.setattr(torch.cuda, "stream", pretended.within)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "to", sent)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda _, stream: log.append(f"kept for {stream}")
    )
    return pretended


def test_inputs_are_copied_beside_the_pass_that_runs(cuda: PretendCuda) -> None:
    numbers = np.arange(12).reshape(2, 3, 2)
    sent = HostToDevice(cuda).send(numbers)  # type: ignore[arg-type]
    assert sent.tolist() == numbers.tolist()
    assert cuda.log == ["in on copies", "compute waits for copies", "kept for compute"]


def test_results_are_copied_behind_their_pass_and_awaited_when_needed(cuda: PretendCuda) -> None:
    values = torch.randn(3, 4)
    pending = DeviceToHost(cuda).start(values)  # type: ignore[arg-type]
    started = ["copies waits for compute", "out on copies", "event on copies", "kept for copies"]
    assert cuda.log == started
    assert torch.equal(pending.wait(), values)
    assert cuda.log == [*started, "host waits for event"]

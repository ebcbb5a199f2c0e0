"""CUDA's order of things, without CUDA: streams, events and memory that is reused too soon.

Tensors stay on the CPU. What is launched runs only when the host waits for it, and then in the
order that does most harm: one stream runs as far ahead of the others as it may. Memory that is
freed is overwritten as soon as its stream gets there, unless it was kept for another stream.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize

import pytest
import torch

#: What freed memory is overwritten with.
OVERWRITTEN = -99


class FakeStream:
    """What was launched on a stream, in order, and how much of it has run."""

    def __init__(self, machine: "FakeCuda", name: str) -> None:
        self._machine, self.name = machine, name
        #: For each operation, how far other streams must have come, and what it does.
        self.operations: list[tuple[list[tuple[FakeStream, int]], Callable[[], Any]]] = []
        self.done = 0

    def launch(self, run: Callable[[], Any], *needs: tuple["FakeStream", int]) -> None:
        self.operations.append(([*needs], run))

    def wait_stream(self, other: "FakeStream") -> None:
        self.launch(lambda: None, (other, len(other.operations)))

    def advance(self) -> bool:
        """Runs what can run; whether anything did."""
        before = self.done
        while self.done < len(self.operations):
            needs, run = self.operations[self.done]
            if any(stream.done < place for stream, place in needs):
                break
            run()
            self.done += 1
        return self.done > before


class FakeEvent:
    """A place in a stream."""

    def __init__(self, machine: "FakeCuda", *, blocking: bool = False) -> None:
        self._machine, self._blocking = machine, blocking

    def record(self, stream: FakeStream | None = None) -> None:
        self._stream = stream or self._machine.current
        self._place = len(self._stream.operations)

    def query(self) -> bool:
        return self._stream.done >= self._place

    def synchronize(self) -> None:
        self._machine.slept += self._blocking
        self._machine.run_until(self._stream, self._place)


class FakeCuda:
    """One device. It says that it is CUDA's.

    Attributes:
        type: As that of `torch.device`.
        slept: How often the host slept until an event, and did not spin.
        waits: How often the host waited for a copy although it asked not to.
    """

    type = "cuda"

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.current = self.stream("compute")
        self.waits = self.slept = 0
        #: The stream that runs ahead of the others.
        self.first = self.current

    def stream(self, name: str = "copies") -> FakeStream:
        self.streams.append(FakeStream(self, name))
        return self.streams[-1]

    @contextmanager
    def within(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run_until(self, stream: FakeStream, place: int) -> None:
        order = sorted(self.streams, key=lambda each: each is not self.first)
        while stream.done < place:
            if not any(each.advance() for each in order):
                raise AssertionError(f"{stream.name} waits for what never runs")

    def finish(self) -> None:
        for stream in self.streams:
            self.run_until(stream, len(stream.operations))

    def owned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the device, of the current stream."""
        memory, owner = tensor.detach().view_as(tensor), self.current
        kept_for: list[FakeStream] = []
        tensor.kept_for = kept_for  # type: ignore[attr-defined]

        def free() -> None:
            needs = [(stream, len(stream.operations)) for stream in kept_for]
            owner.launch(lambda: memory.fill_(OVERWRITTEN), *needs)

        finalize(tensor, free)
        return tensor

    def copy(self, there: torch.Tensor, source: torch.Tensor) -> None:
        to, start = there.detach().view_as(there), source.detach().view_as(source)
        self.current.launch(lambda: _copy(to, start))


_copy = torch.Tensor.copy_


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Puts it in the place of CUDA, for `models/hardware/transfers.py`."""
    machine = FakeCuda()
    empty, pinned = torch.empty, set[int]()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def empty_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        if pin_memory:
            pinned.add(made.data_ptr())
        return made

    def to_device(tensor: torch.Tensor, _: Any, *, non_blocking: bool = False) -> torch.Tensor:
        machine.waits += not (non_blocking and tensor.data_ptr() in pinned)
        there = machine.owned(torch.full_like(tensor, OVERWRITTEN))
        machine.copy(there, tensor)
        return there

    def to_host(
        there: torch.Tensor, values: torch.Tensor, *, non_blocking: bool = False
    ) -> torch.Tensor:
        machine.waits += not (non_blocking and there.data_ptr() in pinned)
        machine.copy(there, values)
        return there

    for name, value in {
        "Stream": lambda *_: machine.stream(),
        "Event": partial(FakeEvent, machine),
        "current_stream": lambda *_: machine.current,
        "current_device": lambda: 0,
        "stream": machine.within,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", empty_pinned)
    for name, method in {
        "to": to_device,
        "copy_": to_host,
        "pin_memory": pin,
        "record_stream": lambda tensor, stream: tensor.kept_for.append(stream),
    }.items():
        monkeypatch.setattr(torch.Tensor, name, method)
    return machine

"""Inputs on their way to the device, and results on their way back."""

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from batchery_worker.models.hardware.transfers import DeviceToHost, HostToDevice
from support import fake_cuda
from support.fake_cuda import OVERWRITTEN, FakeCuda


def test_cpu_inputs_are_not_copied() -> None:
    numbers = np.arange(6).reshape(2, 3)
    sent = HostToDevice(torch.device("cpu")).send(numbers)
    assert sent.tolist() == numbers.tolist()
    assert sent.data_ptr() == numbers.ctypes.data


def test_cpu_results_are_not_copied() -> None:
    values = torch.ones(2, 3)
    pending = DeviceToHost(torch.device("cpu")).start(values)
    assert pending.arrives_within(0)
    assert pending.wait() is values
    assert pending.wait() is values


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


def sums_of_inputs(cuda: FakeCuda, first: str) -> list[list[float]]:
    """Sends inputs for four passes, each of which reads them after the next ones were sent."""
    to_device: Any = HostToDevice(cuda)  # type: ignore[arg-type]
    cuda.first = next(stream for stream in cuda.streams if stream.name == first)
    seen = []
    for number in range(4):
        sent = to_device.send(np.full((2, 3), number))
        read, found = sent.detach().view_as(sent), torch.zeros(2, 3, dtype=torch.int64)
        cuda.current.launch(partial(found.add_, read))
        seen.append(found)
        del sent, read
    assert all(not found.any() for found in seen), "nothing ran yet"
    cuda.finish()
    return [numbers(found) for found in seen]


def results_on_the_host(cuda: FakeCuda, first: str) -> list[list[float]]:
    """Computes the results of four passes, each in memory that the next one may reuse."""
    to_host: Any = DeviceToHost(cuda)  # type: ignore[arg-type]
    cuda.first = next(stream for stream in cuda.streams if stream.name == first)
    copies = []
    for number in range(4):
        values = cuda.owned(torch.full((2, 3), float(OVERWRITTEN)))
        made = values.detach().view_as(values)
        cuda.current.launch(partial(made.fill_, number))
        copies.append(to_host.start(values))
        del values
    assert not any(pending.arrives_within(0) for pending in copies)
    return [numbers(pending.wait()) for pending in copies]


def numbers(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.flatten().tolist()))


WAYS = {"in": sums_of_inputs, "out": results_on_the_host}


@pytest.mark.parametrize("first", ["compute", "copies"])
@pytest.mark.parametrize("way", WAYS)
def test_copies_beside_passes_are_whole_whichever_stream_is_ahead(
    way: str, first: str, cuda: FakeCuda
) -> None:
    assert WAYS[way](cuda, first) == [[0], [1], [2], [3]]
    assert cuda.waits == 0


@pytest.mark.parametrize(("cores", "sleeps"), [(4, True), (5, False)])
def test_who_waits_for_results_leaves_its_core_to_others_where_there_are_few(
    cuda: FakeCuda, cores: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    to_host: Any = DeviceToHost(cuda)  # type: ignore[arg-type]
    pending = to_host.start(cuda.owned(torch.ones(2)))
    assert numbers(pending.wait()) == [1]
    assert cuda.slept == sleeps

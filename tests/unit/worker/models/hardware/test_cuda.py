"""What is asked of CUDA, by stand-ins for torch's functions."""

import pytest
import torch

from batchery.settings import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.hardware.devices import CudaMemory
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

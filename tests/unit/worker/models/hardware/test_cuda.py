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


@pytest.mark.parametrize(
    ("name", "peak_flops"),
    [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756.5e12), ("GeForce", None)],
)
def test_figures_say_what_the_gpu_could_do_if_it_is_known(
    monkeypatch: pytest.MonkeyPatch, name: str, peak_flops: float | None
) -> None:
    answers = {"get_device_name": name, "mem_get_info": (1, 9), "memory_reserved": 3}
    for function, answer in answers.items():
        monkeypatch.setattr(torch.cuda, function, lambda _, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    figures = CudaMemory("cuda:0").figures()
    assert figures["peak_flops"] == peak_flops
    assert (figures["total_bytes"], figures["reserved_bytes"]) == (9, 3)


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

"""How a model lies on its device: whole, in slices on a group of processes, or layer by layer.

A device of several parts is spelled with `+`, such as `cuda:0+cuda:1`. To all but this package it
is one device.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.hardware.devices import device_named

#: An object and the name of a method of it that all ranks of a group must call together.
SharedCall = tuple[Any, str]


class Whole:
    """A model whole on one device.

    Attributes:
        device: Where its inputs go, and its results come from.
        ranks: Number of processes that compute it.
        stages: Number of parts that compute different passes at the same time.
        options: Keyword arguments of `from_pretrained`.
        is_whole: Whether it may be moved, quantized and captured as on a device of its own.
    """

    ranks = 1
    stages = 1
    is_whole: ClassVar[bool] = True

    def __init__(self, device: str) -> None:
        self.device: torch.device = device_named(device)
        self.options: dict[str, Any] = {}

    def begin(self, model: Any, config: Any) -> None:
        """Looks whether the model of this config fits, before weights are loaded.

        Raises:
            ModelLoadError: It does not; says what to use instead.
        """

    def place(self, model: torch.nn.Module) -> None:
        """Moves a model of transformers, once loaded."""
        model.to(self.device)

    def choose_forward(self, setting: str) -> str:
        """Which forward pass may be tried, as the setting `forward` has it."""
        return setting

    def agree(self, number: int) -> int:
        """The least of the numbers that the processes have."""
        return number

    def share(self, calls: Sequence[SharedCall]) -> None:
        """Has all processes make these calls together from now on; to be called last."""

    def release(self, model: Any) -> None:
        """Has all processes forget a model."""

    def settle_thread(self) -> None:
        """Gets a thread ready to compute passes."""

    def run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs a pass on a thread of several that compute; returns its values, on the CPU."""
        return compute()


def open_split(device: str, settings: ModelSettings) -> Whole:
    """Opens the device of a model.

    Raises:
        ModelLoadError: The model's settings do not go together with several parts.
    """
    parts = device.split("+")
    if len(parts) == 1:
        return Whole(device)
    if settings.quantize != "none":
        raise ModelLoadError(
            f"model {settings.model!r}: quantize = {settings.quantize!r} is for one device, not"
            f" {device}; set it to none"
        )
    if settings.engine == "onnx":
        raise ModelLoadError(
            f"model {settings.model!r}: engine = 'onnx' is for one device, not {device}"
        )
    if find_spec("accelerate") is None:
        raise ModelLoadError(
            f"model {settings.model!r}: {device} needs accelerate: pip install 'batchery[split]'"
        )
    from batchery_worker.models.split.group import enter_group
    from batchery_worker.models.split.layers import Layers
    from batchery_worker.models.split.pipeline import Pipeline

    if settings.split == "pipeline":
        return Pipeline(device, settings)
    if settings.split == "layers" or parts[-1] in ("cpu", "disk"):
        return Layers(device, settings)
    return enter_group(device)


def build_empty(auto_class: Any, config: Any, settings: ModelSettings) -> Any:
    """Builds a model of transformers that lies nowhere: it has no weights, only its parts."""
    # Any other number format would be torch's default meanwhile, on all threads.
    options = {"dtype": torch.float32, "trust_remote_code": settings.trust_remote_code}
    with torch.device("meta"):
        return auto_class.from_config(config, **options)


def memory_share(device: torch.device) -> float:
    """Share of a device's memory that this process may use, by the setting `memory_fraction`."""
    on_card = device.type == "cuda"
    return float(torch.cuda.get_per_process_memory_fraction(device)) if on_card else 1.0


def limit_memory(device: torch.device, share: float) -> None:
    """Has this process use no more of a device's memory than that share."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)

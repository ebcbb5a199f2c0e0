"""How a model lies on its device: whole, or layer by layer on several parts.

A device of several parts is spelled with `+`, such as `cuda:0+cuda:1`. To all but this package it
is one device.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.hardware.devices import device_named


class Whole:
    """A model whole on one device.

    Attributes:
        device: Where its inputs go, and its results come from.
        stages: Number of parts that compute different passes at the same time.
        options: Keyword arguments of `from_pretrained`.
        is_whole: Whether it may be moved, quantized and captured as on a device of its own.
    """

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
    if "+" not in device:
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
    from batchery_worker.models.split.layers import Layers
    from batchery_worker.models.split.pipeline import Pipeline

    kind = Pipeline if settings.split == "pipeline" else Layers
    return kind(device, settings)


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

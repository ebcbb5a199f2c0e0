"""How a model lies on its device: whole, or layer by layer on several parts.

A device of several parts is spelled with `+`, such as `cuda:0+cuda:1`. To all but this package it
is one device.
"""

import logging
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import psutil
import torch

from batchery.device_names import main_device
from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.hardware.devices import device_named

logger = logging.getLogger(__name__)


#: Share of the free memory that weights may take: passes need the rest.
WEIGHTS_SHARE = 0.8

#: What a map calls the places of layers -> what people do.
PLACES = {"cpu": "main memory", "disk": "the model's files"}


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


class Layers(Whole):
    """The layers of a model, each where there was room; those that fit nowhere are fetched in turn.

    One process computes all of them, so that one card works at a time: for models that are too
    large, not for speed. accelerate moves the activations, and fetches layers from main memory or
    from the model's files when it is their turn.
    """

    is_whole: ClassVar[bool] = False

    def __init__(self, device: str, settings: ModelSettings) -> None:
        """Looks how much each part of the device may hold.

        Raises:
            ModelLoadError: The kind of the model needs all layers on one card.
        """
        if settings.kind == "generation" and device.count("cuda") > 1:
            raise ModelLoadError(
                f"model {settings.model!r}: texts are written from one cache, and the layers of"
                f" {device} would need one each; name one card, or set engine = 'vllm'"
            )
        super().__init__(main_device(device))
        self._name = device
        self._settings = settings
        self._parts = device.split("+")
        parts = [device_named(part) for part in self._parts if part != "disk"]
        self._budget = {self.budget_key(part): self._find_room(part) for part in parts}
        self.options: dict[str, Any] = {"device_map": "auto", "max_memory": self._budget}

    @staticmethod
    def budget_key(part: torch.device) -> int | str:
        """What accelerate calls a part."""
        return part.index if part.type == "cuda" else "cpu"

    def _find_room(self, part: torch.device) -> int:
        if part == self.device and self._settings.layer_memory_bytes:
            return self._settings.layer_memory_bytes
        if part.type != "cuda":
            return int(psutil.virtual_memory().available * WEIGHTS_SHARE)
        # By the setting `memory_fraction`, which the process has set for its first card.
        share = float(torch.cuda.get_per_process_memory_fraction(self.device))
        torch.cuda.set_per_process_memory_fraction(share, part)
        free_bytes, total_bytes = torch.cuda.mem_get_info(part)
        return int(min(free_bytes, total_bytes * share) * WEIGHTS_SHARE)

    def place(self, model: torch.nn.Module) -> None:
        """Looks where the layers are. Raises ModelLoadError: some are where none must be."""
        count = Counter(str(where) for where in getattr(model, "hf_device_map", {}).values())
        spilled = [place for place in PLACES if count[place] and place not in self._parts]
        if spilled:
            sums = ", ".join(f"{size / 2**30:.2f} GiB on {at}" for at, size in self._budget.items())
            raise ModelLoadError(
                f"model {self._settings.model!r}: {count[spilled[0]]} of its parts do not fit into"
                f" {self._name} ({sums}): name more cards, or end the name in +cpu, +disk or both"
                " for layers that wait in main memory or in the model's files"
            )
        if self._settings.kind == "generation" and next(model.parameters()).is_meta:
            raise ModelLoadError(
                f"model {self._settings.model!r}: not even its first layer fits into"
                f" {self.device}, where the texts that grow are; set more layer_memory_bytes"
            )
        found = ", ".join(
            f"{each} in {PLACES.get(place, f'cuda:{place}')}" for place, each in count.items()
        )
        logger.info("model %s: parts by place: %s", self._settings.model, found)

    def choose_forward(self, setting: str) -> str:
        """No other than the padded one unless asked: to prove one takes tens of passes."""
        return "padded" if setting == "auto" else setting


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
    from batchery_worker.models.split.pipeline import Pipeline

    kind = Pipeline if settings.split == "pipeline" else Layers
    return kind(device, settings)


def build_empty(auto_class: Any, config: Any, settings: ModelSettings) -> Any:
    """Builds a model of transformers that lies nowhere: it has no weights, only its parts."""
    # Any other number format would be torch's default meanwhile, on all threads.
    options = {"dtype": torch.float32, "trust_remote_code": settings.trust_remote_code}
    with torch.device("meta"):
        return auto_class.from_config(config, **options)

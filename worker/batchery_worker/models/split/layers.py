"""Whole layers on several devices, one after the other; those that fit nowhere are fetched in turn.

One process computes all of them, so that one card works at a time: for models that are too large,
not for speed. accelerate moves the activations, and fetches layers from main memory or from the
model's files when it is their turn.
"""

import logging
from collections import Counter
from typing import Any, ClassVar

import psutil
import torch

from batchery.device_names import main_device
from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.hardware.devices import device_named
from batchery_worker.models.split import Whole, limit_memory, memory_share

logger = logging.getLogger(__name__)

#: Share of the free memory that weights may take: passes need the rest.
WEIGHTS_SHARE = 0.8

#: What a map calls the places of layers -> what people do.
PLACES = {"cpu": "main memory", "disk": "the model's files"}


class Layers(Whole):
    """The layers of a model, each where there was room."""

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
        share = memory_share(self.device)
        limit_memory(part, share)
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

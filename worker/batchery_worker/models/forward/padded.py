"""The forward pass that suits any model: a row for each text, padded to the longest."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.forward.pooling import pool
from batchery_worker.models.hardware.transfers import HostToDevice
from batchery_worker.models.loading.tokenizer import Prepared


class Padded:
    """Runs a transformers model on texts that are padded to the longest of a micro-batch."""

    name = "padded"
    pads = True

    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        padding: Mapping[str, int],
        side: str,
        to_device: HostToDevice | None = None,
    ) -> None:
        """Prepares the pass.

        Args:
            model: Loaded, on the device.
            device: Where it is.
            padding: Padding of each input, by name, in the order of a tokenized text's rows.
            side: `left` or `right`.
            to_device: Transfers to share with another pass.
        """
        self._model = model
        self._device = device
        self._padding = padding
        self._side = side
        self._to_device = to_device or HostToDevice(device)

    def vectors(self, batch: Sequence[Prepared], pooling: str) -> Tensor:
        """Pooled token vectors, (B, D) float32, in batch order."""
        inputs = self._inputs(batch)
        return pool(self._model(**inputs).last_hidden_state, inputs["attention_mask"], pooling)

    def logits(self, batch: Sequence[Prepared]) -> Tensor:
        """What the model's head says, (B, C) float32, in batch order."""
        logits: Tensor = self._model(**self._inputs(batch)).logits
        return logits.float()

    def tokens(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Vectors of the tokens of each text, (L, D) each, before any head, in batch order."""
        inputs = self._inputs(batch)
        hidden = self._model.base_model(**inputs).last_hidden_state
        kept = inputs["attention_mask"].bool()
        return [row[mask] for row, mask in zip(hidden, kept, strict=True)]

    def _inputs(self, batch: Sequence[Prepared]) -> dict[str, Tensor]:
        """Model inputs, each (B, L) int64, on the device."""
        return self._named(self._send(batch))

    def _named(self, grid: Tensor) -> dict[str, Tensor]:
        return dict(zip([*self._padding, "attention_mask"], grid, strict=True))

    def _send(self, batch: Sequence[Prepared], least: int = 0) -> Tensor:
        return self._to_device.send(self._grid(batch, least))

    def _grid(self, batch: Sequence[Prepared], least: int = 0) -> NDArray[np.int64]:
        """The inputs and the mask of a batch, (I + 1, B, L), in one piece; L is `least` or more."""
        lengths = np.array([prepared.shape[1] for prepared in batch])[:, None]
        longest = max(least, lengths.max())
        places = np.arange(longest)
        mask = places < lengths if self._side == "right" else places >= longest - lengths
        grid = np.empty((len(self._padding) + 1, *mask.shape), dtype=np.int64)
        grid[:-1] = np.array([*self._padding.values()])[:, None, None]
        grid[:-1, mask] = np.concatenate(batch, axis=1)
        grid[-1] = mask
        return grid

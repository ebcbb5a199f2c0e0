"""The forward pass that suits any model: a row for each text, padded to the longest.

The host must not wait for the device in a pass, so it is tried which masks a model takes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.forward import Reading
from batchery_worker.models.hardware.transfers import HostToDevice
from batchery_worker.models.tokenizer import Prepared


class MaskForms(NamedTuple):
    """Which masks a model takes besides one of the tokens, (B, L).

    From that one, transformers makes its own on the device, and looks there whether it masks
    anything: the host waits for all passes before. `find_masks` finds out what a model takes.

    Attributes:
        none: No mask, where nothing is padded.
        ready: The mask of the attention, (B, 1, 1, L) bool.
    """

    none: bool = False
    ready: bool = False


class Padded:
    """Runs a transformers model on texts that are padded to the longest of a micro-batch."""

    name = "padded"
    pads = True

    def __init__(
        self, model: Any, device: torch.device, *, padding: Mapping[str, int], side: str
    ) -> None:
        """Prepares the pass.

        Args:
            model: Loaded, on the device.
            device: Where it is.
            padding: Padding of each input, by name, in the order of a tokenized text's rows.
            side: `left` or `right`.
        """
        #: Those that the model takes.
        self.masks = MaskForms()
        self.device = device
        self._model = model
        self._padding = padding
        self._side = side
        self._to_device = HostToDevice(device)

    @property
    def names(self) -> Sequence[str]:
        """Inputs that a tokenized text has, token ids first."""
        return list(self._padding)

    def values(self, batch: Sequence[Prepared], reading: Reading) -> Tensor:
        """Runs the model on a batch; returns what is read of its output."""
        inputs, mask = self._inputs(batch)
        output = self._model(**inputs)
        if callable(reading):
            # The inputs stay as they are: a graph has them for all its batches.
            return reading(output, {"input_ids": inputs["input_ids"], "attention_mask": mask})
        if reading == "token_vectors":
            return self._without_padding(output.last_hidden_state, batch)
        logits: Tensor = output.logits
        if reading == "token_logits":
            return self._without_padding(logits, batch)
        return logits.float()

    def tokens(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Vectors of the tokens of each text, (L, D) each, before any head, in batch order."""
        inputs, mask = self._inputs(batch)
        hidden = self._model.base_model(**inputs).last_hidden_state
        return [row[kept] for row, kept in zip(hidden, mask.bool(), strict=True)]

    def _without_padding(self, grid: Tensor, batch: Sequence[Prepared]) -> Tensor:
        """The rows of the tokens, (T, ...) float32, from those of a padded batch, (B, L, ...)."""
        # The host knows where the padding is. If the device looked for it, the host would wait.
        places = np.flatnonzero(self._mask(batch, grid.shape[1]))
        return grid.flatten(0, 1)[self._to_device.send(places)].float()

    def _inputs(self, batch: Sequence[Prepared]) -> tuple[dict[str, Tensor | None], Tensor]:
        """Model inputs, and which tokens are no padding; each (B, L) int64, on the device."""
        grid = self._send(batch)
        lengths = {prepared.shape[1] for prepared in batch}
        return self._named(grid, is_full=len(lengths) == 1), grid[-1]

    def _named(self, grid: Tensor, *, is_full: bool) -> dict[str, Tensor | None]:
        inputs: dict[str, Tensor | None] = dict(zip(self._padding, grid, strict=False))
        mask = grid[-1]
        if is_full and self.masks.none:
            inputs["attention_mask"] = None
        else:
            inputs["attention_mask"] = mask.bool()[:, None, None] if self.masks.ready else mask
        return inputs

    def _send(self, batch: Sequence[Prepared], least: int = 0) -> Tensor:
        return self._to_device.send(self._grid(batch, least))

    def _grid(self, batch: Sequence[Prepared], least: int = 0) -> NDArray[np.int64]:
        """The inputs and the mask of a batch, (I + 1, B, L), in one piece; L is `least` or more."""
        mask = self._mask(batch, max(least, *(prepared.shape[1] for prepared in batch)))
        grid = np.empty((len(self._padding) + 1, *mask.shape), dtype=np.int64)
        grid[:-1] = np.array([*self._padding.values()])[:, None, None]
        grid[:-1, mask] = np.concatenate(batch, axis=1)
        grid[-1] = mask
        return grid

    def _mask(self, batch: Sequence[Prepared], longest: int) -> NDArray[np.bool_]:
        """Which places of a padded batch hold tokens, (B, L), for L = `longest`."""
        lengths = np.array([prepared.shape[1] for prepared in batch])[:, None]
        places = np.arange(longest)
        mask: NDArray[np.bool_] = (
            places < lengths if self._side == "right" else places >= longest - lengths
        )
        return mask

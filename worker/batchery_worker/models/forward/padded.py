"""The forward pass that suits any model: a row for each text, padded to the longest.

The host must not wait for the device in a pass, so it is tried which masks a model takes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.forward import Forward, RandomTexts, Reading, worst_difference
from batchery_worker.models.hardware.transfers import HostToDevice
from batchery_worker.models.tokenizer import Prepared

#: Lengths of the texts of the check, in tokens, where the longest is at most so long.
LENGTHS = (48, 5, 1, 31)

#: What the config of a model with sliding windows calls them. A window would be lost with a mask
#: that is ready, and only a text that is longer than the window would show it.
WINDOWS = ("sliding_window", "local_attention", "attention_window", "attention_chunk_size")


class MaskForms(NamedTuple):
    """Which masks a model takes besides one of the tokens, (B, L).

    From that one, transformers makes its own on the device, and looks there whether it masks
    anything: the host waits for all passes before. `mask_forms` finds out what a model takes.

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
        self,
        model: Any,
        device: torch.device,
        *,
        padding: Mapping[str, int],
        side: str,
        to_device: HostToDevice | None = None,
        masks: MaskForms = MaskForms(),  # noqa: B008 (a constant)
    ) -> None:
        """Prepares the pass.

        Args:
            model: Loaded, on the device.
            device: Where it is.
            padding: Padding of each input, by name, in the order of a tokenized text's rows.
            side: `left` or `right`.
            to_device: Transfers to share with another pass.
            masks: What the model takes.
        """
        self.masks = masks
        self._model = model
        self._device = device
        self._padding = padding
        self._side = side
        self._to_device = to_device or HostToDevice(device)

    def with_masks(self, masks: MaskForms) -> "Padded":
        """The same pass with other masks."""
        return Padded(
            self._model,
            self._device,
            padding=self._padding,
            side=self._side,
            to_device=self._to_device,
            masks=masks,
        )

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


def mask_forms(
    model: Any,
    padded: Padded,
    values: Callable[[Forward, Sequence[Prepared]], Sequence[Tensor]],
    texts: RandomTexts,
    max_length: int | None,
    tolerance: float,
) -> MaskForms:
    """Finds out which masks give the same results as the model's own.

    Args:
        model: Loaded.
        padded: Its padded forward pass, with no such mask yet.
        values: What the model's kind makes of each text of a batch.
        texts: Makes the texts of the check.
        max_length: Maximum length of a text in tokens; None if unlimited.
        tolerance: Maximum difference of the results, relative to their size.
    """
    config = model.config
    lengths = [min(length, max_length or length) for length in LENGTHS]
    uneven, even = texts(lengths), texts([lengths[0]] * 2)

    def is_same(masks: MaskForms, batch: Sequence[Prepared]) -> bool:
        changed = padded.with_masks(masks)
        try:
            for results in (Padded.tokens, values):
                difference = worst_difference(results(changed, batch), results(padded, batch))
                if not difference <= tolerance:
                    return False
        except Exception:  # noqa: BLE001 (the code of any model)
            return False
        return True

    with torch.inference_mode():
        ready = config._attn_implementation == "sdpa" and not any(
            getattr(config, name, None) for name in WINDOWS
        )
        return MaskForms(
            none=is_same(MaskForms(none=True), even),
            ready=ready and is_same(MaskForms(ready=True), uneven),
        )

"""The forward pass that suits any model: texts below each other, filled up to the longest."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from batchery_worker.models.pooling import pool
from batchery_worker.models.staging import Staging

#: One tokenized text: model inputs by name, each (L,) int64.
Prepared = dict[str, Tensor]


class Padded:
    """Runs a transformers model on texts that are padded to the longest of a micro-batch."""

    name = "padded"
    pads = True

    def __init__(
        self, model: Any, device: torch.device, *, padding: Mapping[str, int], side: str
    ) -> None:
        """Prepares it.

        Args:
            model: Loaded, on the device.
            device: Where it is.
            padding: What to pad each input with, by name.
            side: `left` or `right`.
        """
        self._model = model
        self._padding = padding
        self._side = side
        self._staging = Staging(device)

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
        inputs = {
            name: self._pad([prepared[name] for prepared in batch], self._padding[name])
            for name in batch[0]
        }
        ones = [torch.ones_like(prepared["input_ids"]) for prepared in batch]
        inputs["attention_mask"] = self._pad(ones, 0)
        return self._staging.send(inputs)

    def _pad(self, rows: list[Tensor], value: int) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=self._side)

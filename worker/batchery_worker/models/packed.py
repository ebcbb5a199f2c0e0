"""The forward pass without padding: the texts of a micro-batch behind each other, in one row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from batchery_worker.models.attention import NAME, Row, register, row_of_texts
from batchery_worker.models.padded import Prepared
from batchery_worker.models.pooling import pool_row
from batchery_worker.models.staging import Staging


class Packed:
    """Runs a transformers model on one row of texts, whose positions begin anew with each of them.

    All layers but the attention work on tokens, and need not know of texts; the attention is ours.
    Whether that is all that a model does is for `choice.py` to find out.
    """

    name = "packed"
    pads = False

    def __init__(
        self, model: Any, device: torch.device, *, padding_position: int | None, varlen: bool
    ) -> None:
        """Prepares it.

        Args:
            model: Loaded, on the device.
            device: Where it is.
            padding_position: In the table of positions, the one that stands for padding, behind
                which a text begins; None where texts begin at 0.
            varlen: Use CUDA's kernel for rows of texts.
        """
        self._model = model
        self._device = device
        self._padding_position = padding_position
        self._varlen = varlen
        self._staging = Staging(device)
        # Left out, they come from a list of zeros that is as long as one text may be. GPT-2 takes
        # them, too, but has no table of its own for them, and zero would be a word.
        self._has_types = any(
            name.endswith("token_type_embeddings") for name, _ in model.named_modules()
        )
        #: Where the texts of the last forward pass were, and what was asked of the attention.
        self.last = Row(())

    def vectors(self, batch: Sequence[Prepared], pooling: str) -> Tensor:
        """Pooled token vectors, (B, D) float32, in batch order."""
        with self._row(batch) as (inputs, ends):
            hidden = self._model(**inputs).last_hidden_state
        return pool_row(hidden[0], ends, pooling)

    def logits(self, batch: Sequence[Prepared]) -> Tensor:
        """What the model's head says, (B, C) float32, in batch order.

        Heads read the first token of each row. So that a head sees a row for each text, the last
        layer's output is replaced by the first tokens of the texts before it gets there.
        """
        with self._row(batch) as (inputs, ends):
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])

            def first_tokens(_: Any, __: Any, output: Any) -> Any:
                output.last_hidden_state = output.last_hidden_state[0, starts].unsqueeze(1)
                return output

            base = self._model.base_model
            # Where there is a pooler, it comes behind the encoder and is part of the head.
            hook = getattr(base, "encoder", base).register_forward_hook(first_tokens)
            try:
                logits: Tensor = self._model(**inputs).logits
            finally:
                hook.remove()
        return logits.float()

    def tokens(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Vectors of the tokens of each text, (L, D) each, before any head, in batch order."""
        with self._row(batch) as (inputs, _):
            hidden = self._model.base_model(**inputs).last_hidden_state[0]
        return list(hidden.split([len(prepared["input_ids"]) for prepared in batch]))

    def install(self) -> None:
        """Gives the model this attention; from now on it computes rows of texts and nothing else.

        Raises:
            ValueError: transformers will not have it.
        """
        register()
        self._model.set_attn_implementation(NAME)

    @contextmanager
    def _row(self, batch: Sequence[Prepared]) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Model inputs, each (1, T), and the end of each text, (B,), all int64 on the device."""
        lengths = [len(prepared["input_ids"]) for prepared in batch]
        inputs = {
            name: torch.cat([prepared[name] for prepared in batch]).unsqueeze(0)
            for name in batch[0]
        }
        if self._has_types and "token_type_ids" not in inputs:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        places = [self._positions(prepared["input_ids"]) for prepared in batch]
        inputs["position_ids"] = torch.cat(places).unsqueeze(0)
        inputs = self._staging.send({**inputs, "ends": torch.tensor([0, *accumulate(lengths)])})
        ends = inputs.pop("ends")
        self.last = Row(lengths, ends.to(torch.int32) if self._varlen else None)
        with row_of_texts(self.last):
            yield inputs, ends[1:]

    def _positions(self, ids: Tensor) -> Tensor:
        """Positions of a text's tokens, (L,), as the model counts them in a row of its own."""
        if self._padding_position is None:
            return torch.arange(len(ids))
        # RoBERTa's family leaves out the padding token, which a text may spell.
        counted = (ids != self._padding_position).long()
        return counted.cumsum(0) * counted + self._padding_position

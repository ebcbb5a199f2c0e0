"""The forward pass without padding: the texts of a micro-batch follow each other in one row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.forward import Reading
from batchery_worker.models.forward.attention import (
    NAME,
    Row,
    register,
    row_of_texts,
    row_of_this_pass,
)
from batchery_worker.models.hardware.transfers import HostToDevice
from batchery_worker.models.text_length import padding_position
from batchery_worker.models.tokenizer import Prepared


class Packed:
    """Runs a transformers model on one row of texts; positions start again with each text.

    All layers except attention work on single tokens, and need not know of texts. The attention is
    ours. `selection.py` checks whether that holds for a model.
    """

    name = "packed"
    pads = False

    def __init__(self, model: Any, device: torch.device, names: Sequence[str]) -> None:
        """Installs nothing yet.

        Args:
            model: Loaded, on the device.
            device: Where it is.
            names: Inputs that a tokenized text has, token ids first.
        """
        self._model = model
        self._names = list(names)
        #: Position of padding in the table of positions; texts start behind it.
        self._padding_position = padding_position(model)
        self._has_kernel = device.type == "cuda"
        self._to_device = HostToDevice(device)
        # Without this input, transformers takes zeros for one text only, which is too short for a
        # row. GPT-2 takes it, too, but reads it as words.
        self._has_types = any(
            name.endswith("token_type_embeddings") for name, _ in model.named_modules()
        )
        self._is_watched = False
        #: The row of the last forward pass, and how the attention was called.
        self.last = Row(())
        #: Maximum difference that the check of `selection.py` has found.
        self.worst = 0.0
        #: Whether the head is known to read first tokens.
        self.is_proven = False

    def values(self, batch: Sequence[Prepared], reading: Reading) -> Tensor:
        """Runs the model on a batch; returns what is read of its output."""
        with self._row(batch) as (inputs, starts, ends):
            if reading == "logits":
                self._keep_first_tokens(starts)
            output = self._model(**inputs)
        if callable(reading):
            lengths = [prepared.shape[1] for prepared in batch]
            # With the number of tokens the host need not wait for the device.
            place = torch.repeat_interleave(
                torch.arange(len(batch), device=ends.device), ends.diff(), output_size=sum(lengths)
            )
            features = {"input_ids": inputs["input_ids"], "cu_seq_lens_q": ends}
            return reading(output, {**features, "seq_idx": place[None], "lengths": lengths})
        if reading == "token_vectors":
            return cast(Tensor, output.last_hidden_state[0].float())
        logits: Tensor = output.logits if reading == "logits" else output.logits[0]
        return logits.float()

    def tokens(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Vectors of the tokens of each text, (L, D) each, before any head, in batch order."""
        with self._row(batch) as (inputs, _, _):
            hidden = self._model.base_model(**inputs).last_hidden_state[0]
        return list(hidden.split([prepared.shape[1] for prepared in batch]))

    def install(self) -> None:
        """Gives the model this attention; from then on it computes only rows of texts.

        Raises:
            ValueError: transformers refuses it.
        """
        register()
        self._model.set_attn_implementation(NAME)

    def _keep_first_tokens(self, starts: Tensor) -> None:
        """Gives the model's head what it reads: the first token of each text, as if in its own row.

        They replace the output of the last layer. A head that reads another token would look beyond
        them, which ends CUDA's context. So until the head is proven, each comes as often as there
        are tokens.
        """
        if not self._is_watched:
            base = self._model.base_model
            # A pooler comes behind the encoder and is part of the head.
            getattr(base, "encoder", base).register_forward_hook(_first_tokens)
            self._is_watched = True
        row = row_of_this_pass()
        assert row is not None
        row.starts = starts
        row.repeats = 1 if self.is_proven else sum(row.lengths)

    @contextmanager
    def _row(self, batch: Sequence[Prepared]) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
        """Model inputs, (1, T); where the texts begin, (B,); their ends behind a 0, (B + 1,)."""
        lengths = [prepared.shape[1] for prepared in batch]
        texts, names = len(batch), [*self._names, "position_ids"]
        ends = np.zeros(texts + 1, dtype=np.int64)
        np.cumsum(lengths, out=ends[1:])
        tokens = int(ends[-1])
        # All in one piece, for one copy. The kernel's ends are half as wide as the rest.
        sizes = [len(names) * tokens, texts, texts // 2 + 1]
        numbers = np.empty(sum(sizes), dtype=np.int64)
        rows = numbers[: sizes[0]].reshape(len(names), tokens)
        np.concatenate(batch, axis=1, out=rows[:-1])
        rows[-1] = self._positions(rows[0], ends)
        numbers[sizes[0] : sizes[0] + texts] = ends[:-1]
        numbers[-sizes[-1] :].view(np.int32)[: texts + 1] = ends
        sent = self._to_device.send(numbers)
        inputs_there, starts, ends_there = torch.split(sent, sizes)
        ends_there = ends_there.view(torch.int32)[: texts + 1]
        inputs = dict(zip(names, inputs_there.view(len(names), 1, tokens), strict=True))
        if self._has_types and "token_type_ids" not in inputs:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        # Other passes may run at the same time.
        self.last = row = Row(lengths, ends_there if self._has_kernel else None)
        with row_of_texts(row):
            yield inputs, starts, ends_there

    def _positions(self, ids: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of all tokens, (T,), as the model counts them in a row for each text."""
        lengths = np.diff(ends)
        if self._padding_position is None:
            return np.arange(len(ids)) - np.repeat(ends[:-1], lengths)
        # RoBERTa's family skips padding tokens, and a text may contain them.
        counted = ids != self._padding_position
        seen = np.concatenate([[0], np.cumsum(counted)])
        within = seen[1:] - np.repeat(seen[ends[:-1]], lengths)
        positions: NDArray[np.int64] = within * counted + self._padding_position
        return positions


def _first_tokens(_: Any, __: Any, output: Any) -> Any:
    """Keeps of an encoder's output what a head reads, if a head follows."""
    row = row_of_this_pass()
    if row is not None and row.starts is not None:
        first = output.last_hidden_state[0, row.starts].unsqueeze(1)
        output.last_hidden_state = first.expand(-1, row.repeats, -1)
    return output

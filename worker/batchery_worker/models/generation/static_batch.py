"""Batches of models whose prompts are read by an encoder, with the methods of `PagedBatch`.

Their decoders count positions from the beginning, for all rows alike. So a text cannot join those
that are written already: all that have come while a batch runs are the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from batchery_worker.models.generation.rules import start_token
from batchery_worker.models.generation.texts import Prompt

#: What remains of the size of batches where memory ran out.
SHRINK = 0.7


@dataclass(slots=True)
class StaticText:
    """A text in a batch.

    Attributes:
        name: That no text had before.
        prompt: What it answers.
        tokens: What the decoder reads: first that which begins every text, then what was written.
        is_dropped: Whether nobody wants it any more.
    """

    name: str
    prompt: Prompt
    tokens: list[int]
    is_dropped: bool = False


class StaticBatch:
    """Texts that have begun together; one leaves when it ends, and the next ones wait for all.

    Attributes:
        capacity: Maximum tokens of one text; no limit.
    """

    capacity = torch.iinfo(torch.int64).max

    _cache: Any
    _encoded: Tensor
    _mask: Tensor

    def __init__(self, model: Any, texts: int) -> None:
        """Takes a model.

        Args:
            model: Of transformers, on its device.
            texts: Maximum number of texts in a batch.

        Raises:
            ValueError: It does not say with which token texts begin.
        """
        self._model = model
        self._texts = texts
        self._start = start_token(model)
        self.build()

    @property
    def size(self) -> str:
        """For people."""
        return f"batches of {self._texts} texts"

    def build(self) -> None:
        """Forgets all texts."""
        self._waiting: dict[str, StaticText] = {}
        self._running: list[StaticText] = []
        self._chosen: list[StaticText] = []
        self._cache = None
        self._length = 0

    def add(self, name: str, prompt: Prompt, written: Sequence[int] = ()) -> None:
        """Takes a text in, which is part of the next batch.

        Args:
            name: That no text had before.
            prompt: What it answers.
            written: Its tokens so far.
        """
        self._waiting[name] = StaticText(name, prompt, [self._start, *written])

    def drop(self, name: str) -> None:
        """Frees what a text holds, by the next step."""
        self._waiting.pop(name, None)
        for text in self._running:
            text.is_dropped |= text.name == name

    @torch.no_grad()
    def forward(self) -> tuple[list[str], Tensor]:
        """Computes a step; see `PagedBatch.forward`."""
        self._free_dropped()
        if not self._running and not self._waiting:
            return [], torch.empty(0)
        end = self._length + 1
        if not self._running:
            self._read()
            # A text that goes on has its tokens read again, with those of its neighbours.
            end = min(len(text.tokens) for text in self._running)
        fed = [text.tokens[self._length : end] for text in self._running]
        outputs = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
            attention_mask=self._mask,
            decoder_input_ids=torch.tensor(fed, device=self._mask.device),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache, self._length = outputs.past_key_values, end
        places = [at for at, text in enumerate(self._running) if len(text.tokens) == end]
        self._chosen = [self._running[at] for at in places]
        logits = outputs.logits[places, -1].float()
        return [text.name for text in self._chosen], logits

    def _free_dropped(self) -> None:
        kept = [at for at, text in enumerate(self._running) if not text.is_dropped]
        if len(kept) == len(self._running):
            return
        self._running = [self._running[at] for at in kept]
        if not kept:
            self._cache = None
            return
        self._encoded, self._mask = self._encoded[kept], self._mask[kept]
        self._cache.batch_select_indices(torch.tensor(kept, device=self._mask.device))

    def _read(self) -> None:
        """Makes those that wait the next batch, and reads their prompts."""
        names = list(self._waiting)[: self._texts]
        self._running = [self._waiting.pop(name) for name in names]
        self._length = 0
        prompts = [text.prompt.tokens for text in self._running]
        longest = max(map(len, prompts))
        padding = self._model.config.pad_token_id or 0
        rows = [each + [padding] * (longest - len(each)) for each in prompts]
        device = self._model.device
        lengths = torch.tensor([len(each) for each in prompts], device=device)
        self._mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
        inputs = torch.tensor(rows, device=device)
        encoded = self._model.get_encoder()(input_ids=inputs, attention_mask=self._mask)
        self._encoded = encoded.last_hidden_state

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that were chosen after a step, in its order."""
        for text, token in zip(self._chosen, tokens, strict=True):
            text.tokens.append(token)
        self._chosen = []

    def shrink(self, _: int) -> bool:
        """Makes batches smaller; all texts must be added again.

        Returns:
            Whether they could be made smaller.
        """
        self.build()
        before, self._texts = self._texts, max(1, int(self._texts * SHRINK))
        return self._texts < before

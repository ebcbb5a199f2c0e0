"""Attention over texts that stand one behind the other, with no padding between them."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

#: By which a model asks for it.
NAME = "offline_packed"


@dataclass(slots=True)
class Layout:
    """Where the texts of the batch stand that is computed now."""

    #: (N + 1,) int32, where each text begins and the last one ends, on the device.
    offsets: Tensor
    lengths: Sequence[int]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Start, count and length of neighbours of the same length: one call each."""
        start = 0
        for length, group in groupby(self.lengths):
            count = len(list(group))
            yield start, count, length
            start += count * length


class PackedAttention(threading.local):
    """Attention as transformers calls it, within each text alone."""

    #: Of the batch that this thread computes now; the model asks for it in every layer.
    layout: Layout

    def __call__(
        self, _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Attends; each of (1, H, T, D), for T tokens of all texts. Returns (1, T, H, D)."""
        scale = options.get("scaling")
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            from torch.nn.attention.varlen import varlen_attn

            offsets, longest = self.layout.offsets, max(self.layout.lengths)
            mixed: Any = varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale)
            return mixed[None], None
        return torch.cat(list(self._blocks((q, k, v), scale)))[None], None

    def _blocks(self, rows: Sequence[Tensor], scale: float | None) -> Iterator[Tensor]:
        for start, count, length in self.layout.runs():
            q, k, v = (
                each[start : start + count * length]
                .reshape(count, length, *each.shape[1:])
                .transpose(1, 2)
                for each in rows
            )
            block = scaled_dot_product_attention(q, k, v, scale=scale)
            yield block.transpose(1, 2).flatten(0, 1)


attention = PackedAttention()
AttentionInterface.register(NAME, attention)

"""Attention for texts that lie behind each other in one row: each of them sees itself alone.

transformers lets a model's attention be replaced by name. Ours asks `row_of_texts` where the texts
are, so that nothing needs to be handed through the code of each model.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

#: What transformers knows this attention by. No mask belongs to the name, so models make none.
NAME = "batchery_texts_in_a_row"

#: Arguments of other attentions that change the result, and that this one does not know.
FOREIGN = ("position_bias", "softcap", "s_aux", "head_mask", "cache")

#: CUDA's kernel for rows of texts computes in nothing wider.
HALF = (torch.float16, torch.bfloat16)


class NotPackable(Exception):
    """A model asks for an attention that cannot be computed for texts in a row; says which."""


class Run(NamedTuple):
    """Neighbours of one length, which share one call of the attention."""

    texts: int
    length: int


@dataclass
class Row:
    """Where the texts of a row are.

    Attributes:
        lengths: Tokens of each text, in order.
        ends: For CUDA's kernel: 0, then the end of each text, (B + 1,) int32, on the device.
        starts: For a head behind the encoder, which reads nothing else: where the texts begin,
            (B,) int64, on the device.
        calls: How often the attention was asked, so that a model that never asks is found out.
        windows: Widths of the sliding windows that it was asked for, in tokens.
    """

    lengths: Sequence[int]
    ends: Tensor | None = None
    starts: Tensor | None = None
    calls: int = 0
    windows: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        groups = groupby(self.lengths)
        self.runs = [Run(len(list(group)), length) for length, group in groups]
        #: Tokens of each run.
        self.sizes = [run.texts * run.length for run in self.runs]


class Shape(NamedTuple):
    """What a layer wants: scale of the scores, and which tokens see which.

    Attributes:
        scale: Of the scores; None for one by the square root of the width of a head.
        causal: A token sees only those before it, and itself.
        window: A token sees only those less than so many tokens away; None for all.
    """

    scale: float | None
    causal: bool
    window: int | None


_ROW: ContextVar[Row] = ContextVar("row_of_texts")


@contextmanager
def row_of_texts(row: Row) -> Iterator[Row]:
    """Within it, the attention takes its one row for these texts."""
    token = _ROW.set(row)
    try:
        yield row
    finally:
        _ROW.reset(token)


def row_of_this_pass() -> Row | None:
    """What `row_of_texts` was given; None outside it."""
    return _ROW.get(None)


def register() -> None:
    """Makes this attention known to transformers; may be called again."""
    AttentionInterface.register(NAME, attention)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers' own functions do, for the texts of `row_of_texts`.

    Args:
        module: The layer that asks.
        query: (1, H, T, D) for T tokens in all.
        key: (1, H or fewer, T, D).
        value: As `key`.
        attention_mask: None, as no mask could tell more than the row does.
        scaling: Of the scores.
        is_causal: Where unset, the layer is asked, and true if it does not say.
        sliding_window: As in `Shape`.
        others: What other attentions might want.

    Returns:
        (1, T, H, D), and None in the place of the weights.

    Raises:
        NotPackable: Says what is wanted that this attention cannot do.
    """
    row = _ROW.get()
    row.calls += 1
    foreign = [name for name in FOREIGN if others.get(name) is not None]
    if attention_mask is not None:
        foreign.append("a mask of its own")
    if foreign:
        raise NotPackable(f"its attention needs {' and '.join(foreign)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None:
        row.windows.add(sliding_window)
    shape = Shape(scaling, bool(causal), sliding_window)
    kernel = _text_by_text if row.ends is None else _varlen
    return kernel(query, key, value, row, shape), None


def _text_by_text(query: Tensor, key: Tensor, value: Tensor, row: Row, shape: Shape) -> Tensor:
    """One call for each run of texts of one length; as `attention`."""
    # Split at once and put together at once: slices, one by one, cost a tenth of the attention.
    split = (torch.split(tensor, row.sizes, dim=2) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for (texts, length), *run in zip(row.runs, *split, strict=True):
        if texts > 1:
            run = [tensor[0].unflatten(1, (texts, length)).transpose(0, 1) for tensor in run]
        queries, keys, values = run
        narrow = shape.window is not None and length > shape.window
        seen = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=_band(length, shape).to(query.device) if narrow else None,
            is_causal=shape.causal and not narrow,
            scale=shape.scale,
            enable_gqa=grouped,
        )
        # Tokens before heads, as what comes next wants them.
        parts.append(seen.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0)


def _band(length: int, shape: Shape) -> Tensor:
    """Which tokens see which where a sliding window is narrower than the text, (L, L) bool."""
    places = torch.arange(length)
    behind = places[:, None] - places[None, :]
    # Both ways the window counts the token itself.
    seen = behind.abs() < (shape.window or length)
    return seen & (behind >= 0) if shape.causal else seen


def _varlen(query: Tensor, key: Tensor, value: Tensor, row: Row, shape: Shape) -> Tensor:
    """One call for all texts, by CUDA's kernel for rows of them; as `attention`."""
    kernel = varlen_kernel()
    assert kernel is not None
    assert row.ends is not None
    reach = -1 if shape.window is None else shape.window - 1
    longest = max(row.lengths)
    out: Tensor = kernel(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        row.ends,
        row.ends,
        longest,
        longest,
        scale=shape.scale,
        window_size=(reach, 0 if shape.causal else reach),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.unsqueeze(0)


def varlen_kernel() -> Callable[..., Any] | None:
    """The attention for rows of texts, if this torch has one, and not one of the first."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # The first releases had neither scale nor window.
    known: Mapping[str, Any] = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None

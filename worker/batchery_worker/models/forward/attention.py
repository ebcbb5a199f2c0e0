"""Attention for texts that follow each other in one row: each text sees itself alone.

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

#: The name of this attention in transformers. No mask belongs to the name, so models make none.
NAME = "batchery_texts_in_a_row"

#: Arguments of other attentions that change the result. This one does not support them.
FOREIGN = ("position_bias", "softcap", "s_aux", "head_mask", "cache")

#: CUDA's kernel for rows of texts computes in nothing wider.
HALF = (torch.float16, torch.bfloat16)


class NotPackable(Exception):
    """A model asks for an attention that cannot be computed for texts in a row; says which."""


class LengthGroup(NamedTuple):
    """Neighbours of one length, which share one call of the attention."""

    texts: int
    length: int


@dataclass
class Row:
    """Where the texts of a row are.

    Attributes:
        lengths: Tokens of each text, in order.
        ends: For CUDA's kernel: 0, then the end of each text, (B + 1,) int32, on the device.
        starts: Where the texts begin, (B,) int64, on the device, for heads that read only first
            tokens.
        calls: How often the attention was called. A model that never calls it cannot be packed.
        windows: Widths of the sliding windows that it was asked for, in tokens.
    """

    lengths: Sequence[int]
    ends: Tensor | None = None
    starts: Tensor | None = None
    calls: int = 0
    windows: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        #: The texts, by neighbours of one length.
        self.groups = [
            LengthGroup(len(list(texts)), length) for length, texts in groupby(self.lengths)
        ]
        #: Tokens of each group.
        self.sizes = [group.texts * group.length for group in self.groups]


class Options(NamedTuple):
    """What a layer asks for: the scale of the scores, and which tokens see which.

    Attributes:
        scale: Factor of the scores; None for 1 / sqrt(width of a head).
        causal: A token sees only itself and earlier tokens.
        window: A token sees only tokens that are less than so many places away; None for all.
    """

    scale: float | None
    causal: bool
    window: int | None


_ROW: ContextVar[Row] = ContextVar("row_of_texts")


@contextmanager
def row_of_texts(row: Row) -> Iterator[Row]:
    """Inside the context, the attention takes its one row for these texts."""
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
        attention_mask: None: the row says which tokens see which.
        scaling: Factor of the scores.
        is_causal: If unset, the layer decides; true if it does not say.
        sliding_window: The window of `Options`.
        others: Arguments for other attentions.

    Returns:
        (1, T, H, D), and None instead of weights.

    Raises:
        NotPackable: The layer asks for something that this attention cannot do.
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
    options = Options(scaling, bool(causal), sliding_window)
    kernel = _text_by_text if row.ends is None else _varlen
    return kernel(query, key, value, row, options), None


def _text_by_text(query: Tensor, key: Tensor, value: Tensor, row: Row, options: Options) -> Tensor:
    """`attention`, with one call for each group of texts of one length."""
    # Split once and joined once: single slices cost a tenth of the attention.
    split = (torch.split(tensor, row.sizes, dim=2) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for (texts, length), *part in zip(row.groups, *split, strict=True):
        if texts > 1:
            part = [tensor[0].unflatten(1, (texts, length)).transpose(0, 1) for tensor in part]
        queries, keys, values = part
        narrow = options.window is not None and length > options.window
        seen = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=_band(length, options).to(query.device) if narrow else None,
            is_causal=options.causal and not narrow,
            scale=options.scale,
            enable_gqa=grouped,
        )
        # The next operation expects tokens before heads.
        parts.append(seen.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).unsqueeze(0)


def _band(length: int, options: Options) -> Tensor:
    """Which tokens see which where a sliding window is narrower than the text, (L, L) bool."""
    places = torch.arange(length)
    behind = places[:, None] - places[None, :]
    # The window counts the token itself, in both directions.
    seen = behind.abs() < (options.window or length)
    return seen & (behind >= 0) if options.causal else seen


def _varlen(query: Tensor, key: Tensor, value: Tensor, row: Row, options: Options) -> Tensor:
    """`attention`, with one call for all texts, by CUDA's kernel for rows of texts."""
    kernel = varlen_kernel()
    assert kernel is not None
    assert row.ends is not None
    reach = -1 if options.window is None else options.window - 1
    longest = max(row.lengths)
    out: Tensor = kernel(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        row.ends,
        row.ends,
        longest,
        longest,
        scale=options.scale,
        window_size=(reach, 0 if options.causal else reach),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.unsqueeze(0)


def varlen_kernel() -> Callable[..., Any] | None:
    """The attention for rows of texts, if this torch has one that is recent enough."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # The first releases had neither scale nor window.
    known: Mapping[str, Any] = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None

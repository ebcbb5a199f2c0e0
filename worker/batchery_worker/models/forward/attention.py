"""Attention for texts that follow each other in one row: each text sees itself alone.

transformers lets a model's attention be replaced by name. Ours asks `row_of_texts` where the texts
are, so that nothing needs to be handed through the code of each model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

#: The name of this attention in transformers. No mask belongs to the name, so models make none.
NAME = "batchery_texts_in_a_row"

#: Arguments of other attentions that change the result. This one does not support them.
FOREIGN = frozenset(("position_bias", "softcap", "s_aux", "head_mask", "cache"))

#: CUDA's kernel for rows of texts computes in nothing wider.
HALF = (torch.float16, torch.bfloat16)


class NotPackable(Exception):
    """A model asks for an attention that cannot be computed for texts in a row; says which."""


@dataclass
class Row:
    """Where the texts of a row are.

    Attributes:
        lengths: Tokens of each text, in order.
        ends: For CUDA's kernel: 0, then the end of each text, (B + 1,) int32, on the device.
        starts: Where the texts begin, (B,) int64, on the device, for heads that read only first
            tokens; None if no head follows.
        repeats: How often such a head gets each first token.
        calls: How often the attention was called. A model that never calls it cannot be packed.
        windows: Widths of the sliding windows that it was asked for, in tokens.
    """

    lengths: Sequence[int]
    ends: Tensor | None = None
    starts: Tensor | None = None
    repeats: int = 1
    calls: int = 0
    windows: set[int] = field(default_factory=set)

    # Each is read in every layer of a pass, or in none.

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """Number and length of neighbours of one length, which share one call of the attention."""
        return [(len(list(texts)), length) for length, texts in groupby(self.lengths)]

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each group."""
        return [texts * length for texts, length in self.groups]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self.lengths)


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
    """
    row = _ROW.get()
    row.calls += 1
    check_options(attention_mask, others)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None:
        row.windows.add(sliding_window)
    options = Options(scaling, bool(causal), sliding_window)
    kernel = _text_by_text if row.ends is None else _varlen
    return kernel(query, key, value, row, options), None


def check_options(attention_mask: Tensor | None, others: Mapping[str, Any]) -> None:
    """Refuses what attention for texts in a row cannot do.

    Raises:
        NotPackable: A layer asks for it.
    """
    if attention_mask is None and FOREIGN.isdisjoint(others):
        return
    foreign = sorted(name for name in FOREIGN if others.get(name) is not None)
    if attention_mask is not None:
        foreign.append("a mask of its own")
    if foreign:
        raise NotPackable(f"its attention needs {' and '.join(foreign)}")


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
    window = (reach, 0 if options.causal else reach)
    return kernel(
        # Views of one row, with tokens before heads. An index would cost the host twice as much.
        query.select(0, 0).transpose(0, 1),
        key.select(0, 0).transpose(0, 1),
        value.select(0, 0).transpose(0, 1),
        row.ends,
        row.longest,
        options.scale,
        window,
    ).unsqueeze(0)


@cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """The attention for rows of texts, if this torch has one that is recent enough."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return None if operator is None else kernel_of_operator(operator.default)


def kernel_of_operator(operator: Any) -> Callable[..., Tensor] | None:
    """The kernel as torch's operator; None if this torch's operator has no window.

    It is below torch's public function, which in each layer runs a custom operator in Python and
    fills a tensor that only training needs, and which some versions hand to a much slower cuDNN.
    """
    known = {argument.name for argument in operator._schema.arguments}
    if not {"scale", "window_size_left", "window_size_right"} <= known:
        return None

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        longest: int,
        scale: float | None,
        window: tuple[int, int],
        keys: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """Attends, (T, H, D) from (T, H, D) and twice (T, H or fewer, D).

        Args:
            query: Of T tokens in all.
            key: Of the same tokens.
            value: As `key`.
            ends: As in `Row`.
            longest: Tokens of the longest text.
            scale: As in `Options`.
            window: How far a token sees to the left and to the right, in tokens; -1 for all.
            keys: Ends and longest text of the keys, where each text has more of them than queries:
                its queries are those of its last tokens.
        """
        no_dropout, no_debug_mask = 0.0, False
        is_causal = window == (-1, 0)
        key_ends, longest_key = keys or (ends, longest)
        out: Tensor = operator(
            *(query, key, value, ends, key_ends, longest, longest_key),
            *(no_dropout, is_causal, no_debug_mask),
            scale=scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )[0]
        return out

    return kernel

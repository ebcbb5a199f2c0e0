"""Attention over a paged cache by CUDA's kernel for rows of texts: each text sees itself alone.

transformers' own attention for such a cache, without other packages, has every token of a step look
at the keys of all texts, behind a mask: at 64 texts of 300 tokens that is nine tenths of a step.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION
from transformers.generation.continuous_batching.utils import find_head_dim

from batchery_worker.models.forward.attention import (
    HALF,
    NotPackable,
    check_options,
    varlen_kernel,
)

#: The names of this attention in transformers. The word `flash` in it says that no mask is needed.
#: By the second one, steps with one token for each text attend page by page, without copies.
NAME, BY_PAGE = "batchery_flash_pages", "batchery_flash_by_page"

#: What the kernel takes as width of a head, in numbers: a multiple of one, up to the other.
HEAD_STEP, MAX_HEAD = 8, 256

#: The name of transformers' attention over a cache for models that have only their own, and of ours
#: in its place, which calls their own: soft caps are there and not in transformers'.
EAGER, OWN_EAGER = "paged|eager", "batchery_own_eager"

#: Attentions over a cache -> the same without one.
PLAIN = {NAME: "sdpa", BY_PAGE: "sdpa", EAGER: "eager", OWN_EAGER: "eager"}


def attentions(model: Any, may_graph: bool) -> tuple[str, ...]:
    """The attentions to try for a model of transformers, on its device; fastest first.

    Args:
        model: Of transformers.
        may_graph: Its steps may be CUDA graphs: one process computes all of them, on one device,
            and nobody has said `never`.
    """
    usual: str = model.config._attn_implementation
    if not has_kernel(model) or model.config.is_encoder_decoder:
        return (usual,)
    width = find_head_dim(model.config.get_text_config())
    fits = width % HEAD_STEP == 0 and width <= MAX_HEAD
    if not fits or usual != "sdpa" or not model._supports_flash_attn:
        return (usual,)
    names = (
        (BY_PAGE, NAME)
        if may_graph and page_kernel() is not None and _has_no_window(model)
        else (NAME,)
    )
    for name in names:
        AttentionInterface.register(name, attention)
    return (*names, usual)


def attend_as_defined(model: Any) -> None:
    """Has a model that attends by transformers' paged attention call the one that defines it.

    The mask has been chosen by the name, so this must follow whatever looks at it.
    """
    if model.config._attn_implementation == EAGER and own_attention(model) is not None:
        AttentionInterface.register(OWN_EAGER, eager_attention)
        model.config._attn_implementation = OWN_EAGER


def own_attention(part: torch.nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The attention in the file that defines a model or a layer; None where there is none."""
    return getattr(sys.modules[type(part).__module__], "eager_attention_forward", None)


def eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Computes attention as the layer's own file does, over the keys and values of a cache.

    Args:
        module: The layer that asks.
        query: (1, H, T, D) for the T tokens of a step.
        key: (1, H or fewer, T, D).
        value: As `key`.
        attention_mask: Of T tokens to all that the cache has.
        cache: Keeps these keys and values, and has those of the tokens before.
        others: Arguments of that attention.

    Returns:
        (1, T, H, D), and the weights.
    """
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
    )
    attend = own_attention(module)
    assert attend is not None
    return attend(module, query, key, value, attention_mask, **others)


def has_kernel(model: Any) -> bool:
    """Whether CUDA's kernel takes what this model computes."""
    return model.device.type == "cuda" and model.dtype in HALF and varlen_kernel() is not None


@cache
def page_kernel() -> Callable[..., Tensor] | None:
    """The attention by the page, where Triton is, which comes with torch for CUDA."""
    try:
        from batchery_worker.models.generation.page_kernel import attend_pages
    except ImportError:
        return None
    return attend_pages


def _has_no_window(model: Any) -> bool:
    return group_layers_by_attn_type(model.config.get_text_config()).keys() == {FULL_ATTENTION}


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Inside the context, the model computes without a cache."""
    usual = model.config._attn_implementation
    # The method for it would look for a package by the name.
    model.config._attn_implementation = PLAIN.get(usual, usual)
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers' own functions do, for texts that have a cache.

    Args:
        module: The layer that asks.
        query: (1, H, T, D) for the T tokens of a step.
        key: (1, H or fewer, T, D).
        value: As `key`.
        attention_mask: None.
        cache: Keeps these keys and values, and has those of the tokens before.
        cu_seq_lens_q: 0, then the end of each text among the T tokens, (B + 1,) int32.
        max_length_q: Tokens of the longest of them.
        scaling: Factor of the scores.
        sliding_window: So many tokens are seen, the token itself counted; None for all before.
        others: What the cache needs, and arguments for other attentions.

    Returns:
        (1, T, H, D), and None instead of weights.

    Raises:
        NotPackable: The layer asks for something that this attention cannot do.
    """
    check_options(attention_mask, others)
    # It puts the ends of the keys, and the longest text, in place of those of all kinds of layers.
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others
    )
    queries, keys, values = (each.select(0, 0).transpose(0, 1) for each in (query, key, value))
    if others.get("block_table") is not None:
        if sliding_window is not None:
            raise NotPackable("a layer without a window in the model's configuration needs one")
        return _by_page(queries, keys, values, scaling, others).unsqueeze(0), None
    kernel = varlen_kernel()
    assert kernel is not None
    seen = kernel(
        *(queries, keys, values),
        ends=cu_seq_lens_q,
        longest=max_length_q,
        scale=scaling,
        window=(-1 if sliding_window is None else sliding_window - 1, 0),
        keys=(others["cu_seq_lens_k"], others["max_length_k"]),
    )
    return seen.unsqueeze(0), None


def _by_page(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, found: Mapping[str, Any]
) -> Tensor:
    """One token of each text; what the cache has found for them is among the arguments."""
    kernel = page_kernel()
    assert kernel is not None
    return kernel(
        *(query, key, value),
        key_pages=found["k_cache"],
        value_pages=found["v_cache"],
        tables=found["block_table"],
        key_ends=found["cu_seq_lens_k"],
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )

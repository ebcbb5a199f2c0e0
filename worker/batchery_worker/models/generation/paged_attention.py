"""Attention over a paged cache by CUDA's kernel for rows of texts: each text sees itself alone.

transformers' own attention for such a cache, without other packages, has every token of a step look
at the keys of all texts, behind a mask: at 64 texts of 300 tokens that is nine tenths of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching.utils import find_head_dim

from batchery_worker.models.forward.attention import HALF, check_options, varlen_kernel

#: The name of this attention in transformers. The word `flash` in it says that no mask is needed.
NAME = "batchery_flash_pages"

#: What the kernel takes as width of a head, in numbers: a multiple of one, up to the other.
HEAD_STEP, MAX_HEAD = 8, 256

#: Attentions over a cache -> the same without one.
PLAIN = {NAME: "sdpa", "paged|eager": "eager"}


def attentions(model: Any) -> tuple[str, ...]:
    """The attentions to try for a model of transformers, on its device; fastest first."""
    usual: str = model.config._attn_implementation
    if not has_kernel(model) or model.config.is_encoder_decoder:
        return (usual,)
    width = find_head_dim(model.config.get_text_config())
    fits = width % HEAD_STEP == 0 and width <= MAX_HEAD
    if not fits or usual != "sdpa" or not model._supports_flash_attn:
        return (usual,)
    AttentionInterface.register(NAME, attention)
    return (NAME, usual)


def has_kernel(model: Any) -> bool:
    """Whether CUDA's kernel takes what this model computes."""
    return model.device.type == "cuda" and model.dtype in HALF and varlen_kernel() is not None


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
    kernel = varlen_kernel()
    assert kernel is not None
    queries, keys, values = (each.select(0, 0).transpose(0, 1) for each in (query, key, value))
    seen = kernel(
        *(queries, keys, values),
        ends=cu_seq_lens_q,
        longest=max_length_q,
        scale=scaling,
        window=(-1 if sliding_window is None else sliding_window - 1, 0),
        keys=(others["cu_seq_lens_k"], others["max_length_k"]),
    )
    return seen.unsqueeze(0), None

"""CUDA's attention for one new token of each text, straight from the pages of its cache.

transformers' own way copies the keys and values of all texts into rows before each layer attends,
and so moves them three times. Here each is read once, and the sizes of a launch do not depend on
the lengths of the texts, so that a step can be a CUDA graph.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Programs of a launch, at least: with few texts, several share the pages of each. A card has some
#: hundred processors, each of which runs several programs.
PROGRAMS = 1024

#: Maximum number of programs that share the pages of a text.
MAX_PARTS = 16

#: On an H200, heads of 64 numbers were quickest with one warp: 64 texts of 1,000 tokens at 3.3
#: TB/s, three quarters of what copies reach there.
COLUMNS_PER_WARP = 64

#: Smallest side of a matrix that the card's matrix units take.
SIDE = 16

#: Stands for a score of minus infinity: the difference of two of them is no NaN.
NOTHING = tl.constexpr(-1.0e30)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    key_ends: Tensor,
    scale: float,
) -> Tensor:
    """Writes the keys and values of new tokens into their pages, and attends to all of each text.

    Args:
        query: (B, H, D) bf16 or fp16, of one token for each of B texts.
        key: (B, K, D) of the same tokens; H is a multiple of K.
        value: As `key`.
        key_pages: (pages, P, K, D), contiguous; P is a power of two, at least 16.
        value_pages: As `key_pages`.
        tables: (B, any) int32, the pages of each text, in order.
        key_ends: (B + 1,) int32, 0 and then the sum of the lengths so far, new tokens included. A
            text of length 0 is padding, and its row of the result is 0.
        scale: Factor of the scores.

    Returns:
        (B, H, D).
    """
    texts, heads, width = query.shape
    key_heads, page_tokens = key_pages.shape[2], key_pages.shape[1]
    group = heads // key_heads
    parts = min(MAX_PARTS, triton.next_power_of_2(-(-PROGRAMS // (texts * key_heads))))
    floats: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    seen = torch.empty((texts, heads, parts, width), **floats)
    weights = torch.empty((texts, heads, parts, 2), **floats)
    out = torch.empty((texts, heads, width), dtype=query.dtype, device=query.device)
    columns = max(SIDE, triton.next_power_of_2(width))
    _attend[(texts, key_heads, parts)](
        *(query.contiguous(), key.contiguous(), value.contiguous(), key_pages, value_pages),
        *(tables, key_ends, seen, weights, tables.stride(0), scale),
        WIDTH=width,
        COLUMNS=columns,
        GROUP=group,
        ROWS=max(SIDE, triton.next_power_of_2(group)),
        PAGE=page_tokens,
        num_warps=max(1, columns // COLUMNS_PER_WARP),
    )
    _merge[(texts * heads,)](
        seen, weights, out, parts, WIDTH=width, COLUMNS=columns, PARTS=MAX_PARTS, num_warps=1
    )
    return out


@triton.jit
def _attend(
    query,
    key,
    value,
    key_pages,
    value_pages,
    tables,
    key_ends,
    seen_parts,
    weights,
    table_text,
    scale,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One text, one head of keys with its `GROUP` heads of queries, and a part of the pages."""
    text, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, parts = tl.num_programs(1), tl.num_programs(2)
    length, pages, first, last = _choose_pages(key_ends + text, part, parts, PAGE)
    rows, columns, places = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, PAGE)
    is_column = columns < WIDTH
    is_query = (rows < GROUP)[:, None] & is_column[None, :]
    line = (text * heads + head) * GROUP + rows
    queries = tl.load(query + line[:, None] * WIDTH + columns[None, :], mask=is_query, other=0.0)
    if (last == pages) & (first < last):
        # No other program reads the place of the new token.
        page = tl.load(tables + text * table_text + pages - 1).to(tl.int64)
        old = (text * heads + head) * WIDTH + columns
        new = ((page * PAGE + (length - 1) % PAGE) * heads + head) * WIDTH + columns
        tl.store(key_pages + new, tl.load(key + old, mask=is_column), mask=is_column)
        tl.store(value_pages + new, tl.load(value + old, mask=is_column), mask=is_column)
    tl.debug_barrier()
    largest, total = tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32)
    seen = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(first, last):
        page = tl.load(tables + text * table_text + number).to(tl.int64)
        place = ((page * PAGE + places[:, None]) * heads + head) * WIDTH + columns[None, :]
        is_token = number * PAGE + places < length
        is_there = is_token[:, None] & is_column[None, :]
        keys = tl.load(key_pages + place, mask=is_there, other=0.0)
        values = tl.load(value_pages + place, mask=is_there, other=0.0)
        scores = tl.where(is_token[None, :], tl.dot(queries, tl.trans(keys)) * scale, NOTHING)
        largest, total, seen = _add_page(scores, values, largest, total, seen)
    line = line * parts + part
    tl.store(seen_parts + line[:, None] * WIDTH + columns[None, :], seen, mask=is_query)
    tl.store(weights + line * 2, largest, mask=rows < GROUP)
    tl.store(weights + line * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def _choose_pages(ends, part, parts, PAGE: tl.constexpr):
    """Length of a text, number of its pages, and the first one of a part and of the next part."""
    length = tl.load(ends + 1) - tl.load(ends)
    pages = tl.cdiv(length, PAGE)
    share = tl.cdiv(pages, parts)
    return length, pages, part * share, min(part * share + share, pages)


@triton.jit
def _add_page(scores, values, largest, total, seen):
    """The sums of a softmax with those of one page more."""
    larger = tl.maximum(largest, tl.max(scores, 1))
    before = tl.exp(largest - larger)
    shares = tl.exp(scores - larger[:, None])
    total = total * before + tl.sum(shares, 1)
    return larger, total, seen * before[:, None] + tl.dot(shares.to(values.dtype), values)


@triton.jit(do_not_specialize=["parts"])
def _merge(
    seen_parts,
    weights,
    out,
    parts,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One head of one text: the parts, by the weights that they have in the whole."""
    row = tl.program_id(0)
    numbers, columns = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    is_part, is_column = numbers < parts, columns < WIDTH
    line = row * parts + numbers
    largest = tl.load(weights + line * 2, mask=is_part, other=NOTHING)
    total = tl.load(weights + line * 2 + 1, mask=is_part, other=0.0)
    is_there = is_part[:, None] & is_column[None, :]
    seen = tl.load(seen_parts + line[:, None] * WIDTH + columns[None, :], mask=is_there, other=0.0)
    factors = tl.exp(largest - tl.max(largest, 0))
    whole = tl.sum(total * factors, 0)
    result = tl.sum(seen * factors[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=is_column)

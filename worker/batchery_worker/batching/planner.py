"""Lengths in, micro-batches out: pure, no torch.

Texts are sorted by length before they are cut, so that equal lengths share a pass. A padded forward
pass costs its shape: the longest text times the number of texts. A packed pass costs the sum of its
texts. Each pass also has a fixed cost, counted in tokens. So many narrow passes pad less, and few
wide passes pay the fixed cost less often.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

#: Fixed cost of a forward pass, in tokens, by kind of device. On a CPU it is Python and small
#: matrices. A GPU computes thousands of tokens in the time in which its kernels are launched.
PASS_TOKENS = {"cpu": 32, "mps": 1_024, "cuda": 4_096}

#: A fixed cost that was learned is at most so many times the one above, and at least its part. At
#: both ends it no longer matters: on CUDA 32,768 tokens are two whole budgets, so the widest passes
#: always win, and 512 are a thirtieth of one.
MAX_PASS_TOKENS_FACTOR = 8

#: Minimum mean tokens of passes that a batch is cut into only to have one for each stream, by kind
#: of device: smaller passes cost more besides their tokens than is won. Cards have streams in a
#: pipeline alone. They read the weights of a model that large in the time of some 200 tokens, by
#: their data sheets.
MIN_STREAM_TOKENS = {"cpu": 128, "mps": 128, "cuda": 1_024}


def plan(
    lengths: Sequence[int],
    max_batch_tokens: int,
    max_batch_size: int,
    *,
    pads: bool = True,
    pass_tokens: int = PASS_TOKENS["cpu"],
    streams: int = 1,
    min_stream_tokens: int = MIN_STREAM_TOKENS["cpu"],
) -> list[list[int]]:
    """Cuts a window of items into micro-batches, at the lowest cost.

    The cost is the sum over all micro-batches of their tokens, padding counted if there is any,
    and of `pass_tokens`. Padded, no other plan costs less, whatever its order; packed, none that
    keeps the order of lengths.

    Args:
        lengths: Tokens of each item, at least 1.
        max_batch_tokens: Maximum tokens of one micro-batch, padding counted if there is any. A
            longer item still runs, in a micro-batch of its own.
        max_batch_size: Maximum items of one micro-batch.
        pads: Whether items are padded to the longest of their micro-batch.
        pass_tokens: Fixed cost of a forward pass, in tokens.
        streams: Passes that are computed side by side. With several, there are as many
            micro-batches as keep all streams busy to the end, if each has `min_stream_tokens`.
        min_stream_tokens: Minimum mean tokens of micro-batches that are cut for streams.

    Returns:
        Indices into `lengths`: each index exactly once, longest items first (so that memory peaks
        at the start, and a window that does not fit fails early), each micro-batch from its longest
        to its shortest item.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    ordered = [max(1, lengths[index]) for index in order]
    if pads:
        if streams > 1:
            share = max(min_stream_tokens, -(-sum(ordered) // streams))
            max_batch_tokens = min(max_batch_tokens, share)
        starts = _padded_starts(ordered, max_batch_tokens, max_batch_size, pass_tokens)
    elif streams > 1:
        starts = _even_starts(ordered, max_batch_tokens, max_batch_size, streams, min_stream_tokens)
    else:
        starts = _packed_starts(ordered, max_batch_tokens, max_batch_size)
    return [order[start:end] for start, end in pairwise([*starts, len(order)])]


def _even_starts(
    lengths: Sequence[int], max_tokens: int, max_size: int, streams: int, min_tokens: int
) -> list[int]:
    """Cuts into as few micro-batches as possible, rounded up to whole rounds of all streams.

    Among all cuts into so many, it takes the one whose largest micro-batch is the smallest.
    """
    starts = _packed_starts(lengths, max_tokens, max_size)
    total = sum(lengths)
    rounds = -(-len(starts) // streams)
    parts = max(len(starts), min(rounds * streams, total // min_tokens))
    if parts < 2 or max_tokens <= lengths[0]:
        return starts
    # The more tokens a micro-batch may have, the fewer micro-batches there are.
    limits = range(max(lengths[0], -(-total // parts)), max_tokens)
    least = bisect_left(
        limits, True, key=lambda limit: len(_packed_starts(lengths, limit, max_size)) <= parts
    )
    return _packed_starts(lengths, limits[least], max_size) if least < len(limits) else starts


def _packed_starts(lengths: Sequence[int], max_tokens: int, max_size: int) -> list[int]:
    """Fills each micro-batch as far as it goes: the number of tokens is the same for every cut."""
    starts: list[int] = []
    tokens = 0
    for place, length in enumerate(lengths):
        tokens += length
        if not starts or tokens > max_tokens or place - starts[-1] == max_size:
            starts.append(place)
            tokens = length
    return starts


def _padded_starts(
    lengths: Sequence[int], max_tokens: int, max_size: int, pass_tokens: int
) -> list[int]:
    """Finds the cheapest cuts, by the cheapest cuts of all shorter windows."""
    count = len(lengths)
    max_padding = (lengths[0] - lengths[-1]) * count if lengths else 0
    if 0 < count <= min(max_size, max_tokens // lengths[0]) and max_padding <= pass_tokens:
        # The lengths are alike enough for one pass. Trying all cuts would take quadratic time.
        return [0]
    cheapest = [0, *[-1] * count]
    start_of_last = [0] * (count + 1)
    for start, width in enumerate(lengths):
        max_items = min(count - start, max_size, max(1, max_tokens // width))
        cost = cheapest[start] + pass_tokens
        for end in range(start + 1, start + max_items + 1):
            cost += width
            if cheapest[end] < 0 or cost < cheapest[end]:
                cheapest[end] = cost
                start_of_last[end] = start
            # A cut in the middle would cost less, here and for every larger end.
            middle = (start + end) // 2
            if (width - lengths[middle]) * (end - middle) > pass_tokens:
                break
    starts: list[int] = []
    end = count
    while end:
        end = start_of_last[end]
        starts.append(end)
    return starts[::-1]

"""Lengths in, micro-batches out: pure, no torch.

Sorting by length before cutting puts like with like. A padded forward pass costs what its shape
costs: the longest text times the number of texts. A packed one costs the sum of its texts. To both
comes what a pass costs however small it is, counted in tokens: many narrow passes pad less, few
wide ones cost less beside the padding.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

#: What one forward pass costs beside its tokens, in tokens, by kind of device, until it is measured
#: for a model. On a CPU it is Python and the smallest of the matrices; a GPU computes thousands of
#: tokens in the time that it takes to launch its kernels.
PASS_TOKENS = {"cpu": 32, "mps": 1_024, "cuda": 4_096}

#: Minimum mean tokens of passes that a batch is cut into only to have one for each stream: smaller
#: passes cost more besides their tokens than is won.
MIN_STREAM_TOKENS = 128


def plan(
    lengths: Sequence[int],
    max_batch_tokens: int,
    max_batch_size: int,
    *,
    pads: bool = True,
    pass_tokens: int = PASS_TOKENS["cpu"],
    streams: int = 1,
) -> list[list[int]]:
    """Cuts a window of items into micro-batches, at the least cost.

    The cost is the sum over all micro-batches of their tokens, padding counted if there is any,
    and of `pass_tokens`. Padded, no other plan costs less, whatever its order; packed, none that
    keeps the order of lengths.

    Args:
        lengths: Tokens of each item, at least 1.
        max_batch_tokens: Most tokens of one micro-batch, padding counted if there is any. An item
            that is longer than that still runs, in a micro-batch of its own.
        max_batch_size: Most items of one micro-batch.
        pads: Whether items are padded to the longest of their micro-batch.
        pass_tokens: What a forward pass costs beside its tokens, in tokens.
        streams: Passes that are computed side by side. With several, there are as many
            micro-batches as keep all streams busy to the end, if each has `MIN_STREAM_TOKENS`.

    Returns:
        Indices into `lengths`: each index exactly once, longest items first (so that memory peaks
        at the start, and a window that does not fit fails early), each micro-batch from its longest
        to its shortest item.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    ordered = [max(1, lengths[index]) for index in order]
    if pads:
        if streams > 1:
            share = max(MIN_STREAM_TOKENS, -(-sum(ordered) // streams))
            max_batch_tokens = min(max_batch_tokens, share)
        starts = _padded_starts(ordered, max_batch_tokens, max_batch_size, pass_tokens)
    elif streams > 1:
        starts = _even_starts(ordered, max_batch_tokens, max_batch_size, streams)
    else:
        starts = _packed_starts(ordered, max_batch_tokens, max_batch_size)
    return [order[start:end] for start, end in pairwise([*starts, len(order)])]


def _even_starts(lengths: Sequence[int], max_tokens: int, max_size: int, streams: int) -> list[int]:
    """As few micro-batches as can be, rounded up to whole rounds of all streams.

    Of all cuts into so many, the one whose largest micro-batch is the smallest.
    """
    starts = _packed_starts(lengths, max_tokens, max_size)
    total = sum(lengths)
    rounds = -(-len(starts) // streams)
    wanted = max(len(starts), min(rounds * streams, total // MIN_STREAM_TOKENS))
    if wanted < 2 or max_tokens <= lengths[0]:
        return starts
    # The more tokens one may have, the fewer there are.
    limits = range(max(lengths[0], -(-total // wanted)), max_tokens)
    least = bisect_left(
        limits, True, key=lambda limit: len(_packed_starts(lengths, limit, max_size)) <= wanted
    )
    return _packed_starts(lengths, limits[least], max_size) if least < len(limits) else starts


def _packed_starts(lengths: Sequence[int], max_tokens: int, max_size: int) -> list[int]:
    """Fills each micro-batch as far as it goes: the tokens are the same however it is cut."""
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
    most_padding = (lengths[0] - lengths[-1]) * count if lengths else 0
    if 0 < count <= min(max_size, max_tokens // lengths[0]) and most_padding <= pass_tokens:
        # Alike enough for one pass; to try all cuts would take the square of their number.
        return [0]
    cheapest = [0, *[-1] * count]
    start_of_last = [0] * (count + 1)
    for start, width in enumerate(lengths):
        most = min(count - start, max_size, max(1, max_tokens // width))
        cost = cheapest[start] + pass_tokens
        for end in range(start + 1, start + most + 1):
            cost += width
            if cheapest[end] < 0 or cost < cheapest[end]:
                cheapest[end] = cost
                start_of_last[end] = start
            # Cut in the middle, it would cost less, and so would all that are longer.
            middle = (start + end) // 2
            if (width - lengths[middle]) * (end - middle) > pass_tokens:
                break
    starts: list[int] = []
    end = count
    while end:
        end = start_of_last[end]
        starts.append(end)
    return starts[::-1]

"""Lengths in, micro-batches out: pure, no torch.

A forward pass costs what its padded shape costs: the longest text times the number of texts.
Sorting by length before cutting puts like with like, so that little of the shape is padding.
"""

from collections.abc import Sequence


def plan(lengths: Sequence[int], max_batch_tokens: int, max_batch_size: int) -> list[list[int]]:
    """Cuts a window of items into micro-batches.

    Args:
        lengths: Tokens of each item, at least 1.
        max_batch_tokens: Most tokens of one micro-batch, padding counted. An item that is longer
            than that still runs, in a micro-batch of its own.
        max_batch_size: Most items of one micro-batch.

    Returns:
        Indices into `lengths`: each index exactly once, longest items first (so that memory peaks
        at the start, and a window that does not fit fails early), each micro-batch from its longest
        to its shortest item.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    micro_batches: list[list[int]] = []
    room = 0
    for index in order:
        if room == 0:
            # The first item is the longest, so its length is the width of the whole shape.
            micro_batches.append([])
            room = min(max_batch_size, max(1, max_batch_tokens // max(1, lengths[index])))
        micro_batches[-1].append(index)
        room -= 1
    return micro_batches

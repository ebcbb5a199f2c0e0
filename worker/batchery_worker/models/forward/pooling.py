"""One vector per text from the vectors of its tokens."""

import torch
from torch import Tensor


def pool(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """Pools in float32, wherever the padding is.

    Args:
        hidden: Token vectors, (B, L, D), of any float dtype.
        mask: 1 for a token and 0 for padding, (B, L); at least one token in every row.
        how: `mean` of all tokens, `cls` for the first, `last` for the last.

    Returns:
        (B, D), float32.
    """
    if how == "mean":
        weights = mask.unsqueeze(-1).to(torch.float32)
        # Padding may hold NaN, which a weight of 0 would not remove.
        kept = hidden.float().masked_fill(weights == 0, 0.0)
        return kept.sum(dim=1) / weights.sum(dim=1)
    # argmax finds the first maximum: the first token, or the last one in the flipped mask.
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    place = mask.argmax(dim=1) if how == "cls" else last
    return hidden[torch.arange(len(hidden), device=hidden.device), place].float()


def pool_row(hidden: Tensor, ends: Tensor, how: str) -> Tensor:
    """Pools texts that follow each other in one row, in float32.

    Args:
        hidden: Token vectors, (T, D), of any float dtype.
        ends: End of each text in tokens, (B,), ascending from at least 1; the last is T.
        how: As in `pool`.

    Returns:
        (B, D), float32.
    """
    if how == "mean":
        lengths = ends.diff(prepend=ends.new_zeros(1))
        # Without `unsafe` it checks the lengths, and the host waits for the device.
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, unsafe=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return hidden[starts if how == "cls" else ends - 1].float()

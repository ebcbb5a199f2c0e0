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


def pool_row(hidden: Tensor, starts: Tensor, lengths: Tensor, how: str) -> Tensor:
    """Pools texts that follow each other in one row, in float32.

    Args:
        hidden: Token vectors, (T, D), of any float dtype.
        starts: Where each text begins, in tokens, (B,).
        lengths: Tokens of each text, (B,), at least 1; T together.
        how: As in `pool`.

    Returns:
        (B, D), float32.
    """
    if how == "mean":
        # Without `unsafe` it checks the lengths, and the host waits for the device.
        return torch.segment_reduce(hidden.float(), "mean", lengths=lengths, unsafe=True)
    return hidden[starts if how == "cls" else starts + lengths - 1].float()

"""Which token comes next: for all texts of a step at once, each with its own keywords."""

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

#: Tokens among which `top_p` is looked for first: sorting a whole vocabulary takes milliseconds.
LIKELIEST_TOKENS = 1024

#: In place of a token: the model's output is not finite.
NO_TOKEN = -1


class Sampling(NamedTuple):
    """What one text asks of its next token.

    Attributes:
        temperature: 0 for the likeliest token.
        top_k: Draw from so many of the likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens that together have this probability.
        repetition_penalty: Divides the scores of tokens that are there already; 1 for none.
        uniform: The number that draws it, from 0 to below 1.
        seen: The tokens that are there already, (V,) bool; None without a penalty.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    uniform: float = 0.0
    seen: Tensor | None = None


def draw(seed: int, choice: int, position: int) -> float:
    """A number from 0 to below 1 that depends on nothing else, so that a text can be resumed."""
    digest = blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=8).digest()
    # A float has 53 bits.
    return float((int.from_bytes(digest) >> 11) / 2**53)


#: Lower temperatures count as this one, by which scores can be divided.
MIN_TEMPERATURE = 1e-3


def penalize(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Lowers the logits of tokens that are there already, by the penalty of each row, (B, V)."""
    rows = [row for row, each in enumerate(samplings) if each.seen is not None]
    if not rows:
        return logits
    penalty = _column([samplings[row] for row in rows], "repetition_penalty", logits)
    seen = torch.stack([each.seen for each in samplings if each.seen is not None])
    scores, changed = logits.clone(), logits[rows]
    lowered = torch.where(changed < 0, changed * penalty, changed / penalty)
    scores[rows] = torch.where(seen, lowered, changed)
    return scores


def choose_tokens(scores: Tensor, samplings: Sequence[Sampling]) -> list[int]:
    """Chooses the next token of each text.

    Args:
        scores: Logits behind all rules and penalties, (B, V) float32.
        samplings: One per row.

    Returns:
        One token per row; `NO_TOKEN` where no score is finite, or one is not a number.
    """
    best = scores.max(dim=-1)
    tokens = best.indices
    drawn = [row for row, each in enumerate(samplings) if each.temperature > 0]
    cut = [row for row in drawn if samplings[row].top_k or samplings[row].top_p < 1]
    whole = [row for row in drawn if row not in cut]
    for rows, pick in ((whole, _pick), (cut, _pick_of_likeliest)):
        if rows:
            wanted = [samplings[row] for row in rows]
            temperatures = _column(wanted, "temperature", scores).clamp(min=MIN_TEMPERATURE)
            tokens[rows] = pick(scores[rows] / temperatures, wanted)
    return [int(each) for each in torch.where(best.values.isfinite(), tokens, NO_TOKEN).tolist()]


def find_logprobs(
    scores: Tensor, chosen: Sequence[int], width: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Logarithms of probabilities.

    Args:
        scores: What tokens were chosen by, (B, V).
        chosen: The token of each row.
        width: How many of the likeliest tokens to tell.

    Returns:
        Of the chosen tokens; the likeliest tokens of each row; and theirs.
    """
    values = scores.log_softmax(dim=-1)
    own = values.gather(1, torch.tensor(chosen, device=scores.device)[:, None])[:, 0]
    top = values.topk(min(width, values.shape[1]), dim=-1)
    return own.tolist(), top.indices.tolist(), top.values.tolist()


def _column(samplings: Sequence[Sampling], name: str, like: Tensor) -> Tensor:
    values = [getattr(each, name) for each in samplings]
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _pick(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Draws from the whole vocabulary."""
    return _drawn(scores.softmax(dim=-1), samplings)


def _pick_of_likeliest(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Draws from the likeliest tokens, of which there are as many as `top_k` and `top_p` say."""
    vocabulary = scores.shape[1]
    limits = [min(each.top_k or vocabulary, vocabulary) for each in samplings]
    limit = torch.tensor(limits, device=scores.device)[:, None]
    # One that is 0 in this precision would leave nothing.
    top_p = _column(samplings, "top_p", scores).clamp(min=1e-6)
    # Where `top_k` limits, probabilities are those among its tokens.
    everything = scores.logsumexp(dim=-1, keepdim=True)
    width = min(
        vocabulary, max(LIKELIEST_TOKENS, *(each for each in limits if each < vocabulary), 1)
    )
    while True:
        top = scores.topk(width, dim=-1)
        kept = torch.arange(width, device=scores.device) < limit
        values = top.values.masked_fill(~kept, -math.inf)
        total = torch.where(limit < vocabulary, values.logsumexp(-1, keepdim=True), everything)
        shares = (values - total).exp()
        mass = shares.cumsum(dim=-1)
        if width == vocabulary or bool(((mass[:, -1:] >= top_p) | (limit <= width)).all()):
            break
        width = vocabulary
    # The likeliest token always stays.
    picked = _drawn(shares.where(mass - shares < top_p, 0.0), samplings)
    return top.indices.gather(1, picked[:, None])[:, 0]


def _drawn(shares: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Draws a column of each row, by its shares."""
    precise = torch.float32 if shares.device.type == "mps" else torch.float64
    mass = shares.cumsum(dim=-1, dtype=precise)
    uniform = [each.uniform for each in samplings]
    at = torch.tensor(uniform, dtype=precise, device=shares.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, at, right=True)[:, 0].clamp_(max=shares.shape[1] - 1)

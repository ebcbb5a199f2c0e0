"""Draws of tokens: as often as their probabilities say, and each row for itself."""

import math

import pytest
import torch

from batchery_worker.models.generation import sampling
from batchery_worker.models.generation.sampling import (
    NO_TOKEN,
    Sampling,
    choose_tokens,
    draw,
    penalize,
)

LOGITS = torch.log(torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2]))


def frequencies(**options: float) -> list[float]:
    samplings = [Sampling(uniform=draw(9, 0, at), **options) for at in range(4000)]  # type: ignore[arg-type]
    tokens = torch.tensor(choose_tokens(LOGITS.expand(4000, -1).clone(), samplings))
    return [float(each) for each in tokens.bincount(minlength=5) / 4000]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    assert frequencies(temperature=1) == pytest.approx([0.4, 0.05, 0.3, 0.05, 0.2], abs=0.03)
    squared = [0.16, 0.0025, 0.09, 0.0025, 0.04]
    cold = [each / sum(squared) for each in squared]
    assert frequencies(temperature=0.5) == pytest.approx(cold, abs=0.03)
    assert frequencies(temperature=1, top_k=2) == pytest.approx([4 / 7, 0, 3 / 7, 0, 0], abs=0.03)
    assert frequencies(temperature=1, top_p=0.69) == pytest.approx(
        [4 / 7, 0, 3 / 7, 0, 0], abs=0.03
    )
    assert frequencies(temperature=1, top_p=0.71) == pytest.approx(
        [4 / 9, 0, 3 / 9, 0, 2 / 9], abs=0.03
    )
    # Of the two likeliest, the first has more than half.
    assert frequencies(temperature=1, top_k=2, top_p=0.5) == [1, 0, 0, 0, 0]
    assert frequencies(temperature=1, top_p=1e-9) == [1, 0, 0, 0, 0]


def test_rows_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # So few likeliest tokens are looked at that some rows need more.
    monkeypatch.setattr(sampling, "LIKELIEST_TOKENS", 8)
    torch.manual_seed(0)
    logits = torch.randn(60, 300)
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9},
        {"repetition_penalty": 1.5, "seen": torch.rand(300) < 0.3},
    ]
    rows = [Sampling(uniform=draw(1, 0, at), **kinds[at % 6]) for at in range(60)]  # type: ignore[arg-type]
    together = choose_tokens(penalize(logits, rows), rows)
    alone = [
        choose_tokens(penalize(logits[at : at + 1], [row]), [row])[0] for at, row in enumerate(rows)
    ]
    assert together == alone


def test_logits_that_are_not_finite_give_no_token() -> None:
    logits = torch.stack([LOGITS, LOGITS.clone(), torch.full((5,), -math.inf)])
    logits[1, 2] = math.nan
    assert choose_tokens(logits, [Sampling(), Sampling(temperature=1), Sampling()]) == [
        *(0, NO_TOKEN, NO_TOKEN),
    ]


def test_draws_are_even_and_depend_on_all_that_they_name() -> None:
    values = [
        draw(seed, choice, at) for seed in range(10) for choice in range(10) for at in range(10)
    ]
    assert len(set(values)) == 1000
    assert all(0 <= each < 1 for each in values)
    assert sum(values) / 1000 == pytest.approx(0.5, abs=0.03)

"""Keywords and forms of items that all kinds of texts share: truncation, and token ids."""

from typing import Any

import numpy as np
import pytest

from batchery.errors import InvalidItem
from batchery.outcomes import Failed
from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any number in fp32: the sums run in another order.
TOLERANCE = 5e-6

LONG = "the cat sat on the mat and looked"


def as_ids(model: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of texts, without special ones."""
    ids: list[list[int]] = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids


def same(one: Any, other: Any) -> bool:
    return bool(np.allclose(one["vector"], other["vector"], atol=TOLERANCE))


def test_truncate_outranks_the_setting(build: Build, embedder: Load) -> None:
    for overflow in ("truncate", "refuse"):
        model = embedder(build("bert"), max_length=6, overflow=overflow)
        (cut,) = run(model, [LONG], truncate=True)
        assert (cut["tokens"], cut["truncated"]) == (6, True)
        (refused,) = run(model, [LONG], truncate=False)
        assert isinstance(refused.exception, InvalidItem)
        assert str(refused.exception) == "text: 10 tokens are more than max_length = 6 tokens"
        (usual,) = run(model, [LONG])
        assert isinstance(usual, Failed) == (overflow == "refuse")


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_texts_lose_tokens_on_the_side_that_is_asked_for(
    architecture: str, build: Build, embedder: Load
) -> None:
    model = embedder(build(architecture), max_length=6)
    words = 4 if architecture == "bert" else 6
    (right,) = run(model, [LONG], truncation_direction="right")
    (left,) = run(model, [LONG], truncation_direction="left")
    (usual,) = run(model, [LONG])
    assert same(right, run(model, [" ".join(LONG.split()[:words])])[0])
    assert same(left, run(model, [" ".join(LONG.split()[-words:])])[0])
    assert same(usual, right)
    assert not same(left, right)
    assert left["truncated"] is right["truncated"] is True


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "llama", "gpt2", "t5"])
@pytest.mark.parametrize("keywords", [{}, {"truncation_direction": "left"}])
def test_token_ids_give_what_their_text_gives(
    architecture: str, keywords: dict[str, Any], build: Build, embedder: Load
) -> None:
    model = embedder(build(architecture), max_length=12)
    texts = [*CORPUS, "rain", LONG]
    expected = run(model, texts, **keywords)
    for ids, one, other in zip(
        as_ids(model, texts), run(model, as_ids(model, texts), **keywords), expected, strict=True
    ):
        assert same(one, other), ids
        assert one.keys() == other.keys()
        assert one["tokens"] == other["tokens"]


def test_token_ids_and_texts_share_a_batch(build: Build, embedder: Load) -> None:
    model = embedder(build("bert"))
    (ids,) = as_ids(model, ["a dog barked"])
    text, tokens, bad, pair = run(model, ["a dog barked", ids, [ids], "rain"])
    assert same(text, tokens)
    assert str(bad.exception).startswith("token ids: position 0 has a list, not an integer")
    assert pair["tokens"] == 3


@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_max_length_of_a_job_is_the_limit_if_it_is_lower(
    architecture: str, build: Build, classifier: Load
) -> None:
    model = classifier(build(architecture, labels=("no", "yes")), max_length=20)
    long = " ".join(["cat"] * 50)
    for given, held in ((8, 8), (19, 19), (20, 20), (30, 20), (None, 20)):
        short, cut = run(model, ["the cat", long], max_length=given)
        assert (cut["tokens"], cut["truncated"]) == (held, True)
        assert "truncated" not in short
        # Token ids and pairs as well.
        (ids,) = as_ids(model, [long])
        assert run(model, [ids], max_length=given)[0]["tokens"] == held
        pair = {"text": long, "text_pair": long}
        assert run(model, [pair], max_length=given)[0]["tokens"] == held
    (refused,) = run(model, [long], max_length=10, truncate=False)
    assert "are more than max_length = 10 tokens" in str(refused.exception)
    (wrong,) = run(model, ["a"], max_length=7)
    assert "keyword max_length = 7" in str(wrong.exception)

"""Reranking: agreement with transformers, keywords, bad items, models that are no rerankers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from batchery.errors import InvalidItem, ModelLoadError
from batchery.results import Score
from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

LABEL = ("relevance",)

WORDS = " ".join(CORPUS).split()

#: Pairs of very different lengths.
ITEMS = [
    {"query": "cats", "text": "the cat"},
    {"query": "which ships carry tea to the old harbour", "text": "rain"},
    {"query": "rain", "text": " ".join(CORPUS)},
    {"query": " ".join(CORPUS[1:]), "text": CORPUS[0]},
]

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)
pairs = st.fixed_dictionaries({"query": texts, "text": texts})


def direct(folder: Path, item: dict[str, str]) -> float:
    """What transformers computes, without Batchery."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    encoded = tokenizer([item["query"]], [item["text"]], truncation=True, return_tensors="pt")
    with torch.no_grad():
        return float(model(**encoded).logits[0, 0])


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "deberta", "gpt2"])
def test_scores_are_those_of_transformers(architecture: str, build: Build, load: Load) -> None:
    folder = build(architecture, labels=LABEL)
    model = load("rerank", folder, max_length=78)
    raw = run(model, ITEMS, raw_scores=True)
    for item, one, squashed in zip(ITEMS[:-1], raw, run(model, ITEMS), strict=False):
        logit = direct(folder, item)
        assert one["score"] == pytest.approx(logit, abs=TOLERANCE)
        assert squashed["score"] == pytest.approx(1 / (1 + 2.718281828**-logit), abs=TOLERANCE)


@pytest.fixture(scope="module")
def packed_and_padded(build: Build, load: Load) -> list[Any]:
    """One model, loaded for both forward passes."""
    return [
        load("rerank", build("bert", labels=LABEL), forward=forward)
        for forward in ("packed", "padded")
    ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(items=st.lists(pairs, min_size=1, max_size=9))
def test_a_batch_gives_each_pair_the_score_that_it_has_alone(
    items: list[dict[str, str]], packed_and_padded: list[Any]
) -> None:
    for model in packed_and_padded:
        for item, result in zip(items, run(model, items), strict=True):
            assert result == pytest.approx(run(model, [item])[0], abs=TOLERANCE)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "modernbert"])
def test_packed_scores_are_the_padded_ones(architecture: str, build: Build, load: Load) -> None:
    folder = build(architecture, labels=LABEL)
    packed, padded = load("rerank", folder), load("rerank", folder, forward="padded")
    assert (packed.pads, padded.pads) == (False, True)
    for one, other in zip(run(packed, ITEMS), run(padded, ITEMS), strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)


def test_a_result_is_a_score(build: Build, load: Load) -> None:
    result = run(load("rerank", build("bert", labels=LABEL)), ITEMS)[-1]
    parsed = Score.model_validate(result)
    assert parsed.model_dump(exclude_unset=True) == result
    assert (parsed.tokens, parsed.truncated) == (47, False)
    assert 0 < parsed.score < 1


def test_a_pair_that_is_too_long_is_cut_or_refused(build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL), max_length=12)
    item = {"query": "cats", "text": CORPUS[0]}
    assert run(model, [item])[0]["truncated"] is True
    (refused,) = run(model, [item], truncate=False)
    assert str(refused.exception) == "text: 15 tokens are more than max_length = 12 tokens"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("a text", "item: must be a dictionary with 'query' and 'text', not str"),
        ([4, 5], "item: must be a dictionary with 'query' and 'text', not list"),
        ({"text": "a"}, "item: must be a dictionary with 'query' and 'text', not 'text'"),
        (
            {"query": "a", "text": "b", "id": 3},
            "item: must be a dictionary with 'query' and 'text', not 'query', 'text', 'id'",
        ),
        ({"query": "", "text": "a"}, "query: is empty"),
        ({"query": "a", "text": None}, "text: must be a string, not NoneType"),
        (
            {"query": "a" * 5001, "text": "a"},
            "query: 5001 characters are more than max_chars = 5000",
        ),
    ],
)
def test_a_bad_item_fails_alone(item: Any, message: str, build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL), max_chars=5000)
    before, bad, after = run(model, [ITEMS[0], item, ITEMS[1]])
    assert isinstance(bad.exception, InvalidItem)
    assert str(bad.exception) == message
    assert before == pytest.approx(run(model, [ITEMS[0]])[0], abs=TOLERANCE)
    assert after == pytest.approx(run(model, [ITEMS[1]])[0], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"raw_scores": 1}, "keyword raw_scores = 1: Input should be a valid boolean"),
        (
            {"top_k": 1},
            "keyword top_k: no such keyword; there are raw_scores, truncate, truncation_direction",
        ),
    ],
)
def test_a_bad_keyword_fails_the_batch(
    keywords: dict[str, Any], message: str, build: Build, load: Load
) -> None:
    outcomes = run(load("rerank", build("bert", labels=LABEL)), ITEMS[:2], **keywords)
    assert [str(outcome.exception) for outcome in outcomes] == [message, message]


def test_a_model_that_is_no_reranker_is_refused_in_a_line(build: Build, load: Load) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load("rerank", build("bert", labels=("no", "yes")))
    assert str(caught.value).endswith(
        "has 2 labels, and a reranker has one; kind = 'classification' takes pairs of texts, too"
    )
    with pytest.raises(ModelLoadError, match="has no trained classification head") as caught:
        load("rerank", build("bert", num_labels=1))
    assert "\n" not in str(caught.value)


def test_warm_up_items_fit(build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL))
    assert len(run(model, model.warm_up())) == 4

"""Reranking: agreement with transformers, keywords, bad items, models that are no rerankers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from batchery.errors import ModelLoadError
from batchery_worker.models.hardware.transfers import PendingCopy
from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

LABEL = ("relevance",)


#: Pairs of very different lengths.
ITEMS = [
    {"query": "cats", "text": "the cat"},
    {"query": "which ships carry tea to the old harbour", "text": "rain"},
    {"query": "rain", "text": " ".join(CORPUS)},
    {"query": " ".join(CORPUS[1:]), "text": CORPUS[0]},
]


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


def test_a_pair_that_is_too_long_is_cut_or_refused(build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL), max_length=12)
    item = {"query": "cats", "text": CORPUS[0]}
    assert run(model, [item])[0]["truncated"] is True
    (refused,) = run(model, [item], truncate=False)
    assert str(refused.exception) == "text: 15 tokens are more than max_length = 12 tokens"


def test_a_model_that_is_no_reranker_is_refused_in_a_line(build: Build, load: Load) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load("rerank", build("bert", labels=("no", "yes")))
    assert str(caught.value).endswith(
        "has 2 labels, and a reranker has one; kind = 'classification' takes pairs of texts, too"
    )
    with pytest.raises(ModelLoadError, match="has no trained classification head") as caught:
        load("rerank", build("bert", num_labels=1))
    assert "\n" not in str(caught.value)


def test_large_outputs_keep_their_order(build: Build, load: Load) -> None:
    model = load("rerank", build("bert", labels=LABEL))
    outputs = model.forward(model.preprocess(ITEMS[:3]))
    large = PendingCopy(torch.tensor([[18.0], [30.0], [17.0]]))
    scores = [each["score"] for each in model.postprocess(outputs._replace(pending=large))]
    assert 1 > scores[1] > scores[0] > scores[2] > 0.9999999

"""Classification: agreement, labels, scores, keywords."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from support.tiny_models import Build, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

LABELS = ("animal", "weather", "trade")
ARCHITECTURES = [
    "bert",
    "bert-left",
    "roberta",
    "roberta-left",
    "distilbert",
    "llama",
    "mistral-left",
    "gpt2",
    "gpt2-left",
    "xlnet-left",
]


def direct_logits(folder: Path, *texts: str) -> list[float]:
    """What transformers computes, without Batchery."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        logits: list[float] = (
            model(**tokenizer(*([each] for each in texts), return_tensors="pt")).logits[0].tolist()
        )
    return logits


@pytest.mark.parametrize(
    ("architecture", "multi_label"), [("bert", True), *((each, False) for each in ARCHITECTURES)]
)
def test_a_batch_gives_each_text_the_scores_it_has_alone(
    architecture: str, multi_label: bool, build: Build, classifier: Load, texts: list[str]
) -> None:
    model = classifier(build(architecture, labels=LABELS), multi_label=multi_label)
    batched = run(model, texts, top_k=3)
    alone = [run(model, [text], top_k=3)[0] for text in texts]
    for one, other in zip(batched, alone, strict=True):
        assert one["label"] == other["label"]
        assert one["scores"] == pytest.approx(other["scores"], abs=TOLERANCE)
        assert one["tokens"] == other["tokens"]


def test_scores_are_the_softmax_of_what_transformers_computes(
    build: Build, classifier: Load, texts: list[str]
) -> None:
    folder = build("bert", labels=LABELS)
    results = run(classifier(folder), texts, top_k=3)
    for text, result in zip(texts, results, strict=True):
        powers = [math.exp(logit) for logit in direct_logits(folder, text)]
        expected = {name: each / sum(powers) for name, each in zip(LABELS, powers, strict=True)}
        assert result["scores"] == pytest.approx(expected, abs=TOLERANCE)
        assert result["label"] == max(expected, key=lambda name: expected[name])
        assert result["score"] == max(result["scores"].values())


@pytest.mark.parametrize("source", ["config", "setting"])
def test_independent_labels_have_a_sigmoid_each(
    source: str, build: Build, classifier: Load, texts: list[str]
) -> None:
    if source == "config":
        folder = build("bert", labels=LABELS, problem_type="multi_label_classification")
        model = classifier(folder)
    else:
        folder = build("bert", labels=LABELS)
        model = classifier(folder, multi_label=True)
    for text, result in zip(texts, run(model, texts, top_k=3), strict=True):
        logits = zip(LABELS, direct_logits(folder, text), strict=True)
        expected = {name: 1 / (1 + math.exp(-logit)) for name, logit in logits}
        assert result["scores"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (("relevance",), {}),
        (("relevance",), {"problem_type": "regression"}),
        (LABELS, {"problem_type": "regression"}),
        (LABELS, {"problem_type": "single_label_classification"}),
        (LABELS, {"problem_type": "multi_label_classification"}),
    ],
)
def test_scores_are_those_of_the_pipeline(
    labels: tuple[str, ...],
    options: dict[str, str],
    build: Build,
    classifier: Load,
    texts: list[str],
) -> None:
    folder = build("bert", labels=labels, **options)
    find: Any = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    for text, result in zip(texts, run(classifier(folder), texts, top_k=3), strict=True):
        expected = {each["label"]: each["score"] for each in find([text])[0]}
        assert result["scores"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (3, 3), (50, 3)])
def test_top_k_gives_that_many_scores_likeliest_first(
    top_k: int, count: int, build: Build, classifier: Load, texts: list[str]
) -> None:
    for result in run(classifier(build("bert", labels=LABELS)), texts, top_k=top_k):
        scores = list(result["scores"].items())
        assert len(scores) == count
        assert scores == sorted(scores, key=lambda entry: -entry[1])
        assert scores[0] == (result["label"], result["score"])


PAIRS = [
    {"text": "the cat sat on the mat", "text_pair": "rain"},
    {"text": "rain", "text_pair": "ships carry tea and salt from one harbour to the next"},
    {"text": "a dog barked at nine cats", "text_pair": "a dog barked"},
]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_pairs_have_the_scores_that_transformers_computes(
    architecture: str, build: Build, classifier: Load
) -> None:
    folder = build(architecture, labels=LABELS)
    model = classifier(folder)
    results = run(model, [*PAIRS, "the cat"], top_k=3)
    for pair, result in zip(PAIRS, results, strict=False):
        logits = direct_logits(folder, *pair.values())
        expected = torch.tensor(logits).softmax(dim=0).tolist()
        assert [result["scores"][label] for label in LABELS] == pytest.approx(expected, abs=1e-5)
    assert results[-1]["score"] == pytest.approx(run(model, ["the cat"])[0]["score"], abs=1e-5)


@pytest.mark.parametrize("multi_label", [False, True])
def test_raw_scores_are_the_outputs_of_the_model(
    multi_label: bool, build: Build, classifier: Load
) -> None:
    folder = build("bert", labels=LABELS)
    model = classifier(folder, multi_label=multi_label)
    (result,) = run(model, ["the cat"], top_k=3, raw_scores=True)
    logits = direct_logits(folder, "the cat")
    assert [result["scores"][label] for label in LABELS] == pytest.approx(logits, abs=1e-5)
    assert result["score"] == pytest.approx(max(logits), abs=1e-5)


def test_the_longer_text_of_a_pair_is_cut(build: Build, classifier: Load) -> None:
    model = classifier(build("bert", labels=LABELS), max_length=10)
    cut, whole = run(
        model,
        [
            {"text": "the cat sat on the mat and looked", "text_pair": "rain falls"},
            {"text": "the cat sat on the", "text_pair": "rain falls"},
        ],
    )
    assert cut == {**whole, "truncated": True}

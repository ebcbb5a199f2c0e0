"""Classification: the numbers of transformers' own pipeline."""

import inspect
from itertools import product
from typing import Any

import pytest
from transformers import (
    TextClassificationPipeline,
    pipeline,
)

from support.tiny_models import Build, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

LABELS = ("animal", "weather", "trade")
ARCHITECTURES = [
    *("bert", "bert-left", "roberta", "roberta-left", "distilbert", "modernbert", "deberta"),
    *("llama", "mistral-left", "gpt2", "gpt2-left", "xlnet-left"),
]
PROBLEMS = [
    None,
    "regression",
    "multi_label_classification",
    "single_label_classification",
]


@pytest.mark.parametrize(
    ("architecture", "labels", "problem", "function"),
    [
        *((each, LABELS, None, None) for each in ARCHITECTURES),
        *product(["bert"], [LABELS], PROBLEMS, [None, "none", "sigmoid", "softmax"]),
        *product(["bert"], [LABELS[:1]], PROBLEMS[:3], [None, "none", "sigmoid"]),
    ],
)
def test_scores_of_a_batch_are_those_of_each_text(
    architecture: str,
    labels: tuple[str, ...],
    problem: str | None,
    function: str | None,
    build: Build,
    classifier: Load,
    texts: list[str],
) -> None:
    folder = build(architecture, labels, problem_type=problem)
    find: Any = pipeline("text-classification", model=str(folder), device="cpu")
    multi_label = {"sigmoid": True, "softmax": False}.get(function or "")
    model = classifier(folder, multi_label=multi_label)
    results = run(model, texts, top_k=3, raw_scores=function == "none")
    for text, result in zip(texts, results, strict=True):
        (expected,) = find([text], top_k=None, function_to_apply=function)
        assert [*result["scores"]] == [each["label"] for each in expected]
        assert [*result["scores"].values()] == pytest.approx(
            [each["score"] for each in expected], abs=TOLERANCE, rel=TOLERANCE
        )
        assert result["label"] == expected[0]["label"]
        assert result["score"] == next(iter(result["scores"].values()))


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (50, 3)])
def test_top_k_gives_that_many_scores(
    top_k: int, count: int, build: Build, classifier: Load, texts: list[str]
) -> None:
    model = classifier(build("bert", LABELS))
    whole = run(model, texts, top_k=3)
    for result, expected in zip(run(model, texts, top_k=top_k), whole, strict=True):
        assert [*result["scores"]] == [*expected["scores"]][:count]


PAIRS = [
    {"text": "the cat sat on the mat", "text_pair": "rain"},
    {"text": "rain", "text_pair": "ships carry tea and salt from one harbour to the next"},
    {"text": "a dog barked at nine cats", "text_pair": "a dog barked"},
]


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert"])
def test_pairs_have_the_scores_of_the_pipeline_beside_texts(
    architecture: str, build: Build, classifier: Load
) -> None:
    folder = build(architecture, LABELS)
    find: Any = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    for item, result in zip(
        [*PAIRS, "the cat"], run(classifier(folder), [*PAIRS, "the cat"], top_k=3), strict=True
    ):
        expected = {each["label"]: each["score"] for each in find([item])[0]}
        assert result["scores"] == pytest.approx(expected, abs=TOLERANCE)


def test_the_longer_text_of_a_pair_is_cut(build: Build, classifier: Load) -> None:
    model = classifier(build("bert", LABELS), max_length=10)
    cut, whole = run(
        model,
        [
            {"text": "the cat sat on the mat and looked", "text_pair": "rain falls"},
            {"text": "the cat sat on the", "text_pair": "rain falls"},
        ],
    )
    assert cut == {**whole, "truncated": True}


def test_every_parameter_of_the_pipeline_is_known() -> None:
    parameters = {*inspect.signature(TextClassificationPipeline._sanitize_parameters).parameters}
    # Keywords here: raw_scores and the setting multi_label; top_k; truncation, as for all kinds.
    assert parameters - {"self"} == {"function_to_apply", "top_k", "tokenizer_kwargs"}

"""Zero-shot classification: agreement with transformers, keywords, bad items, other models."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import pipeline

from batchery.errors import InvalidItem, ModelLoadError
from batchery.results import Classification
from batchery_worker.batching.planner import plan
from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

KIND = "zero_shot"
NLI = ("contradiction", "neutral", "entailment")
LABELS = ["cats", "rain", "tea and salt"]
ITEMS = ["the cat", CORPUS[3], "rain", CORPUS[1]]
WORDS = " ".join(CORPUS).split()

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=30).map(" ".join)


def direct(folder: Path, text: str, **options: Any) -> dict[str, float]:
    """What transformers' own pipeline gives."""
    found = pipeline("zero-shot-classification", model=str(folder), device="cpu")(text, **options)
    return dict(zip(found["labels"], found["scores"], strict=True))


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize(
    ("architecture", "names", "labels"),
    [
        ("bert", NLI, LABELS),
        ("bert", ("ENTAILMENT", "neutral", "CONTRADICTION"), LABELS),
        ("bert", ("entailment", "not_entailment"), LABELS),
        ("roberta", NLI, LABELS),
        ("modernbert", NLI, LABELS[:1]),
        ("deberta", NLI, LABELS),
        ("bart", NLI, LABELS),
    ],
)
def test_scores_are_those_of_the_pipeline(
    architecture: str,
    names: tuple[str, ...],
    labels: list[str],
    multi_label: bool,
    build: Build,
    load: Load,
) -> None:
    folder = build(architecture, labels=names)
    keywords = {"multi_label": multi_label, "hypothesis_template": "the old {} falls"}
    results = run(load(KIND, folder), ITEMS, labels=labels, **keywords)
    for item, result in zip(ITEMS, results, strict=True):
        expected = direct(folder, item, candidate_labels=labels, **keywords)
        assert result["scores"] == pytest.approx(expected, abs=TOLERANCE)
        assert result["label"] == next(iter(expected))
        assert result["score"] == next(iter(result["scores"].values()))
        assert list(result["scores"].values()) == sorted(result["scores"].values(), reverse=True)


@pytest.fixture(scope="module")
def packed_and_padded(build: Build, load: Load) -> list[Any]:
    """One model, loaded for both forward passes."""
    return [load(KIND, build("bert", labels=NLI), forward=each) for each in ("packed", "padded")]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(items=st.lists(texts, min_size=1, max_size=6))
def test_a_batch_gives_each_text_the_scores_that_it_has_alone(
    items: list[str], packed_and_padded: list[Any]
) -> None:
    for model in packed_and_padded:
        for item, result in zip(items, run(model, items, labels=LABELS), strict=True):
            (alone,) = run(model, [item], labels=LABELS)
            assert result["scores"] == pytest.approx(alone["scores"], abs=TOLERANCE)
            assert result["tokens"] == alone["tokens"]


def test_packed_scores_are_the_padded_ones(packed_and_padded: list[Any]) -> None:
    packed, padded = packed_and_padded
    assert (packed.pads, padded.pads) == (False, True)
    both = (run(model, ITEMS, labels=LABELS) for model in packed_and_padded)
    for one, other in zip(*both, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=TOLERANCE)


def test_an_item_takes_the_tokens_of_all_its_sequences(packed_and_padded: list[Any]) -> None:
    packed, padded = packed_and_padded
    lengths = [len(text.split()) + 3 for text in ("This example is cats.", "This example is rain.")]
    # A full stop is a token.
    expected = sum(3 + length for length in lengths)
    (item,) = packed.preprocess(["a dog"], labels=["cats", "rain"])
    assert packed.tokens(item) == expected
    (result,) = run(packed, ["a dog"], labels=["cats", "rain"])
    assert result["tokens"] == expected
    (longer,) = padded.preprocess(["a dog"], labels=["cats", "tea and salt"])
    assert padded.tokens(longer) == 2 * max(each.shape[1] for each in longer)
    assert padded.pads
    assert len(plan([padded.tokens(longer)] * 4, 2 * padded.tokens(longer), 64, pads=True)) == 2


def test_a_result_is_a_classification(build: Build, load: Load) -> None:
    (result,) = run(load(KIND, build("bert", labels=NLI)), ["the cat"], labels=LABELS)
    parsed = Classification.model_validate(result)
    assert parsed.model_dump(exclude_unset=True) == result
    assert set(parsed.scores or ()) == set(LABELS)


def test_token_ids_give_what_their_text_gives(build: Build, load: Load) -> None:
    model = load(KIND, build("bert", labels=NLI), max_length=14)
    ids = model.tokenizer(CORPUS, add_special_tokens=False)["input_ids"]
    both = (run(model, items, labels=LABELS) for items in (CORPUS, ids))
    for one, other in zip(*both, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=TOLERANCE)
        assert (one["tokens"], one["truncated"]) == (other["tokens"], other["truncated"])


def test_only_the_text_is_cut_or_it_is_refused(build: Build, load: Load) -> None:
    model = load(KIND, build("bert", labels=NLI), max_length=14)
    (cut,) = run(model, [CORPUS[0]], labels=["cats"])
    assert (cut["tokens"], cut["truncated"]) == (14, True)
    words = " ".join(CORPUS[0].split()[:6])
    assert cut["score"] == pytest.approx(run(model, [words], labels=["cats"])[0]["score"])
    refused, kept = run(model, [CORPUS[0], "rain"], labels=["cats"], truncate=False)
    assert str(refused.exception) == "text: 19 tokens are more than max_length = 14 tokens"
    assert kept["tokens"] == 9


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "keyword labels: is required"),
        ({"labels": []}, "keyword labels = []: List should have at least 1 item"),
        ({"labels": ["a"] * 101}, "List should have at most 100 items"),
        ({"labels": "cats"}, "keyword labels = 'cats': Input should be a valid list"),
        ({"labels": ["cats", ""]}, "keyword labels = '': String should have at least 1 character"),
        ({"labels": ["cats", "cats"]}, "keyword labels: two of them are the same"),
        (
            {"labels": ["a"], "hypothesis_template": "This is."},
            "keyword hypothesis_template = 'This is.': needs {} once, in the place of the label",
        ),
        ({"labels": ["a"], "hypothesis_template": "{0.__class__}"}, "needs {} once"),
        ({"labels": ["cat " * 90]}, "leave no room for a text in max_length = 80 tokens"),
        (
            {"labels": ["x" * 5001]},
            "keyword labels: 5018 characters are more than max_chars = 5000",
        ),
        ({"labels": ["half \ud83d"]}, "keyword labels"),
    ],
)
def test_a_bad_keyword_fails_the_batch(
    keywords: dict[str, Any], message: str, build: Build, load: Load
) -> None:
    outcomes = run(load(KIND, build("bert", labels=NLI), max_chars=5000), ["a", "b"], **keywords)
    for outcome in outcomes:
        assert isinstance(outcome.exception, InvalidItem)
        assert message in str(outcome.exception)


def test_a_bad_item_fails_alone(build: Build, load: Load) -> None:
    model = load(KIND, build("bert", labels=NLI))
    before, bad, after = run(model, ["the cat", {"text": "a"}, "the dog"], labels=LABELS)
    assert str(bad.exception) == "text: must be a string, not dict"
    assert before["tokens"] == after["tokens"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("LABEL_0", "LABEL_1"), "none of its labels begins with 'entail': LABEL_0, LABEL_1; name"),
        (
            ("entailment", "neutral"),
            "none of its labels begins with 'contradict': entailment",
        ),
    ],
)
def test_a_model_of_other_labels_is_refused_in_a_line(
    names: tuple[str, ...], message: str, build: Build, load: Load
) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(KIND, build("bert", labels=names))
    assert "\n" not in str(caught.value)


def test_warm_up_items_fit(build: Build, load: Load) -> None:
    model = load(KIND, build("bert", labels=NLI))
    assert len(run(model, model.warm_up(), **model.sample_keywords)) == 4

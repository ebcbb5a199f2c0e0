"""Zero-shot classification: agreement with transformers, keywords, bad items, other models."""

from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from batchery.errors import ModelLoadError
from batchery_worker.batching.planner import plan
from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

KIND = "zero_shot"
NLI = ("contradiction", "neutral", "entailment")
LABELS = ["cats", "rain", "tea and salt"]
ITEMS = ["the cat", CORPUS[3], "rain", CORPUS[1]]


def direct(folder: Path, text: str, **options: Any) -> dict[str, float]:
    """What transformers' own pipeline gives."""
    found = pipeline("zero-shot-classification", model=str(folder), device="cpu")(text, **options)
    return dict(zip(found["labels"], found["scores"], strict=True))


@pytest.mark.parametrize(
    ("architecture", "names", "labels", "multi_label"),
    [
        ("bert", NLI, LABELS, False),
        ("bert", NLI, LABELS, True),
        ("bert", ("ENTAILMENT", "neutral", "CONTRADICTION"), LABELS, False),
        ("bert", ("entailment", "not_entailment"), LABELS, True),
        ("roberta", NLI, LABELS, False),
        ("modernbert", NLI, LABELS[:1], True),
        ("deberta", NLI, LABELS, False),
        ("bart", NLI, LABELS, True),
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

"""Token classification: agreement with transformers, offsets, keywords, bad items, other models."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, pipeline

from batchery_worker.models.token_classification import Word, find_entities
from support.tiny_models import CORPUS, Build, Copy, Load, run

#: Greatest difference of any score in fp32: the sums run in another order.
TOLERANCE = 5e-6

KIND = "token_classification"
HEAD = "TokenClassification"
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
AGGREGATIONS = ["none", "simple", "first", "average", "max"]
ITEMS = [
    "the cat",
    " ".join(CORPUS),
    "rain",
    "Zürich's  old harbour, 🙂 and naïve dogs barking: greenest hillside!",
    "  ships [SEP] carrying saltier tea ",
]


def use_subwords(folder: Path) -> Path:
    """Gives a model a tokenizer that splits words, as BERT's does, with as many tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[CLS]", "[PAD]", "[UNK]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=74, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, "zürich naïve"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 3)]
    )
    named = dict(zip(("cls_token", "pad_token", "unk_token", "sep_token"), specials, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


@pytest.fixture
def split(build: Build, copied: Copy) -> Path:
    """A model whose tokenizer splits words."""
    options = {"vocab_size": 80, "max_position_embeddings": 200}
    return use_subwords(copied(build("bert", labels=TAGS, head=HEAD, **options)))


def direct(folder: Path, text: str, aggregation: str) -> list[dict[str, Any]]:
    """What transformers' own pipeline gives."""
    find = pipeline("token-classification", model=str(folder), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it guesses where words begin
        found: Any = find(text, aggregation_strategy=aggregation)
    return [
        {
            "label": each["entity" if aggregation == "none" else "entity_group"],
            "score": pytest.approx(float(each["score"]), abs=TOLERANCE),
            "text": text[each["start"] : each["end"]],
            "start": each["start"],
            "end": each["end"],
        }
        for each in found
    ]


@pytest.mark.parametrize(
    ("architecture", "aggregation"),
    [*product(["bert"], AGGREGATIONS), *product(["roberta", "modernbert", "deberta"], ["average"])],
)
def test_entities_are_those_of_the_pipeline(
    architecture: str, aggregation: str, build: Build, load: Load
) -> None:
    folder = build(architecture, labels=TAGS, head=HEAD)
    results = run(load(KIND, folder), ITEMS, aggregation=aggregation)
    found = [result["entities"] for result in results]
    assert found == [direct(folder, item, aggregation) for item in ITEMS]
    assert any(len(entities) > 3 for entities in found)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entities_of_split_words_are_those_of_the_pipeline(
    aggregation: str, split: Path, load: Load
) -> None:
    model = load(KIND, split)
    assert model.tokenizer.tokenize("catlike")[1].startswith("##")
    for item, result in zip(ITEMS, run(model, ITEMS, aggregation=aggregation), strict=True):
        assert result["entities"] == direct(split, item, aggregation), item


def test_offsets_are_characters_of_the_text_that_was_sent(split: Path, load: Load) -> None:
    for item, result in zip(ITEMS, run(load(KIND, split), ITEMS, aggregation="none"), strict=True):
        for entity in result["entities"]:
            assert item[entity["start"] : entity["end"]] == entity["text"]
            assert entity["text"].strip()


def test_a_text_may_lose_its_beginning(split: Path, load: Load) -> None:
    model = load(KIND, split, max_length=5)
    (cut,) = run(model, [CORPUS[0]], truncation_direction="left", aggregation="none")
    (alone,) = run(model, ["at the dog"], aggregation="none")
    shift = CORPUS[0].index("at the dog")
    assert [each["text"] for each in cut["entities"]] == [
        each["text"] for each in alone["entities"]
    ]
    assert all(each["start"] >= shift for each in cut["entities"])
    (refused,) = run(model, [CORPUS[0]], truncate=False)
    assert "are more than max_length = 5 tokens" in str(refused.exception)


def word(start: int, end: int, label: str, score: float, continues: bool = False) -> Word:
    scores = np.full(len(TAGS), (1 - score) / len(TAGS), dtype=np.float32)
    scores[TAGS.index(label)] = score
    return Word(start, end, scores, continues)


def test_tags_are_joined_up_to_the_next_beginning() -> None:
    tokens = [
        word(0, 3, "B-PER", 0.9),
        word(4, 8, "I-PER", 0.7),
        word(9, 12, "B-PER", 0.8),
        word(13, 16, "O", 0.9),
        word(17, 20, "I-LOC", 0.6),
        word(21, 24, "I-PER", 0.6),
    ]
    found = find_entities(tokens, TAGS, "simple")
    assert [(each.label, each.start, each.end) for each in found] == [
        ("PER", 0, 8),
        ("PER", 9, 12),
        ("LOC", 17, 20),
        ("PER", 21, 24),
    ]
    assert found[0].score == pytest.approx(0.8)
    assert find_entities(tokens, TAGS, "none")[0].label == "B-PER"


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("first", ("LOC", 0.5)), ("max", ("PER", 0.9)), ("average", ("PER", 0.46))],
)
def test_a_word_has_one_label(aggregation: str, expected: tuple[str, float]) -> None:
    tokens = [word(0, 3, "B-LOC", 0.5), word(3, 5, "B-PER", 0.9, continues=True)]
    (found,) = find_entities(tokens, TAGS, aggregation)
    assert (found.label, found.start, found.end) == (expected[0], 0, 5)
    assert found.score == pytest.approx(expected[1], abs=0.05)

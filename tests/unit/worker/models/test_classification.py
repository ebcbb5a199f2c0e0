"""Classification, zero-shot, and entities of tokens: the numbers of transformers' own pipelines."""

import inspect
import warnings
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    PreTrainedTokenizerFast,
    TextClassificationPipeline,
    TokenClassificationPipeline,
    ZeroShotClassificationPipeline,
    pipeline,
)
from transformers.pipelines.token_classification import AggregationStrategy

from batchery.errors import ModelLoadError
from batchery_worker.batching.planner import plan
from batchery_worker.models.inputs import TokenClassificationKeywords
from support.tiny_models import CORPUS, Build, Load, run

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


NLI = ("contradiction", "neutral", "entailment")
TOPICS = ["cats", "rain", "tea and salt"]
TEXTS = ["the cat", CORPUS[3], "rain", CORPUS[1]]


@pytest.mark.parametrize(
    ("architecture", "names", "labels", "multi_label"),
    [
        *(("bert", NLI, TOPICS, each) for each in (False, True)),
        ("bert", ("ENTAILMENT", "neutral", "CONTRADICTION"), TOPICS, True),
        ("bert", ("neutral", "contradiction", "entails"), TOPICS, True),
        ("bert", ("entailment", "not_entailment"), TOPICS, True),
        ("roberta", NLI, TOPICS, False),
        ("modernbert", NLI, TOPICS[:1], False),
        ("deberta", NLI, TOPICS, False),
        ("bart", NLI, TOPICS, True),
    ],
)
def test_labels_of_the_caller_have_the_scores_of_the_pipeline(
    architecture: str,
    names: tuple[str, ...],
    labels: list[str],
    multi_label: bool,
    build: Build,
    load: Load,
) -> None:
    folder = build(architecture, names)
    find: Any = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    for template in ({}, {"hypothesis_template": "the old {} falls"}):
        keywords = {"multi_label": multi_label, **template}
        results = run(load("zero_shot", folder), TEXTS, labels=labels, **keywords)
        for text, result in zip(TEXTS, results, strict=True):
            expected = find(text, candidate_labels=labels, **keywords)
            assert [*result["scores"]] == expected["labels"]
            assert [*result["scores"].values()] == pytest.approx(expected["scores"], abs=TOLERANCE)
            assert (result["label"], result["score"]) == next(iter(result["scores"].items()))


def test_an_item_takes_the_tokens_of_all_its_sequences(build: Build, load: Load) -> None:
    packed, padded = (
        load("zero_shot", build("bert", NLI), forward=each) for each in ("packed", "padded")
    )
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


def test_only_the_text_is_cut_or_it_is_refused(build: Build, load: Load) -> None:
    model = load("zero_shot", build("bert", NLI), max_length=14)
    (cut,) = run(model, [CORPUS[0]], labels=["cats"])
    assert (cut["tokens"], cut["truncated"]) == (14, True)
    words = " ".join(CORPUS[0].split()[:6])
    ids = model.tokenizer(CORPUS[0], add_special_tokens=False)["input_ids"]
    for same in run(model, [words, ids], labels=["cats"]):
        assert cut["score"] == pytest.approx(same["score"], abs=TOLERANCE)
    refused, kept = run(model, [CORPUS[0], "rain"], labels=["cats"], truncate=False)
    assert str(refused.exception) == "text: 19 tokens are more than max_length = 14 tokens"
    assert kept["tokens"] == 9


def test_a_model_of_other_labels_is_refused_in_a_line(build: Build, load: Load) -> None:
    with pytest.raises(ModelLoadError, match="none of its labels begins with 'entail': LABEL_0,"):
        load("zero_shot", build("bert", ("LABEL_0", "LABEL_1")))


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "S-PER", "E-LOC")
HEAD = "TokenClassification"
AGGREGATIONS: list[str] = [each.value for each in AggregationStrategy]
ITEMS = [
    "the cat",
    " ".join(CORPUS),
    "rain",
    "Zürich's  old harbour, 🙂 and naïve dogs barking: greenest hillside!",
    "  ships [SEP] carrying saltier tea ",
    # More than the model reads.
    " ".join(CORPUS * 3),
]


@pytest.fixture(scope="session")
def tagger(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves a model of tags: `tagger("bert")`; the tokenizer of `split` splits words, as BERT's."""

    def saved(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        options = {"vocab_size": 80} if name == "split" else {}
        architecture = "bert" if name == "split" else name
        for file in build(architecture, TAGS, HEAD, **options).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tokenizer = make_splitter() if name == "split" else None
        tokenizer = tokenizer or PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer.model_max_length = 60
        tokenizer.save_pretrained(folder)
        return folder

    return saved


def make_splitter() -> PreTrainedTokenizerFast:
    """A tokenizer that splits words, as BERT's does."""
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("architecture", ["bert", "split", "roberta", "modernbert", "deberta"])
def test_entities_are_those_of_the_pipeline(architecture: str, tagger: Any, load: Load) -> None:
    folder = tagger(architecture)
    model = load("token_classification", folder)
    find: Any = pipeline("token-classification", model=str(folder), device="cpu")
    labels: set[str] = set()
    for aggregation, ignored in product(AGGREGATIONS, [None, [], ["O", "LOC", "B-PER"]]):
        keywords = {} if ignored is None else {"ignore_labels": ignored}
        results = run(model, ITEMS, aggregation=aggregation, **keywords)
        for text, result in zip(ITEMS, results, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it guesses where words begin
                expected = find(text, aggregation_strategy=aggregation, **keywords)
            assert result["entities"] == [
                {
                    "label": each["entity" if aggregation == "none" else "entity_group"],
                    "score": pytest.approx(float(each["score"]), abs=TOLERANCE),
                    "text": text[each["start"] : each["end"]],
                    "start": each["start"],
                    "end": each["end"],
                }
                for each in expected
            ]
        if aggregation != "none":
            labels |= {each["label"] for result in results for each in result["entities"]}
    assert labels - {"O"} <= {"PER", "LOC"}
    assert labels - {"O"}


def test_a_text_may_lose_its_beginning(tagger: Any, load: Load) -> None:
    model = load("token_classification", tagger("split"), max_length=5)
    (cut,) = run(model, [CORPUS[0]], truncation_direction="left", aggregation="none")
    (alone,) = run(model, ["at the dog"], aggregation="none")
    shift = CORPUS[0].index("at the dog")
    assert [each["text"] for each in cut["entities"]] == [
        each["text"] for each in alone["entities"]
    ]
    assert all(each["start"] >= shift for each in cut["entities"])
    (refused,) = run(model, [CORPUS[0]], truncate=False)
    assert "are more than max_length = 5 tokens" in str(refused.exception)


def test_every_parameter_of_the_pipelines_is_known() -> None:
    def parameters(function: Any) -> set[str]:
        return {*inspect.signature(function).parameters} - {"self"}

    # Keywords here: raw_scores and the setting multi_label; top_k; truncation, as for all kinds.
    assert parameters(TextClassificationPipeline._sanitize_parameters) == {
        *("function_to_apply", "top_k", "tokenizer_kwargs"),
    }
    # Texts that were split before, and long ones in parts, are not taken.
    assert parameters(TokenClassificationPipeline._sanitize_parameters) == {
        *("ignore_labels", "aggregation_strategy"),
        *("is_split_into_words", "delimiter", "offset_mapping", "stride"),
    }
    assert parameters(ZeroShotClassificationPipeline.preprocess) == {
        *("inputs", "candidate_labels", "hypothesis_template"),
    }
    assert parameters(ZeroShotClassificationPipeline.postprocess) == {
        *("model_outputs", "multi_label"),
    }
    known = TokenClassificationKeywords.model_fields["aggregation"].annotation
    assert [*get_args(known)] == AGGREGATIONS

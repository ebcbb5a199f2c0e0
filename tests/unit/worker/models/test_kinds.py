"""What holds for every kind: batches, bad items, bad keywords, results of the public type."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from batchery import results
from batchery.errors import InvalidItem, ModelLoadError
from batchery_worker.models.hardware.transfers import PendingCopy
from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any number in fp32, for numbers up to 1: the sums run in another order.
TOLERANCE = 5e-6

TEXTS = ["the cat", " ".join(CORPUS), "rain", CORPUS[1], "ships carry tea to the old dog"]


def pair(text: str) -> dict[str, str]:
    return {"query": CORPUS[2], "text": text}


class Kind(NamedTuple):
    """A kind of model, and how tests make one.

    Attributes:
        result: Its public type.
        item: Makes an item of a text.
        labels: Of its model.
        head: Of its model, as transformers calls it.
        keywords: That its jobs must have.
        lacks: What the error says of a model without a head; empty if it needs none.
    """

    result: Any
    item: Callable[[str], Any] = str
    labels: tuple[str, ...] = ()
    head: str = ""
    keywords: dict[str, Any] = {}  # noqa: RUF012 - never changed
    lacks: str = ""


KINDS = {
    "embedding": Kind(results.Embedding),
    "sparse_embedding": Kind(
        results.SparseEmbedding, head="MaskedLM", lacks="no trained masked language model"
    ),
    "multi_vector_embedding": Kind(results.MultiVectorEmbedding),
    "classification": Kind(
        results.Classification, labels=("a", "b", "c"), lacks="no trained classification head"
    ),
    "rerank": Kind(
        results.Score, item=pair, labels=("fits",), lacks="no trained classification head"
    ),
}

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def tiny(build: Build, load: Load) -> Callable[..., Any]:
    """Loads a BERT of a kind: `tiny("rerank", forward="padded")`."""

    def made(kind: str, **settings: Any) -> Any:
        return load(kind, build("bert", KINDS[kind].labels, KINDS[kind].head), **settings)

    return made


def assert_close(one: Any, other: Any) -> None:
    """Compares results, numbers within the tolerance."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = [*one.values()], [other[key] for key in one]
    if isinstance(one, list) and one and not isinstance(one[0], float):
        for each, its_other in zip(one, other, strict=True):
            assert_close(each, its_other)
    else:
        assert one == pytest.approx(other, abs=TOLERANCE)


@EACH_KIND
def test_a_batch_gives_each_item_what_it_has_alone_packed_and_padded(
    kind: str, tiny: Callable[..., Any]
) -> None:
    items, keywords = [*map(KINDS[kind].item, TEXTS)], KINDS[kind].keywords
    packed, padded = tiny(kind, forward="packed"), tiny(kind, forward="padded")
    assert (packed.pads, padded.pads) == (False, True)
    alone = [run(padded, [item], **keywords)[0] for item in items]
    for model in (packed, padded):
        for result, expected in zip(run(model, items, **keywords), alone, strict=True):
            assert_close(result, expected)


@EACH_KIND
def test_a_result_has_the_public_type_also_where_it_leaves_as_json(
    kind: str, tiny: Callable[..., Any]
) -> None:
    items, keywords = [*map(KINDS[kind].item, TEXTS)], KINDS[kind].keywords
    model = tiny(kind, max_length=20)
    plain = run(model, items, **keywords)
    for result in plain:
        parsed = KINDS[kind].result.model_validate(result)
        assert parsed.model_dump(exclude_unset=True) == result
    assert [each.get("truncated", False) for each in plain][:2] == [False, True]
    model.give_json()
    assert [getattr(each, "value", each) for each in run(model, items, **keywords)] == plain


@pytest.mark.parametrize(
    ("kind", "item", "message"),
    [
        *((kind, KINDS[kind].item(""), "text: is empty") for kind in KINDS),
        ("embedding", None, "text: must be a string, not NoneType"),
        ("embedding", b"bytes", "text: must be a string, not bytes"),
        ("embedding", {"text": "a"}, "text: must be a string, not dict"),
        ("embedding", "x" * 5001, "text: 5001 characters are more than max_chars = 5000"),
        ("embedding", "half \ud83d", "text: is not Unicode: half a surrogate pair at character 5"),
        ("embedding", ["a", "list"], "token ids: position 0 has a str, not an integer"),
        ("embedding", [4, True], "token ids: position 1 has a bool, not an integer"),
        ("embedding", [4, 900], "token ids: 900 at position 1 is none of the model's, which are 0"),
        ("embedding", [-1], "token ids: -1 at position 0 is none of the model's"),
        ("embedding", [], "token ids: the list is empty"),
        ("embedding", [4] * 5001, "token ids: 5001 are more than max_chars = 5000"),
        ("classification", {"text": "a"}, "must be a dictionary with 'text' and 'text_pair'"),
        ("classification", {"text": 3, "text_pair": "a"}, "text: must be a string, not int"),
        ("classification", {"text": "a", "text_pair": ""}, "text_pair: is empty"),
        ("rerank", "a text", "item: must be a dictionary with 'query' and 'text', not str"),
        ("rerank", {"text": "a"}, "must be a dictionary with 'query' and 'text', not 'text'"),
        ("rerank", {"query": "a", "text": "b", "id": 3}, "not 'query', 'text', 'id'"),
        ("rerank", {"query": "", "text": "a"}, "query: is empty"),
    ],
)
def test_a_bad_item_fails_alone(
    kind: str, item: Any, message: str, tiny: Callable[..., Any]
) -> None:
    good, keywords = [*map(KINDS[kind].item, ["the cat", "a dog"])], KINDS[kind].keywords
    model = tiny(kind, max_chars=5000)
    before, bad, after = run(model, [good[0], item, good[1]], **keywords)
    assert isinstance(bad.exception, InvalidItem)
    assert message in str(bad.exception)
    for result, expected in zip((before, after), run(model, good, **keywords), strict=True):
        assert_close(result, expected)


@pytest.mark.parametrize(
    ("kind", "keywords", "message"),
    [
        *((kind, {"temperature": 1}, "keyword temperature: no such keyword") for kind in KINDS),
        ("embedding", {"prompt": "passage"}, "keyword prompt = 'passage': there are document,"),
        ("embedding", {"prompt": 3}, "keyword prompt = 3: "),
        ("embedding", {"dimensions": 33}, "keyword dimensions = 33: the model's vectors have 32"),
        ("embedding", {"dimensions": 0}, "keyword dimensions = 0: "),
        ("embedding", {"dimensions": "64"}, "keyword dimensions = '64': "),
        ("embedding", {"normalize": "yes"}, "keyword normalize = 'yes': "),
        ("embedding", {"encoding": "hex"}, "keyword encoding = 'hex': "),
        ("embedding", {"truncate": "no"}, "keyword truncate = 'no': "),
        ("embedding", {"truncation_direction": "up"}, "keyword truncation_direction = 'up': "),
        ("multi_vector_embedding", {"encoding": "hex"}, "keyword encoding = 'hex'"),
        ("sparse_embedding", {"top_k": 0}, "keyword top_k = 0"),
        ("classification", {"top_k": 0}, "keyword top_k = 0: "),
        ("classification", {"top_k": True}, "keyword top_k = True: "),
        ("classification", {"max_length": 7}, "keyword max_length = 7"),
        ("rerank", {"raw_scores": 1}, "keyword raw_scores = 1: "),
    ],
)
def test_a_bad_keyword_fails_all_items_that_share_it(
    kind: str, keywords: dict[str, Any], message: str, tiny: Callable[..., Any]
) -> None:
    items = [*map(KINDS[kind].item, ["a", "b"])]
    outcomes = run(tiny(kind, max_chars=5000), items, **{**KINDS[kind].keywords, **keywords})
    for outcome in outcomes:
        assert isinstance(outcome.exception, InvalidItem)
        assert message in str(outcome.exception)


@EACH_KIND
def test_a_number_that_is_none_fails_its_item_alone(kind: str, tiny: Callable[..., Any]) -> None:
    items, keywords = [*map(KINDS[kind].item, TEXTS[:3])], KINDS[kind].keywords
    model = tiny(kind)
    outputs = model.forward(model.preprocess(items, **keywords), **keywords)
    values = outputs.pending.wait().clone()
    # Of the second item: of those of one row per token, some token.
    row = outputs.heads[0]["tokens"] + 2 if model.per_token else 1
    values[row, 0] = float("nan")
    outcomes = model.postprocess(outputs._replace(pending=PendingCopy(values)), **keywords)
    assert [isinstance(each, dict) for each in outcomes] == [True, False, True]
    assert "not finite" in str(outcomes[1].exception)


@EACH_KIND
@pytest.mark.parametrize("max_length", [30, None])
def test_warm_up_items_fit(kind: str, max_length: int | None, tiny: Callable[..., Any]) -> None:
    model = tiny(kind, max_length=max_length, overflow="refuse")
    items = [*model.warm_up()]
    assert items
    assert all(isinstance(each, dict) for each in run(model, items, **model.sample_keywords))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.lacks])
def test_a_model_without_the_head_is_refused_in_a_line(kind: str, build: Build, load: Load) -> None:
    with pytest.raises(ModelLoadError, match=KINDS[kind].lacks) as caught:
        load(kind, build("bert"))
    assert "\n" not in str(caught.value)

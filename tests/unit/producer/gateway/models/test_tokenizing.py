"""Tokens in the gateway: places in bytes, prompts, special tokens."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.gateway.models.tokenizing import ModelTokenizer, bytes_of_chars
from batchery_producer.gateway.problems import Problem
from support.tiny_models import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    """A small one with special tokens 0 in front and 3 behind."""
    library: Any = make_tokenizer().backend_tokenizer
    return ModelTokenizer(library, {"query": "the "}, None, ([0], [3]))


@given(st.text(max_size=50))
def test_places_are_those_of_the_text_in_utf8(text: str) -> None:
    places = bytes_of_chars(text).tolist()
    assert places == [len(text[:end].encode()) for end in range(len(text) + 1)]


def test_a_text_without_tokens_has_special_ones_alone(tokenizer: ModelTokenizer) -> None:
    (tokens,) = orjson.loads(tokenizer.tokens([" "], special=True))
    assert [each["id"] for each in tokens] == [0, 3]
    assert orjson.loads(tokenizer.tokens([" "], special=False)) == [[]]


@pytest.mark.parametrize(
    ("ids", "without"),
    [
        ([0, 5, 6, 3], [5, 6]),
        ([5, 6], [5, 6]),
        ([0, 5], [0, 5]),
        ([0, 3], []),
        ([0], [0]),
        ([0, 0, 3, 3], [0, 3]),
    ],
)
def test_special_tokens_around_ids_are_taken_off(
    tokenizer: ModelTokenizer, ids: list[int], without: list[int]
) -> None:
    assert tokenizer.without_frame(ids) == without


def test_prompt_is_chosen_by_its_name(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.prompt(None) == ""
    assert tokenizer.prompt("query") == "the "
    with pytest.raises(Problem, match="no such prompt; there are: query"):
        tokenizer.prompt("passage")

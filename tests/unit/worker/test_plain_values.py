"""Plain values, and their JSON: what Python's own encoder would say, value by value."""

import json
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.plain_values import MAX_PLAIN_INT, Encoded, encoded, is_plain, plain_json

#: Of every plane, halves of surrogate pairs included.
TEXT = st.text(st.characters(codec=None, exclude_categories=()))

Values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXT, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=Values)
def test_plain_json_reads_like_the_json_of_python_s_encoder(value: Any) -> None:
    # As texts, since NaN is not itself.
    assert repr(json.loads(plain_json(value))) == repr(json.loads(json.dumps(value)))


def test_infinite_numbers_are_written_like_celery_does() -> None:
    assert plain_json([float("nan"), float("inf"), -float("inf")]) == b"[NaN,Infinity,-Infinity]"


def test_deep_values_are_written_down_to_python_s_limit() -> None:
    value: list[Any] = []
    for _ in range(400):
        value = [value]
    assert plain_json(value) == b"[" * 401 + b"]" * 401


class Odd(int):
    """A number that is more than a number."""


#: Values of JSON's own types, and others.
PLAIN: list[Any] = [None, True, 0, -1, 0.5, "x", [], (1, 2.5), {"a": [None, {"b": ()}]}]
PLAIN += [MAX_PLAIN_INT - 1, [1 - MAX_PLAIN_INT, 7]]
OTHERS: list[Any] = [b"x", {1, 2}, 1j, Odd(1), [Odd(1)], {1: 2}, {"a": b""}, [[b""]]]
OTHERS += [MAX_PLAIN_INT, [1, -MAX_PLAIN_INT], [0.5, MAX_PLAIN_INT]]


@pytest.mark.parametrize(("values", "are_plain"), [(PLAIN, True), (OTHERS, False)])
def test_values_of_json_s_own_types_are_plain(values: list[Any], are_plain: bool) -> None:
    assert [each for each in values if is_plain(each) != are_plain] == []


@pytest.mark.parametrize("outer", [lambda inner: [inner], lambda inner: {"key": inner}])
def test_values_nested_too_deeply_are_not_plain(outer: Callable[[Any], Any]) -> None:
    value: Any = "inner"
    for _ in range(100_000):
        value = outer(value)
    assert not is_plain(value)


def test_a_known_value_is_not_decoded_again() -> None:
    known = Encoded(b"not JSON", value=7)
    assert known.value == 7


def test_a_value_is_decoded_once() -> None:
    unknown = Encoded(b"[1, 2]")
    assert unknown.value == [1, 2]
    assert unknown.value is unknown.value


DAY = date(2031, 5, 17)


@pytest.mark.parametrize("value", [[1, "größer"], DAY, {"day": [DAY]}], ids=repr)
def test_encoded_value_is_read_as_what_it_was(value: Any) -> None:
    found = encoded(value)
    assert found is not None
    assert Encoded(found.json).value == value


def test_only_a_plain_value_is_written_in_utf_8() -> None:
    texts = [found.json for value in ("ü", ["ü", DAY]) if (found := encoded(value))]
    assert [text.isascii() for text in texts] == [False, True]


def test_plain_value_with_celery_s_mark_of_a_type_is_encoded_in_the_ordinary_way() -> None:
    assert encoded({"__type__": "date"}) is None

"""Equal inputs have one name, and no two others have the same."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchery_worker.result_cache import canonical, digests

VERSION = ("embed", "1", "")

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
PLAIN = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@given(PLAIN, PLAIN)
@example({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1})
def test_two_inputs_have_the_same_key_exactly_if_they_are_equal_as_json(
    one: Any, other: Any
) -> None:
    assert (canonical(one) == canonical(other)) == (spelled(one) == spelled(other))
    first, second = digests(VERSION, {}, [one, other])
    assert (first == second) == (spelled(one) == spelled(other))
    assert first is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, -0.0),
        ("1", 1),
        ("", None),
        ("[]", []),
        ("é", "e\u0301"),
        ("a", "a "),
        ("s", '"s"'),
    ],
    ids=str,
)
def test_similar_inputs_have_different_keys(one: Any, other: Any) -> None:
    first, second = digests(VERSION, {}, [one, other])
    assert first != second


@pytest.mark.parametrize(
    "item", [Decimal(1), {1: "a"}, b"bytes", 2**70, {"a": {"b": Decimal(1)}}], ids=str
)
def test_value_that_json_cannot_write_has_no_key(item: Any) -> None:
    assert digests(VERSION, {}, [item, "text"])[0] is None
    assert digests(VERSION, {}, [item, "text"])[1] is not None
    assert digests(VERSION, {"option": item}, ["text"]) == [None]


def test_half_a_surrogate_pair_and_endless_nesting_raise_nothing() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    first, second = digests(VERSION, {}, ["\ud800", nested])
    assert first is not None
    assert second is None


def test_task_version_model_and_keywords_are_part_of_the_key() -> None:
    variants: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("embed", "1", ""), {}),
        (("embed", "2", ""), {}),
        (("embed2", "1", ""), {}),
        (("embed", "1", "model"), {}),
        (("embed", "", "1"), {}),
        (("embed", "1", ""), {"prompt": "query"}),
        (("embed", "1", ""), {"prompt": None}),
        (("embed", "1", ""), {"query": "prompt"}),
    ]
    names = {digests(version, keywords, ["text"])[0] for version, keywords in variants}
    assert len(names) == len(variants)


@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_end_of_one_part_cannot_look_like_the_start_of_the_next(
    a: str, b: str, c: str, d: str
) -> None:
    one = digests(VERSION, {"k": a}, [b])
    other = digests(VERSION, {"k": c}, [d])
    assert (one == other) == ((a, b) == (c, d))

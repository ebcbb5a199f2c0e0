"""Messages that carry several items."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery import Failed, Ignore, InvalidItem, RetryAfter
from batchery.protocol.headers import (
    HEADER,
    MAX_ITEMS,
    VERSION,
    build_outcome,
    build_result,
    read_items,
)


def test_message_without_header_has_one_item() -> None:
    assert read_items(["a", "b"], None) == ([["a", "b"]], False)
    assert read_items(None, None) == ([None], False)


def test_header_without_n_means_one_item() -> None:
    assert read_items(["a"], {"v": VERSION, "reply": "x"}) == ([["a"]], False)


@given(items=st.lists(st.integers(), min_size=1, max_size=50))
def test_header_with_n_means_n_items(items: list[int]) -> None:
    assert read_items(items, {"v": VERSION, "n": len(items)}) == (items, True)


@pytest.mark.parametrize(
    "header",
    [1, "v1", [], [1], True, {}, {"v": 2, "n": 1}, {"n": 1}, {"v": "1", "n": 1}, {"v": None}],
)
def test_a_header_of_another_form_or_version_is_refused(header: Any) -> None:
    with pytest.raises(InvalidItem, match=f"header {HEADER!r}.*expected an object with v=1"):
        read_items(["a"], header)


@pytest.mark.parametrize("count", [0, -1, 1.0, "1", True, [], MAX_ITEMS + 1, 10**30])
def test_header_with_impossible_n_is_refused(count: Any) -> None:
    with pytest.raises(InvalidItem, match=f"expected 1 to {MAX_ITEMS} items"):
        read_items(["a"], {"v": VERSION, "n": count})


@pytest.mark.parametrize(
    ("argument", "found"),
    [(["a"], "1 item"), ([], "0 items"), ("ab", "str"), ({"a": 1, "b": 2}, "dict"), (2, "int")],
)
def test_argument_that_does_not_fit_n_is_refused(argument: Any, found: str) -> None:
    with pytest.raises(InvalidItem, match=f"n=2, but the argument is {found}"):
        read_items(argument, {"v": VERSION, "n": 2})


def test_a_hostile_header_does_not_fill_the_log() -> None:
    with pytest.raises(InvalidItem) as caught:
        read_items(["a"], {"v": "x" * 1_000_000})
    assert len(str(caught.value)) < 300


def test_result_has_the_outcome_of_each_item() -> None:
    outcomes = [
        {"score": 1},
        None,
        Failed("why"),
        Failed(LookupError("gone")),
        RetryAfter(2.5),
        RetryAfter(1, ConnectionError("down")),
        Ignore("no"),
    ]
    assert build_result(outcomes) == [
        {"ok": {"score": 1}},
        {"ok": None},
        {"error": {"type": "ItemFailed", "message": "why"}},
        {"error": {"type": "LookupError", "message": "gone"}},
        {
            "error": {
                "type": "InvalidItem",
                "message": "try again in 2.5 s",
                "retry_after_s": 2.5,
            }
        },
        {"error": {"type": "ConnectionError", "message": "down", "retry_after_s": 1}},
        {"error": {"type": "Ignore", "message": "no"}},
    ]
    assert build_result([]) == []


def test_exception_without_readable_text_does_not_fail_other_items() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    first, second = build_result([Failed(Mute()), 1])
    assert first["error"]["type"] == "Mute"
    assert second == {"ok": 1}


def test_header_may_ask_for_the_plain_values() -> None:
    assert read_items(["a"], {"v": VERSION, "n": 1, "values": True}) == (["a"], "values")
    assert read_items(["a"], {"v": VERSION, "n": 1, "values": "yes"}) == (["a"], True)
    assert read_items(["a"], {"v": VERSION, "values": True}) == ([["a"]], False)


def test_outcome_of_a_job_has_the_form_that_its_header_asks_for() -> None:
    assert build_outcome([1], False) == 1
    assert build_outcome([1, None], True) == [{"ok": 1}, {"ok": None}]
    assert build_outcome((1, None), "values") == [1, None]
    ignored = Ignore("no")
    assert build_outcome([1, ignored, Failed("why")], "values") is ignored


@pytest.mark.parametrize(
    ("outcome", "kind", "text"),
    [
        (Failed(LookupError("gone")), LookupError, "gone"),
        (RetryAfter(1, ConnectionError("down")), ConnectionError, "down"),
        (RetryAfter(2.5), InvalidItem, "try again in 2.5 s"),
    ],
)
def test_first_item_without_a_value_fails_a_job_of_plain_values(
    outcome: Any, kind: type[Exception], text: str
) -> None:
    failed = build_outcome([1, outcome, Failed("later")], "values")
    assert isinstance(failed, Failed)
    assert type(failed.exception) is kind
    assert str(failed.exception) == text

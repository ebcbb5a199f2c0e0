"""The headers of a message: for whom and until when it is, when it was sent, who reads of it."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery import BatchArgumentError, Failed, Ignore, InvalidItem, RetryAfter
from batchery.protocol.headers import (
    DEADLINE,
    GRAIN_S,
    HEADER,
    MAX_AGE_S,
    MAX_ITEMS,
    MAX_KEEP_S,
    MAX_TENANT_CHARS,
    SENT_AT,
    TENANT,
    VERSION,
    build_outcome,
    build_result,
    deadline_header,
    expires_s,
    is_streamed,
    read_deadline,
    read_items,
    read_keep_s,
    read_sent_at,
    read_stream_name,
    read_tenant,
    sent_now,
    with_tenant,
)

NOW_S = 1_790_000_000.5


def test_the_header_says_the_time_in_milliseconds() -> None:
    before_s = time.time()
    sent_s = sent_now()[SENT_AT]
    assert before_s - 0.001 <= sent_s <= time.time() + 0.001
    assert sent_s == round(sent_s, 3)


@pytest.mark.parametrize("sent_s", [NOW_S - 12.25, NOW_S, int(NOW_S) - 3, NOW_S - MAX_AGE_S])
def test_a_time_is_read_as_it_was_written(sent_s: float) -> None:
    assert read_sent_at({SENT_AT: sent_s}, NOW_S) == sent_s


@pytest.mark.parametrize(
    "value",
    [
        *(None, "soon", "1790000000", [1_790_000_000], {}, True),
        *(math.nan, -math.inf, 0, -5, NOW_S - MAX_AGE_S - 1),
    ],
)
def test_what_is_no_time_or_too_old_counts_as_now(value: Any) -> None:
    assert read_sent_at({SENT_AT: value}, NOW_S) == NOW_S
    assert read_sent_at({}, NOW_S) == NOW_S


@pytest.mark.parametrize("value", [NOW_S + 0.001, math.inf, 10**400])
def test_a_clock_that_is_ahead_does_not_send_jobs_into_the_future(value: Any) -> None:
    assert read_sent_at({SENT_AT: value}, NOW_S) == NOW_S


@pytest.mark.parametrize(
    "header",
    [
        *(None, "odd", {}, {"v": 2, "reply": "name"}, {"v": 1}, {"v": 1, "reply": 7}),
        *({"v": 1, "reply": each} for each in ("", "a key", "x" * 65, "celery:\n")),
    ],
    ids=str,
)
def test_what_is_no_name_of_a_stream_asks_for_none(header: Any) -> None:
    assert read_stream_name(header) is None


def test_deadline_is_so_many_seconds_from_now() -> None:
    before_s = time.time()
    deadline_s = read_deadline(deadline_header(5))
    assert before_s + 5 - GRAIN_S <= deadline_s <= time.time() + 5 + GRAIN_S
    assert deadline_header(None) == {}
    assert read_deadline({}) == math.inf


@pytest.mark.parametrize("deadline_s", [0, -1, math.inf, math.nan, "soon", True])
def test_deadline_that_is_no_time_from_now_is_refused(deadline_s: Any) -> None:
    with pytest.raises(BatchArgumentError, match="deadline_s"):
        deadline_header(deadline_s)


@pytest.mark.parametrize("deadline", ["soon", True, math.nan, 10**400, [1]])
def test_deadline_of_a_message_that_is_no_time_is_refused(deadline: Any) -> None:
    with pytest.raises(InvalidItem, match=DEADLINE):
        read_deadline({DEADLINE: deadline})


def test_tenant_is_a_name_of_some_length() -> None:
    longest = "x" * MAX_TENANT_CHARS
    options = with_tenant({"headers": {"own": 1}}, longest)
    assert options == {"headers": {"own": 1, TENANT: longest}}
    assert (read_tenant(options["headers"]), read_tenant({})) == (longest, "")
    assert with_tenant({"queue": "q"}, None) == {"queue": "q"}
    for wrong in (7, longest + "x", ["acme"]):
        with pytest.raises(InvalidItem, match=TENANT):
            read_tenant({TENANT: wrong})


@pytest.mark.parametrize(
    ("keep_s", "known"),
    [
        (1, 1),
        (MAX_KEEP_S, MAX_KEEP_S),
        (MAX_KEEP_S + 1, None),
        (0, None),
        (True, None),
        (1.5, None),
    ],
)
def test_result_is_kept_for_a_whole_number_of_seconds(keep_s: Any, known: int | None) -> None:
    assert read_keep_s({"keep_s": keep_s}) == known
    assert read_keep_s(None) is None


@pytest.mark.parametrize(
    ("app_s", "keep_s", "known"),
    [(None, None, 0), (0, 60, 60), (3600.0, None, 3600), (3600, 60, 60), (30, 60, 30)],
)
def test_result_expires_by_the_shorter_time(
    app_s: float | None, keep_s: int | None, known: int
) -> None:
    assert expires_s(app_s, keep_s) == known


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ({"v": 1, "stream": True}, True),
        ({"v": 1, "stream": 1}, False),
        ({"v": 1}, False),
        ({"v": 2, "stream": True}, False),
        ({"v": 1, "stream": True, "n": 2}, False),
        (None, False),
    ],
)
def test_pieces_are_read_of_a_job_of_one_item_that_says_so(header: Any, known: bool) -> None:
    assert is_streamed(header) is known


def test_a_stream_has_a_name() -> None:
    assert read_stream_name({"v": 1, "reply": "a-B_9"}) == "a-B_9"


# Messages that carry several items


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

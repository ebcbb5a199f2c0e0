"""The headers of a message: for whom and until when it is, when it was sent, who reads of it."""

import math
import time
from typing import Any

import pytest

from batchery import BatchArgumentError, InvalidItem
from batchery.protocol.headers import (
    DEADLINE,
    GRAIN_S,
    MAX_AGE_S,
    MAX_KEEP_S,
    MAX_TENANT_CHARS,
    SENT_AT,
    TENANT,
    deadline_header,
    expires_s,
    is_streamed,
    read_deadline,
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

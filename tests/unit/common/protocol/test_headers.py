"""The headers of a message: when it was sent, and who reads of its end."""

import math
import time
from typing import Any

import pytest

from batchery.protocol.headers import MAX_AGE_S, SENT_AT, read_sent_at, read_stream_name, sent_now

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

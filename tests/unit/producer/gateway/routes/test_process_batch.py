"""Texts in batches, and the form in which events are told."""

from typing import Any

import pytest

from batchery_producer.answers import BatchSummary, Outcome
from batchery_producer.gateway.routes.process_batch import (
    Format,
    collect_batches,
    format_for,
    held_length,
    labelled,
    list_devices,
    per_s,
)

FIRST = BatchSummary("b1", 2, 1.5, "cuda:1")
SECOND = BatchSummary("b2", 1, 1.5, "cuda:0")


def test_batches_are_counted_once_whichever_texts_they_had() -> None:
    outcomes = [
        Outcome(0, batch=FIRST),
        Outcome(1, batch=FIRST),
        Outcome(2, batch=SECOND),
        Outcome(3),
    ]
    assert collect_batches(outcomes) == {FIRST, SECOND}
    assert list_devices({FIRST, SECOND}) == "cuda:0, cuda:1"
    assert list_devices(set()) is None


def test_labels_have_the_place_of_their_text_in_the_request() -> None:
    value = {"tokens": 3, "label": "GOOD", "score": 0.75}
    assert labelled(["a"], [Outcome(0, value)], 16) == [
        {
            "text": "a",
            "sentiment": "GOOD",
            "confidence": 0.75,
            "token_count": 3,
            "processing_order": 16,
            "truncated": False,
        }
    ]


def test_rate_over_no_time_is_0() -> None:
    assert (per_s(10, 4), per_s(10, 0)) == (2.5, 0.0)


def test_length_that_held_is_that_of_a_text_that_was_cut() -> None:
    whole: Any = {"token_count": 60, "truncated": False}
    cut: Any = {"token_count": 128, "truncated": True}
    assert held_length(512, [whole]) == 512
    assert held_length(512, [whole, cut]) == 128


@pytest.mark.parametrize(
    ("accept", "given", "format_"),
    [
        ("", None, "sse"),
        ("*/*", None, "sse"),
        ("text/event-stream", None, "sse"),
        ("application/x-ndjson", None, "jsonl"),
        ("application/jsonl; charset=utf-8", None, "jsonl"),
        ("application/json, application/x-ndjson;q=0.9", None, "jsonl"),
        ("text/event-stream, application/x-ndjson", None, "sse"),
        ("application/x-ndjson, text/event-stream", None, "jsonl"),
        ("text/event-stream", "jsonl", "jsonl"),
        ("application/x-ndjson", "sse", "sse"),
    ],
)
def test_format_is_that_of_the_query_or_the_first_accepted_one(
    accept: str, given: Format | None, format_: Format
) -> None:
    assert format_for(accept, given) == format_

import pytest

from batchery_producer.gateway.event_stream import Format, format_for


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

"""Lines of OpenAI's batch files: what a request asks for, and what its answer looks like."""

import base64
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from batchery_producer.answers import Answer
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Record, SeenIds
from batchery_producer.gateway.batches.openai_batch import (
    UNSERVED,
    OpenAIFormat,
    RequestPicker,
    in_form,
    shortened,
)
from batchery_producer.gateway.routes.openai import EmbeddingsRequest

JOURNAL = Journal("0123456789abcdef", "embed", {}, [""], [])
FORMAT = OpenAIFormat(JOURNAL, "embed", lambda _, line: f"line {line}")


def request(number: int, given: Any = "some text", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "embed", "input": given, **body},
    }


@pytest.fixture
def picker() -> Iterator[RequestPicker]:
    """Of a batch whose requests name the model `embed`."""
    with SeenIds() as seen:
        picker = RequestPicker(None, None, seen)
        picker.settle = lambda _: "embed"
        yield picker


def pick(picker: RequestPicker, *rows: Any) -> list[Record | Broken]:
    return [picker.pick(line, row) for line, row in enumerate(rows, 1)]


def test_requests_become_records(picker: RequestPicker) -> None:
    rows = [request(1, "one"), request(2, ["two"]), request(3, ["a", "b"], user="somebody")]
    rows += [request(4, [7, 8]), request(5, [[7], [8, 9]])]
    assert pick(picker, *rows) == [
        Record(1, "request-1", "one"),
        Record(2, "request-2", "two"),
        Record(3, "request-3", ["a", "b"], 0, 2),
        Record(4, "request-4", [7, 8]),
        Record(5, "request-5", [[7], [8, 9]], 0, 2),
    ]


def test_token_ids_under_another_name_than_the_task_s_are_refused(picker: RequestPicker) -> None:
    picker.is_own_name = "model".__eq__
    rows = [request(1, [7, 8]), request(2, "a text"), request(3, [[7]])]
    first, second, third = pick(picker, *rows)
    assert isinstance(first, Broken)
    assert isinstance(third, Broken)
    assert first.reason == third.reason
    assert "'embed' is an alias" in first.reason
    assert isinstance(second, Record)


def test_fields_of_other_vendors_are_refused_by_name(picker: RequestPicker) -> None:
    assert set(UNSERVED) == EmbeddingsRequest.model_fields.keys() - {
        *("input", "model", "user", "encoding_format", "dimensions")
    }
    rows = [request(number, **{name: 8}) for number, name in enumerate(UNSERVED)]
    for row, name in zip(pick(picker, *rows), UNSERVED, strict=True):
        assert isinstance(row, Broken)
        assert row.reason.startswith(f"{name}: not served in batch files")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            request(2, url="x") | {"url": "/v1/chat/completions"},
            "must be /v1/embeddings, the endpoint of the batch",
        ),
        (request(2) | {"method": "GET"}, "method 'GET': must be POST"),
        (request(2) | {"custom_id": "\ud800"}, "custom_id has half a character"),
        (request(2, model=""), "no model, or it is no text"),
        (request(2, model="other"), "model 'other', but the first request has model 'embed'"),
        (request(2, encoding_format="hex"), "encoding_format: float or base64"),
        (request(2, []), "input must be a text or token ids, or a list of 1 to 10,000 of them"),
        (request(2, [1, "a"]), "input must be a text or token ids"),
        (request(2, [1, -2]), "input must be a text or token ids"),
        (request(2, [[1], []]), "input must be a text or token ids"),
        (request(2, ["a"] * 10_001), "input must be a text or token ids"),
        (request(2, dimensions=0), "dimensions: a whole number from 1 on"),
        (request(2, dimensions="8"), "dimensions: a whole number from 1 on"),
        (request(1), "the id 'request-1' is already used in line 1"),
        ({"custom_id": "x"}, "no body, .* a request has custom_id, method, url and body"),
        ({"custom_id": 5}, "no custom_id, or it is no text"),
        ("bare", "a bare string; expected a request"),
    ],
)
def test_request_that_cannot_be_served_fails_alone(
    picker: RequestPicker, row: Any, why: str
) -> None:
    good, bad, last = pick(picker, request(1), row, request(3))
    assert isinstance(good, Record)
    assert isinstance(last, Record)
    assert isinstance(bad, Broken)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(bad.reason)


def answer(result: Any, form: Any = None) -> Any:
    """The body of a result."""
    line = FORMAT.result({"id": "request-1", "line": 1, "form": form or {}, "result": result})
    job = JOURNAL.task_id(0, 1)
    assert line["id"] == f"batch_req_{job.replace('-', '')}"
    assert (line["custom_id"], line["error"]) == ("request-1", None)
    assert line["response"]["status_code"] == 200
    assert line["response"]["request_id"] == job
    return line["response"]["body"]


def test_result_is_written_in_openai_s_form() -> None:
    assert answer({"tokens": 3, "vector": [0.5, -1.0]}) == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
        "model": "embed",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    body = answer([{"tokens": 2, "vector": [n]} for n in (1, 2)])
    assert [(each["index"], each["embedding"]) for each in body["data"]] == [(0, [1]), (1, [2])]
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [
        (
            ("InvalidItem", "too long"),
            400,
            {"type": "invalid_request_error", "param": None, "code": "InvalidItem"},
        ),
        (
            ("OutOfMemoryError", "no room"),
            500,
            {"type": "server_error", "param": None, "code": "OutOfMemoryError"},
        ),
        (("TaskRevokedError", "expired"), None, {"code": "batch_expired"}),
        (("InvalidLine", "no custom_id"), None, {"code": "invalid_line"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_failure_is_written_in_openai_s_form(failure: Any, status: Any, error: Any) -> None:
    type_, message = failure
    line = FORMAT.failure({"id": 4, "line": 4, "error": {"type": type_, "message": message}})
    assert line["custom_id"] is None
    if status is None:
        said = {**error, "message": f"line 4: {message}" if type_ == "InvalidLine" else message}
        assert (line["response"], line["error"]) == (None, said)
    else:
        assert line["error"] is None
        assert line["response"]["status_code"] == status
        assert line["response"]["body"]["error"] == {**error, "message": message}


def test_vectors_are_base64_if_the_request_says_so() -> None:
    body = answer([0.5, math.nan], {"encoding_format": "base64"})
    content = base64.b64decode(body["data"][0]["embedding"])
    assert [str(each) for each in struct.unpack("<2f", content)] == ["0.5", "nan"]


def test_each_request_has_its_own_dimensions_and_encoding(picker: RequestPicker) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"dimensions": 2},
        {"encoding_format": "base64"},
        {"encoding_format": "float"},
    ]
    rows = pick(picker, *(request(number, **body) for number, body in enumerate(asked)))
    forms = [row.form for row in rows if isinstance(row, Record)]
    assert forms == [None, {"dimensions": 2}, {"encoding_format": "base64"}, None]
    whole = Answer({"tokens": 2, "vector": [0.6, 0.0, 0.8]})
    assert in_form(whole, {"dimensions": 2}).value == {"tokens": 2, "vector": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"vector": [1.0, 0.0]}, "dimensions = 3: the model's vectors have 2"),
        ([{"vector": [1.0, 0.0, 0.0]}, {"vector": [1.0]}], "the model's vectors have 1"),
        ({"label": "good"}, "the task's result is no vector"),
    ],
)
def test_dimensions_that_the_model_has_not_are_an_error_of_that_line(value: Any, said: str) -> None:
    answer = in_form(Answer(value), {"dimensions": 3})
    assert answer.error is not None
    assert answer.error[0] == "InvalidItem"
    assert said in answer.error[1]


def test_a_vector_in_base64_is_cut_as_well() -> None:
    packed = base64.b64encode(struct.pack("<3f", 3.0, 4.0, 9.0)).decode()
    assert in_form(Answer({"vector": packed}), {"dimensions": 2}).value == {"vector": [3.0, 4.0]}


def test_a_vector_of_length_1_keeps_it() -> None:
    assert shortened([0.6, 0.0, 0.8], 1) == [1.0]
    assert shortened([3.0, 4.0], 1) == [3.0]


@pytest.mark.parametrize("result", ["a text", {"label": 1}, ["a", "b"]])
def test_chat_of_a_task_that_generates_nothing_has_its_result_as_it_is(result: Any) -> None:
    body = answer(result, {"url": "/v1/chat/completions"})
    assert body == (result if isinstance(result, dict) else {"result": result})

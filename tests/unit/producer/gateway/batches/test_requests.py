"""Files of requests: what they must be, and the lines of the answers."""

import json
from io import BytesIO
from typing import Any

import pytest
from starlette.responses import Response

from batchery_producer.gateway.batches import requests
from batchery_producer.gateway.batches.requests import (
    MAX_ERRORS,
    FileFacts,
    Line,
    read_file,
    write_line,
)
from batchery_producer.gateway.problems import Kind, Problem

ENDPOINT = "/v1/embeddings"


def find_model(name: str) -> str:
    if name not in ("embed", "alias"):
        raise Problem(Kind.NOT_FOUND, f"model {name!r}: none", code="model_not_found")
    return "embed"


def request(id_: Any, **changes: Any) -> dict[str, Any]:
    row = {"custom_id": id_, "method": "POST", "url": ENDPOINT}
    return {**row, "body": {"model": "alias", "input": "text"}, **changes}


def check(*rows: Any) -> FileFacts:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return read_file(BytesIO(b"\n".join(lines)), ENDPOINT, find_model)


@pytest.mark.parametrize(
    ("row", "code", "text"),
    [
        (b"{", "invalid_json_line", "not JSON"),
        (b"[1]", "invalid_json_line", "list"),
        (b'"text"', "invalid_json_line", "expected an object"),
        (b"\xff\xfe", "invalid_json_line", "not JSON in UTF-8"),
        (b"7", "invalid_json_line", "expected an object"),
        (b"1" * 17_000_000, "too_large", "longer than 16777216 bytes"),
        (b"[" * 50_000, "invalid_json_line", "not JSON"),
        (b"[" * 100_000, "too_large", "more than 300,000 values"),
        (request("b", body={"model": "embed", "input": [[1]] * 60_000}), "too_large", "values"),
        (request(None), "missing_custom_id", "no custom_id"),
        (request(7), "missing_custom_id", "no custom_id"),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", "surrogate"),
        (request("a"), "duplicate_custom_id", "'a' is already used in line 1"),
        (request("b", method="GET"), "invalid_method", "method: 'GET': must be POST"),
        (request("b", url="/v1/completions"), "invalid_url", "must be /v1/embeddings"),
        (request("b", body=[]), "missing_body", "no body"),
        (request("b", body={"input": "a"}), "missing_model", "no model"),
        (request("b", body={"model": "embed"}), "mismatched_model", "the first request has"),
    ],
)
def test_line_that_is_no_request_of_the_batch_is_told(row: Any, code: str, text: str) -> None:
    found = check(request("a"), row, request("c"))
    (error,) = found.errors
    assert (error.line, error.code, found.requests) == (2, code, 3)
    assert text in error.message


def test_a_request_without_a_method_is_one_of_post() -> None:
    row = request("a")
    del row["method"]
    found = check(row, b"", request("b"))
    assert (found.model, found.requests, found.errors) == ("embed", 2, [])


def test_what_only_the_body_has_wrong_is_no_error_of_the_file() -> None:
    assert check(request("a", body={"model": "embed", "input": 7, "dimensions": "x"})).errors == []


def test_unknown_model_is_told_once() -> None:
    body = {"model": "gpt-9", "input": "a"}
    found = check(request("a", body=body), request("b", body=body))
    assert [(each.line, each.code) for each in found.errors] == [(1, "model_not_found")]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_file_without_requests_is_no_batch(content: bytes) -> None:
    found = read_file(BytesIO(content), ENDPOINT, find_model)
    assert [each.code for each in found.errors] == ["empty_file"]


def test_file_has_a_maximum_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_REQUESTS", 3)
    found = check(*[request(f"r-{n}") for n in range(4)])
    assert [(each.line, each.code) for each in found.errors] == [(None, "too_many_requests")]
    assert check(*[request(f"r-{n}") for n in range(3)]).errors == []


def test_only_so_many_errors_are_told() -> None:
    found = check(*[b"{"] * (MAX_ERRORS + 5))
    assert (len(found.errors), found.requests) == (MAX_ERRORS, MAX_ERRORS + 5)


def test_line_of_15_mb_is_read_only_where_it_has_few_values() -> None:

    text, lists = 'a,[{"' * 2_500_000, [[1]] * 2_900_000
    assert check(request("a", body={"model": "embed", "input": text})).errors == []
    found = check(request("a"), request("b", body={"model": "embed", "input": lists}))
    assert [(each.line, each.code) for each in found.errors] == [(2, "too_large")]


# Lines of the files that a batch writes


def write(answer: Response | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(write_line(Line("batch_1-7", "mine", {}, 10, answer)))
    assert (found["id"], found["custom_id"]) == ("batch_req_1-7", "mine")
    return found


@pytest.mark.parametrize("status", [200, 413])
def test_line_has_the_answer_of_its_route(status: int) -> None:
    found = write(Response(b'{"usage": {}}', status))
    told = {"status_code": status, "request_id": "batch_1-7", "body": {"usage": {}}}
    assert (found["response"], found["error"]) == (told, None)


def test_request_that_had_no_time_has_no_response() -> None:
    found = write(None)
    assert (found["response"], found["error"]["code"]) == (None, "batch_expired")

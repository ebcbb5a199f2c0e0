"""Files of requests: what they must be, what a body may ask for, and the lines of the answers."""

import base64
import json
import struct
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

from batchery.errors import InvalidItem
from batchery_producer.answers import Answer
from batchery_producer.gateway.batches import requests
from batchery_producer.gateway.batches.requests import (
    MAX_ERRORS,
    FileFacts,
    Request,
    read_file,
    read_items,
    write_line,
)
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.openai import EmbeddingsRequest

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


def read(given: Any, *, is_own_name: bool = True, **body: Any) -> list[Any]:
    body = {"model": "embed", "input": given, **body}
    return read_items(ENDPOINT, body, is_own_name=is_own_name)


def test_items_of_an_input_are_texts_or_token_ids() -> None:
    assert read("one") == read(["one"]) == ["one"]
    assert read(["a", "b"], user="somebody") == ["a", "b"]
    assert read([7, 8]) == [[7, 8]]
    assert read([[7], [8, 9]]) == [[7], [8, 9]]


@pytest.mark.parametrize(
    ("given", "body", "why"),
    [
        ("a", {"encoding_format": "hex"}, "encoding_format: "),
        ([], {}, "input: expected a text or token ids, or a list of 1 to 10,000 of them"),
        ([1, "a"], {}, "input: expected"),
        ([1, -2], {}, "input: expected"),
        ([[1], []], {}, "input: expected"),
        (["a"] * 10_001, {}, "input: expected"),
        ("a", {"dimensions": 0}, "dimensions: "),
        ("a", {"dimensions": "8"}, "dimensions: "),
        ("a", {"dimensions": True}, "dimensions: "),
        ([7, 8], {"is_own_name": False}, "'embed' is an alias"),
        ([[7]], {"is_own_name": False}, "'embed' is an alias"),
        *(
            ("a", {name: 8}, f"^{name}: ")
            for name in EmbeddingsRequest.model_fields
            if name not in ("input", "model", "user", "encoding_format", "dimensions")
        ),
    ],
)
def test_body_that_cannot_be_served_says_why(given: Any, body: Any, why: str) -> None:
    with pytest.raises(InvalidItem, match=why):
        read(given, **body)


# Lines of the files that a batch writes


def packed(*vector: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def write(*answers: Any, endpoint: str = ENDPOINT, **asked: Any) -> tuple[bool, Any]:
    """Whether the line of a request is an error, and its response; an answer for each item."""
    asked = {"encoding_format": None, "dimensions": None, **asked}
    request = Request("batch_1-7", "mine", asked, {"job": ["item"] * len(answers)})
    request.answers["job"] = Answer(list(answers))
    record: Any = SimpleNamespace(model="embed", endpoint=endpoint)
    content, usage = write_line(record, request)
    line = json.loads(content)
    assert (line["id"], line["custom_id"], line["error"]) == ("batch_req_1-7", "mine", None)
    assert line["response"]["request_id"] == "batch_1-7"
    assert (usage is None) == (line["response"]["status_code"] != 200)
    return usage is None, line["response"]["body"]


def vector(*values: float) -> Any:
    return {"ok": {"vector": packed(*values), "tokens": 2}}


def test_vectors_are_written_in_openai_s_form() -> None:
    assert write(vector(0.5, -1.0), vector(2.0, 1.0)) == (
        False,
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]},
                {"object": "embedding", "index": 1, "embedding": [2.0, 1.0]},
            ],
            "model": "embed",
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        },
    )


@pytest.mark.parametrize(
    ("values", "asked", "written"),
    [
        ([0.5, 2.0], {"encoding_format": "base64"}, packed(0.5, 2.0)),
        ([0.5, 2.0], {"encoding_format": "float"}, [0.5, 2.0]),
        # Of length 1 if the whole vector is.
        ([0.6, 0.0, 0.8], {"dimensions": 2}, [1.0, 0.0]),
        ([3.0, 4.0, 9.0], {"dimensions": 2}, [3.0, 4.0]),
    ],
)
def test_vector_has_the_form_that_its_request_asks_for(
    values: list[float], asked: Any, written: Any
) -> None:
    assert write(vector(*values), **asked)[1]["data"][0]["embedding"] == written


def failed(type_: str, text: str) -> Any:
    return {"error": {"type": type_, "message": text}}


@pytest.mark.parametrize(
    ("answers", "asked", "kind", "code", "text"),
    [
        ([vector(1.0, 0.0)], {"dimensions": 3}, "invalid_request_error", "InvalidItem", "have 2"),
        ([failed("InvalidItem", "odd")], {}, "invalid_request_error", "InvalidItem", "odd"),
        ([failed("OutOfMemory", "no room")], {}, "server_error", "OutOfMemory", "no room"),
        (
            [vector(1.0), failed("PromptTooLong", "long")],
            {},
            "invalid_request_error",
            "context_length_exceeded",
            "item 1: long",
        ),
        *(
            ([{"ok": result}], {"endpoint": endpoint}, "server_error", "WrongResult", "'embed'")
            for result in (None, "a text", {"label": 1}, {"vector": [1.0], "tokens": 1})
            for endpoint in (ENDPOINT, "/v1/chat/completions")
        ),
    ],
)
def test_failure_is_written_in_openai_s_form(
    answers: Any, asked: Any, kind: str, code: str, text: str
) -> None:
    is_error, body = write(*answers, **asked)
    told = body["error"]
    assert (is_error, told["type"], told["param"], told["code"]) == (True, kind, None, code)
    assert text in told["message"]


def test_request_that_had_no_time_has_no_response() -> None:
    record: Any = SimpleNamespace(model="embed", endpoint=ENDPOINT)
    content, usage = write_line(record, Request("batch_1-7", "mine", {}, {"job": ["item"]}))
    line = json.loads(content)
    assert (usage, line["response"]) == (None, None)
    assert line["error"]["code"] == "batch_expired"

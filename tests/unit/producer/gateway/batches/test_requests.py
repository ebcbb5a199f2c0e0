import json
from io import BytesIO
from typing import Any

import pytest

from batchery.errors import InvalidItem
from batchery_producer.gateway.batches import requests
from batchery_producer.gateway.batches.requests import (
    MAX_ERRORS,
    UNSERVED,
    Validated,
    read_items,
    validated,
)
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.openai import EmbeddingsRequest

ENDPOINT = "/v1/embeddings"


def find_model(name: str) -> str:
    if name not in ("embed", "alias"):
        raise Problem(Kind.NOT_FOUND, f"model {name!r}: no such model")
    return "embed"


def request(id_: Any, **changes: Any) -> dict[str, Any]:
    row = {"custom_id": id_, "method": "POST", "url": ENDPOINT}
    return {**row, "body": {"model": "alias", "input": "text"}, **changes}


def check(*rows: Any) -> Validated:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    return validated(BytesIO(b"\n".join(lines)), ENDPOINT, find_model)


def test_good_file_has_a_model_and_no_errors() -> None:
    found = check(request("a"), b"", request("b"))
    assert (found.model, found.requests, found.errors) == ("embed", 2, [])


@pytest.mark.parametrize(
    ("row", "code", "text"),
    [
        (b"{", "invalid_json_line", "not JSON"),
        (b"[1]", "invalid_json_line", "list"),
        (b'"text"', "invalid_json_line", "expected an object"),
        (b"\xff\xfe", "invalid_json_line", "at byte 0; upload the file in UTF-8"),
        (b"1" * 5000, "invalid_json_line", "more than 4300 digits; send it as a string"),
        (b"[" * 50_000, "invalid_json_line", "not JSON"),
        (b"[" * 100_000, "too_large", "more than 300,000 values"),
        (request("b", body={"model": "embed", "input": [[1]] * 60_000}), "too_large", "values"),
        (request(None), "missing_custom_id", "no custom_id"),
        (request(7), "missing_custom_id", "no custom_id"),
        (b'{"custom_id": "\\ud800"}', "invalid_custom_id", "half a character"),
        (request("a"), "duplicate_custom_id", "'a' is already used in line 1"),
        (request("b", method="GET"), "invalid_method", "'GET': must be POST"),
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
    assert check(row).errors == []


def test_what_only_the_body_has_wrong_is_no_error_of_the_file() -> None:
    assert check(request("a", body={"model": "embed", "input": 7, "dimensions": "x"})).errors == []


def test_unknown_model_is_told_once() -> None:
    body = {"model": "gpt-9", "input": "a"}
    found = check(request("a", body=body), request("b", body=body))
    assert [(each.line, each.code) for each in found.errors] == [(1, "model_not_found")]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_file_without_requests_is_no_batch(content: bytes) -> None:
    found = validated(BytesIO(content), ENDPOINT, find_model)
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
        ([], {}, "input must be a text or token ids, or a list of 1 to 10,000 of them"),
        ([1, "a"], {}, "input must be"),
        ([1, -2], {}, "input must be"),
        ([[1], []], {}, "input must be"),
        (["a"] * 10_001, {}, "input must be"),
        ("a", {"dimensions": 0}, "dimensions: "),
        ("a", {"dimensions": "8"}, "dimensions: "),
        ("a", {"dimensions": True}, "dimensions: "),
        ([7, 8], {"is_own_name": False}, "'embed' is an alias"),
        ([[7]], {"is_own_name": False}, "'embed' is an alias"),
        *(("a", {name: 8}, f"^{name}: not served in batch files") for name in UNSERVED),
    ],
)
def test_body_that_cannot_be_served_says_why(given: Any, body: Any, why: str) -> None:
    with pytest.raises(InvalidItem, match=why):
        read(given, **body)


def test_all_fields_of_other_vendors_are_refused() -> None:
    served = {"input", "model", "user", "encoding_format", "dimensions"}
    assert set(UNSERVED) == EmbeddingsRequest.model_fields.keys() - served

"""Lines of the files that a batch writes."""

import base64
import json
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from batchery.errors import InvalidItem
from batchery_producer.answers import Answer
from batchery_producer.gateway.batches.requests import (
    NO_TIME,
    BatchRequests,
    Request,
    RequestJob,
    WrongResult,
)


def requests_of(endpoint: str = "/v1/embeddings") -> BatchRequests:
    record: Any = SimpleNamespace(run="0123456789abcdef", model="embed", endpoint=endpoint)
    files: Any = None
    return BatchRequests(record, files)


def packed(*vector: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def write(
    *vectors: list[float], encoding_format: str | None = None, dimensions: int | None = None
) -> Any:
    """The body of the answer to a request for embeddings."""
    request = Request("0-1", "mine", {"encoding_format": encoding_format, "dimensions": dimensions})
    results = [{"vector": packed(*vector), "tokens": 2} for vector in vectors]
    content, tokens = requests_of().result(request, results)
    line = json.loads(content)
    assert (line["id"], line["custom_id"], line["error"]) == ("batch_req_01", "mine", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "0-1")
    assert tokens == (2 * len(vectors), 0)
    return line["response"]["body"]


def test_vectors_are_written_in_openai_s_form() -> None:
    assert write([0.5, -1.0], [2.0, 1.0]) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5, -1.0]},
            {"object": "embedding", "index": 1, "embedding": [2.0, 1.0]},
        ],
        "model": "embed",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


@pytest.mark.parametrize(
    ("vector", "asked", "written"),
    [
        ([0.5, 2.0], {"encoding_format": "base64"}, packed(0.5, 2.0)),
        ([0.5, 2.0], {"encoding_format": "float"}, [0.5, 2.0]),
        # Of length 1 if the whole vector is.
        ([0.6, 0.0, 0.8], {"dimensions": 2}, [1.0, 0.0]),
        ([3.0, 4.0, 9.0], {"dimensions": 2}, [3.0, 4.0]),
    ],
)
def test_vector_has_the_form_that_its_request_asks_for(
    vector: list[float], asked: Any, written: Any
) -> None:
    assert write(vector, **asked)["data"][0]["embedding"] == written


def test_dimensions_that_the_model_has_not_are_an_error_of_that_line() -> None:
    with pytest.raises(InvalidItem, match="dimensions = 3: the model's vectors have 2"):
        write([1.0, 0.0], dimensions=3)


@pytest.mark.parametrize("result", [None, "a text", {"label": 1}, {"vector": [1.0], "tokens": 1}])
@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/v1/chat/completions"])
def test_result_of_another_task_is_an_error_of_that_line(endpoint: str, result: Any) -> None:
    asked = {"encoding_format": None, "dimensions": None}
    with pytest.raises(WrongResult):
        requests_of(endpoint).result(Request("0-1", "mine", asked), [result])


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (("InvalidItem", "too long"), 400, "invalid_request_error"),
        (("OutOfMemoryError", "no room"), 500, "server_error"),
    ],
)
def test_failure_is_written_in_openai_s_form(
    error: tuple[str, str], status: int, kind: str
) -> None:
    line = json.loads(requests_of().failure(Request("0-1", "mine", {}), error))
    assert (line["custom_id"], line["error"]) == ("mine", None)
    told = {"message": error[1], "type": kind, "param": None, "code": error[0]}
    assert line["response"] == {
        "status_code": status,
        "request_id": "0-1",
        "body": {"error": told},
    }


def test_request_that_had_no_time_has_no_response() -> None:
    line = json.loads(requests_of().failure(Request("0-1", "mine", {}), NO_TIME))
    assert (line["response"], line["error"]["code"]) == (None, "batch_expired")


def test_request_of_several_jobs_ends_with_all_results_or_the_first_error() -> None:
    jobs = [RequestJob("a", ["x", "y"], 2, 0), RequestJob("b", ["z"], 1, 2)]
    request = Request("a", "mine", {}, jobs)
    request.answers["a"] = Answer(value=[{"ok": 1}, {"ok": 2}])
    assert not request.is_done
    request.answers["b"] = Answer(value=[{"ok": 3}])
    assert (request.is_done, request.end(), request.error) == (True, [1, 2, 3], None)
    failed = {"error": {"type": "ItemFailed", "message": "no"}}
    request.answers["b"] = Answer(value=[failed])
    request.end()
    assert request.error is not None
    assert "item 2: " in request.error[1]

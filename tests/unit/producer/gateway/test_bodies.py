"""Bodies: what is in one is counted, its first error ends it, and its route answers in time."""

import asyncio
import json
import tracemalloc
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchery_producer.gateway import bodies
from batchery_producer.gateway.app import list_routes
from batchery_producer.gateway.bodies import JsonRoute, parse
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.process_batch import ProcessBatchRequest
from batchery_producer.gateway.routes.cohere import CohereRerankRequest
from batchery_producer.gateway.routes.openai import CreateBatchRequest, EmbeddingsRequest
from batchery_producer.gateway.routes.tei import (
    HANDLERS,
    PipelineRequest,
    PredictRequest,
    SimilarityRequest,
)
from batchery_producer.request_fields import CONTAINER_VALUES, RequestBody

#: Characters that matter in texts of JSON, and others.
TEXTS = st.text(st.sampled_from('ab,[]{}:"\\\n\u00e9'), max_size=8)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda some: st.lists(some, max_size=4) | st.dictionaries(TEXTS, some, max_size=4),
    max_leaves=20,
)


def count(value: Any) -> int:
    """Commas between values, and what lists and objects count as."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return CONTAINER_VALUES + max(len(value) - 1, 0) + sum(map(count, inner))


def read(body: bytes) -> Any:
    """What is in a body."""
    return asyncio.run(parse(body))


@given(VALUES, st.booleans(), st.integers(1, 20))
def test_values_are_counted_and_what_texts_hold_is_not(
    value: Any, ascii_only: bool, piece_bytes: int
) -> None:
    body = {"input": value}
    text = json.dumps(body, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bodies, "PIECE_BYTES", piece_bytes)
        patched.setattr(bodies, "MAX_VALUES", count(body))
        assert read(text) == body
        patched.setattr(bodies, "MAX_VALUES", count(body) - 1)
        with pytest.raises(Problem) as caught:
            read(text)
        assert caught.value.kind is Kind.TOO_LARGE


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b"[" + b"[]," * 5_000_000 + b"[]]", Kind.TOO_LARGE, "300000 values"),
        (b'{"a": [' + b'"a",' * 1_500_000 + b'"a"]}', Kind.TOO_LARGE, "300000 values"),
        (b"[" * 250 + b"]" * 250, Kind.INVALID, "recursion limit"),
        (b"[NaN]", Kind.INVALID, "no JSON"),
        (b'["\\ud800"]', Kind.INVALID, "no JSON"),
        (b"[1" + b"0" * 5000 + b"]", Kind.INVALID, "number out of range"),
        (json.dumps(dict.fromkeys(map(str, range(101)))).encode(), Kind.INVALID, "101 fields"),
    ],
)
def test_body_that_is_too_much_is_refused(body: bytes, kind: Kind, text: str) -> None:
    with pytest.raises(Problem, match=text) as caught:
        read(body)
    assert caught.value.kind is kind


MANY = 10_000


@pytest.mark.parametrize("item", [{}, 1.5, ["", 1]])
@pytest.mark.parametrize(
    ("model", "form"),
    [
        (EmbeddingsRequest, '{"input": MANY}'),
        (EmbeddingsRequest, '{"input": [MANY]}'),
        (SimilarityRequest, '{"inputs": {"source_sentence": "a", "sentences": MANY}}'),
        (PredictRequest, '{"inputs": MANY}'),
        (PipelineRequest, '{"inputs": MANY, "parameters": {}}'),
        (CohereRerankRequest, '{"query": 1, "documents": MANY}'),
        (ProcessBatchRequest, '{"texts": MANY}'),
        (CreateBatchRequest, '{"metadata": MANY}'),
    ],
)
def test_errors_do_not_grow_with_the_body(model: type[RequestBody], form: str, item: Any) -> None:
    body = json.loads(form.replace("MANY", json.dumps([item] * MANY)))
    if "metadata" in body:
        body["metadata"] = {str(number): item for number in range(MANY)}
    tracemalloc.start()
    try:
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body)
        # Some fields make one error of all.
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.error_count() < 10


def test_every_body_is_of_these_kinds() -> None:
    routes = list_routes()
    taking = [each for each in routes if isinstance(each, APIRoute) and each.body_field]
    assert len(taking) > 10
    models: list[Any] = [form for form, _ in HANDLERS.values()]
    for route in taking:
        assert isinstance(route, JsonRoute), route.path
        # This one chooses among the forms.
        if route.path != "/":
            assert route.body_field is not None
            models.append(route.body_field.field_info.annotation)
    assert all(issubclass(model, RequestBody) for model in models)

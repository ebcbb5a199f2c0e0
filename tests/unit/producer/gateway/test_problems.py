"""How each API tells what went wrong."""

import asyncio
from typing import Any

import httpx2
import orjson
import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from fastapi.exceptions import RequestValidationError
from kombu.exceptions import OperationalError
from redis.exceptions import OutOfMemoryError

from batchery.errors import BrokerRefused, DeadlineExceeded, InvalidItem, ServerBusy
from batchery.settings import Settings
from batchery_producer.gateway.app import make_app
from batchery_producer.gateway.problems import Kind, Problem, answer, build_problem

CAUSES = {
    Kind.INVALID: InvalidItem("text: is empty"),
    Kind.TIMEOUT: DeadlineExceeded("too late"),
    Kind.UNAVAILABLE: BrokerRefused("no space"),
    Kind.FAILED: RuntimeError("out of order"),
    Kind.UNSUPPORTED: Problem(Kind.UNSUPPORTED, "no such kind"),
    Kind.EMPTY: Problem(Kind.EMPTY, "nothing"),
    Kind.TOO_LARGE: Problem(Kind.TOO_LARGE, "too much"),
}


@pytest.mark.parametrize(
    ("kind", "path", "status", "named"),
    [
        (Kind.INVALID, "/embed", 422, {"error_type": "Validation"}),
        (Kind.EMPTY, "/embed_all", 400, {"error_type": "Empty"}),
        (Kind.TOO_LARGE, "/predict", 413, {"error_type": "Validation"}),
        (Kind.UNSUPPORTED, "/rerank", 424, {"error_type": "Backend"}),
        (Kind.FAILED, "/similarity", 424, {"error_type": "Backend"}),
        (Kind.FAILED, "/", 424, {"error_type": "Backend"}),
        (Kind.UNAVAILABLE, "/embed_sparse", 503, {"error_type": "Unhealthy"}),
        (Kind.TIMEOUT, "/embed", 503, {"error_type": "Unhealthy"}),
        (Kind.INVALID, "/v1/embeddings", 400, {"error": {"type": "invalid_request_error"}}),
        (Kind.FAILED, "/v1/embeddings", 500, {"error": {"type": "server_error"}}),
        (Kind.INVALID, "/v2/rerank", 400, {"message": "text: is empty"}),
        (Kind.UNSUPPORTED, "/v1/rerank", 404, {"message": "no such kind"}),
        (Kind.FAILED, "/v1/rerank", 500, {"message": "RuntimeError: out of order"}),
        (Kind.INVALID, "/elsewhere", 422, {"detail": "text: is empty"}),
    ],
)
def test_each_api_has_its_own_words_and_statuses(
    kind: Kind, path: str, status: int, named: dict[str, Any]
) -> None:
    problem = build_problem(CAUSES[kind])
    assert problem.kind is kind
    found = answer(path, problem)
    assert found.status_code == status
    body = orjson.loads(found.body)
    for name, value in named.items():
        part = body[name]
        assert (part.items() >= value.items()) if isinstance(value, dict) else part == value


def test_job_that_expires_is_late_and_one_that_is_revoked_failed() -> None:
    assert build_problem(TaskRevokedError("expired")).kind is Kind.TIMEOUT
    assert build_problem(TaskRevokedError("terminated")).kind is Kind.FAILED


@pytest.mark.parametrize(
    ("words", "retry_after"),
    [
        ("status 429 (it asks for a pause of 2.5 s)", "3"),
        ("status 429 (it asks for a pause of 1e+03 s)", "1000"),
        ("status 429: come after a pause of .. s", "1"),
        ("status 429: come after a pause of 1.2.3 s", "1"),
        ("status 429: come after a pause of 1e999 s", "86400"),
    ],
)
def test_busy_server_is_a_429_whatever_it_says(words: str, retry_after: str) -> None:
    found = answer("/v1/completions", build_problem(ServerBusy(words)))
    assert (found.status_code, found.headers["retry-after"]) == (429, retry_after)


def test_full_redis_is_not_said_to_be_away() -> None:
    full = OutOfMemoryError("command not allowed when used memory > 'maxmemory'.")
    # As Celery and kombu wrap it.
    wrapped = OperationalError(str(full))
    wrapped.__cause__ = full
    refused = BrokerRefused("queue 'celery': Redis has no memory left")
    refused.__cause__ = wrapped
    for error in (full, wrapped, refused):
        found = answer("/tasks/a", build_problem(error))
        assert (found.status_code, found.headers["retry-after"]) == (503, "10")
        assert "Redis is full" in orjson.loads(found.body)["detail"]
    away = answer("/tasks/a", build_problem(OperationalError("Connection refused")))
    assert (away.status_code, away.headers["retry-after"]) == (503, "1")
    assert orjson.loads(away.body)["detail"] == "Redis does not answer"


def test_lost_redis_is_not_logged_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        build_problem(OperationalError("cut off while this test ran"))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Redis: cut off while this test ran"]


def test_a_body_that_is_missing_is_said_to_be_empty() -> None:
    def tell(*loc: str) -> str:
        missing = {"msg": "Field required", "type": "missing", "loc": loc}
        return str(build_problem(RequestValidationError([missing])))

    assert "the body is empty" in tell("body")
    assert "input: Field required" in tell("body", "input")


def test_failure_of_the_gateway_itself_has_a_name_and_tells_nothing() -> None:
    # It has not started, so it has nothing that its routes need.
    web = make_app(Celery("none", set_as_current=False), Settings())

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(web, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/health", headers={"x-request-id": "order-7"})

    answer = asyncio.run(ask())
    assert answer.json()["detail"] == "the gateway failed; its log says why"
    assert answer.status_code == 500
    assert answer.headers.get_list("x-request-id") == ["order-7"]

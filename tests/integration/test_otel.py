"""A trace of OpenTelemetry: from the caller of a job to the worker that runs it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.instrumentation.celery")

from opentelemetry.sdk.trace import TracerProvider

from apps import traced
from batchery import AsyncClient, Client, otel
from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.traced", env={"TRACED_WORKER": "1"})


@pytest.fixture
def tracer(worker: Worker, redis_url: str) -> Iterator[Any]:
    """Of the caller, whose jobs carry its traces; the worker's earlier spans are forgotten."""
    traced.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    otel.instrument()
    yield TracerProvider().get_tracer("caller")
    otel.uninstrument()
    with open_redis(redis_url) as redis:
        redis.delete(traced.SPANS)


def spans(redis_url: str, jobs: int) -> list[dict[str, Any]]:
    """The spans of the jobs, once all are there."""

    def found() -> Any:
        with open_redis(redis_url) as redis:
            made = [json.loads(line) for line in redis.lrange(traced.SPANS, 0, -1)]
        of_jobs = [each for each in made if each["name"] == "run/traced.shout"]
        return len(of_jobs) == jobs and of_jobs

    of_jobs: list[dict[str, Any]] = wait_for(found, f"the spans of {jobs} jobs")
    return of_jobs


@pytest.mark.parametrize("word", ["work", "fail"])
def test_trace_leads_from_the_caller_to_the_job(tracer: Any, redis_url: str, word: str) -> None:
    with tracer.start_as_current_span("caller") as caller:
        job = traced.shout.delay(word)
    job.get(timeout=TIMEOUT_S, propagate=False)
    (of_job,) = spans(redis_url, 1)
    context = caller.get_span_context()
    assert (of_job["trace"], of_job["parent"]) == (context.trace_id, context.span_id)


@pytest.mark.parametrize("how", ["submit_many", "Client"])
def test_trace_of_a_caller_rides_on_jobs_in_bulk(tracer: Any, redis_url: str, how: str) -> None:
    words = [f"word {number}" for number in range(50)]
    with tracer.start_as_current_span("caller") as caller:
        if how == "submit_many":
            traced.shout.submit_many(words).get(timeout=TIMEOUT_S)
        else:
            with Client(traced.app) as client:
                assert len(list(client.task("traced.shout").map(words))) == 50
    assert {each["trace"] for each in spans(redis_url, 50)} == {caller.get_span_context().trace_id}


def test_each_call_of_an_asynchronous_client_carries_its_own_trace(
    tracer: Any, redis_url: str
) -> None:
    async def call(client: AsyncClient, word: str) -> int:
        with tracer.start_as_current_span("caller") as caller:
            await client.task("traced.shout")(word)
        trace_id: int = caller.get_span_context().trace_id
        return trace_id

    async def both() -> list[int]:
        async with AsyncClient(traced.app) as client:
            return await asyncio.gather(*(call(client, word) for word in ("a", "b")))

    of_callers = asyncio.run(both())
    assert len(set(of_callers)) == 2
    assert {each["trace"] for each in spans(redis_url, 2)} == set(of_callers)

"""Texts in, labels out: `/process-batch`, the same as a stream, and what both did."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from batchery.protocol.figures import WorkerFigures
from batchery_producer.answers import BatchSummary, Outcome
from batchery_producer.gateway.answers import EVENTS_CONTENT, EventStream, write_event
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.inference import check_all, run_outcomes
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Problem, build_problem
from batchery_producer.gateway.running import Gateway, get_gateway
from batchery_producer.request_fields import RequestBody

router = APIRouter(tags=["texts in, labels out"], route_class=JsonRoute)

KINDS = ("classification",)

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=10_000)]


class ProcessBatchRequest(RequestBody):
    """Texts to label."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=100)]
    max_length: Annotated[int, Field(ge=50, le=1024, description="In tokens.")] = 512
    batch_size: Annotated[int, Field(ge=1, le=32, description="Texts in a message.")] = 16
    model: Annotated[str | None, Field(description="The first classifier if missing.")] = None

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the jobs; those with others share no batches, so none goes without need."""
        limit = min(self.max_length, model.settings.max_length or self.max_length)
        return {} if limit == model.settings.max_length else {"max_length": limit}


class LabelledText(TypedDict):
    """One text with its label."""

    text: str
    sentiment: str
    confidence: float
    token_count: int
    processing_order: int
    truncated: bool


class ProcessBatchResponse(TypedDict):
    """All labels, in the order of the texts; times in seconds."""

    results: list[LabelledText]
    total_texts: int
    processing_time: float
    average_time_per_text: float
    batch_info: dict[str, int | str | None]
    performance_metrics: dict[str, float | int | None]


@router.post("/process-batch")
async def process_batch(request: Request, body: ProcessBatchRequest) -> ProcessBatchResponse:
    """The label of each text."""
    gateway, model, began_s = get_gateway(request), _find_model(request, body), time.perf_counter()
    call = run_outcomes(request, model, body.texts, body.keywords(model), body.batch_size)
    outcomes = check_all(await call)
    took_s, count = time.perf_counter() - began_s, len(outcomes)
    batches, results = collect_batches(outcomes), label(body.texts, outcomes, 0)
    await _count(gateway, count, batches)
    used_gb = None
    if not all(batch.device.startswith("cpu") for batch in batches):
        used_gb = describe_devices(await gateway.monitor.workers(), model.queue)[1]
    return {
        "results": results,
        "total_texts": count,
        "processing_time": took_s,
        "average_time_per_text": took_s / count,
        "batch_info": {
            "requested_batch_size": body.batch_size,
            "actual_batches_used": len(batches),
            "max_length": min(body.max_length, model.settings.max_length or body.max_length),
            "device": ", ".join(sorted({batch.device for batch in batches})) or None,
        },
        "performance_metrics": {
            "texts_per_second": count / took_s,
            "gpu_memory_used": used_gb,
            "total_tokens_processed": sum(each["token_count"] for each in results),
        },
    }


@router.post(
    "/process-batch-stream",
    response_class=StreamingResponse,
    responses={200: {"description": "An event for each step.", "content": EVENTS_CONTENT}},
)
async def process_batch_stream(request: Request, body: ProcessBatchRequest) -> Response:
    """The labels batch by batch, as server-sent events."""
    gateway, model, size = get_gateway(request), _find_model(request, body), body.batch_size
    # Here an error has a status of its own.
    gateway.health.check(model)
    batches = [body.texts[start : start + size] for start in range(0, len(body.texts), size)]
    calls = [
        asyncio.ensure_future(run_outcomes(request, model, texts, body.keywords(model), size))
        for texts in batches
    ]
    # Also looks at the errors that nobody awaits after the first.
    asyncio.gather(*calls, return_exceptions=True)
    events = _list_events(gateway, body, batches, calls)
    return EventStream(
        (write_event(event) async for event in events), lambda: [call.cancel() for call in calls]
    )


async def _list_events(
    gateway: Gateway,
    body: ProcessBatchRequest,
    batches: Sequence[Sequence[str]],
    calls: Sequence["asyncio.Future[list[Outcome]]"],
) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, in order, until the first error; all batches are sent at once."""
    began_s, total = time.perf_counter(), len(body.texts)
    results: list[LabelledText] = []
    used: set[BatchSummary] = set()
    yield {
        "status": "started",
        "total_texts": total,
        "batch_size": body.batch_size,
        "estimated_batches": len(batches),
    }
    for number, (texts, call) in enumerate(zip(batches, calls, strict=True), 1):
        yield {
            "status": "processing_batch",
            "batch_number": number,
            "batch_size": len(texts),
            "progress": len(results) / total,
        }
        batch_began_s = time.perf_counter()
        try:
            outcomes = check_all(await call, len(results) if batches[1:] else None)
        except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
            problem = build_problem(error)
            failed = {"batch_number": number, "detail": problem.message, "kind": problem.kind}
            yield {"status": "error", **failed}
            return
        took_s, partial = time.perf_counter() - batch_began_s, label(texts, outcomes, len(results))
        results += partial
        used |= collect_batches(outcomes)
        yield {
            "status": "batch_complete",
            "batch_number": number,
            "batch_time": took_s,
            "texts_per_second": len(partial) / max(took_s, 1e-6),
            "partial_results": partial,
        }
    # Before the last event, after which callers hang up.
    await _count(gateway, total, used)
    total_s = time.perf_counter() - began_s
    times = {"total_time": total_s, "average_time_per_text": total_s / total}
    yield {"status": "completed", **times, "final_results": results}


def _find_model(request: Request, body: ProcessBatchRequest) -> ServedModel:
    request.state.caller.check(len(body.texts), sum(map(len, body.texts)))
    return get_gateway(request).models.find(body.model, KINDS)


def label(texts: Sequence[str], outcomes: Sequence[Outcome], start: int) -> list[LabelledText]:
    """The label of each text, of which the first has this place in its request."""
    return [
        {
            "text": text,
            "sentiment": outcome.value["label"],
            "confidence": outcome.value["score"],
            "token_count": outcome.value["tokens"],
            "processing_order": order,
            "truncated": outcome.value.get("truncated", False),
        }
        for order, (text, outcome) in enumerate(zip(texts, outcomes, strict=True), start)
    ]


def collect_batches(outcomes: Iterable[Outcome]) -> set[BatchSummary]:
    """The batches in which items were computed; results from a cache have none."""
    return {outcome.batch for outcome in outcomes if outcome.batch is not None}


# What these routes did, in all processes of all gateways: a sorted set in Redis, which can add and
# can keep a maximum.


COUNTERS = "batch-stats"


class BatchStatsResponse(TypedDict):
    """What was counted, and the devices of the first classifier; memory in GB, null on a CPU."""

    total_requests: int
    total_texts_processed: int
    average_batch_time: Annotated[float, Field(description="Of a forward pass, in seconds.")]
    peak_batch_size: int
    device: str | None
    model_loaded: bool
    current_gpu_memory: float | None
    max_gpu_memory: float | None


@router.get("/batch-stats")
async def batch_stats(request: Request) -> BatchStatsResponse:
    """What was counted since the beginning, and the devices of the first classifier."""
    gateway = get_gateway(request)
    gateway.health.check()
    key = gateway.store.key(COUNTERS)
    found = await gateway.store.run(lambda client: client.zrange(key, 0, -1, withscores=True))
    totals = {name.decode(): score for name, score in found}
    model = next((each for each in gateway.models if each.kind in KINDS), None)
    workers = {} if model is None else await gateway.monitor.workers()
    device, used_gb, peak_gb = describe_devices(workers, model.queue if model else "")
    return {
        "total_requests": int(totals.get("requests", 0)),
        "total_texts_processed": int(totals.get("texts", 0)),
        "average_batch_time": totals.get("forward_s", 0.0) / max(totals.get("batches", 0), 1),
        "peak_batch_size": int(totals.get("peak_batch_size", 0)),
        "device": device,
        "model_loaded": device is not None,
        "current_gpu_memory": used_gb,
        "max_gpu_memory": peak_gb,
    }


async def _count(gateway: Gateway, texts: int, batches: set[BatchSummary]) -> None:
    forward_s = sum(batch.forward_ms for batch in batches) / 1000
    sums = {"requests": 1, "texts": texts, "batches": len(batches), "forward_s": forward_s}
    peak = max((batch.size for batch in batches), default=0)
    key = gateway.store.key(COUNTERS)

    def add(client: Any) -> None:
        with client.pipeline(transaction=False) as pipe:
            for name, amount in sums.items():
                pipe.zincrby(key, amount, name)
            pipe.zadd(key, {"peak_batch_size": peak}, gt=True)
            pipe.execute()

    # If Redis has gone, the request is not counted: its labels matter more.
    with suppress(Problem):
        await gateway.store.run(add)


def describe_devices(
    workers: Mapping[str, WorkerFigures], queue: str
) -> tuple[str | None, float | None, float | None]:
    """The devices that are ready for a queue, their memory in use and its peak, in GB."""
    ready = [
        (name, device.memory)
        for figures in workers.values()
        if queue in figures.queues
        for name, device in figures.devices.items()
        if device.state == "ready"
    ]
    names = ", ".join(sorted({name for name, _ in ready})) or None
    used = [each.allocated_bytes for _, each in ready if each.allocated_bytes is not None]
    peak = [each.peak_bytes for _, each in ready if each.peak_bytes is not None]
    used_gb, peak_gb = (round(sum(sizes) / 2**30, 3) if sizes else None for sizes in (used, peak))
    return names, used_gb, peak_gb

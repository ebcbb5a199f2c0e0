"""Routes for text classification: texts in, labels out, at once or batch by batch."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Any, Literal, Required

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.sse import format_sse_event
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from batchery_producer.answers import BatchSummary, Outcome
from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import WHOLE, JsonRoute
from batchery_producer.gateway.event_stream import SSE_TYPE, EventStream
from batchery_producer.gateway.inference import check_all, run_outcomes
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.monitor import DeviceFigures, find_devices, in_gb
from batchery_producer.gateway.problems import build_problem
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody

# Answers that come in pieces: server-sent events, or a line of JSON for each


Format = Literal["sse", "jsonl"]

#: Media types of lines of JSON; we answer with the first.
LINE_TYPES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


def format_for(accept: str, given: Format | None) -> Format:
    """The format that a caller wants.

    Args:
        accept: The header `Accept`; the first type in it that we have is taken.
        given: What the query says, which comes first.
    """
    if given is not None:
        return given
    for part in accept.split(","):
        name = part.partition(";")[0].strip().lower()
        if name in LINE_TYPES:
            return "jsonl"
        if name == SSE_TYPE:
            break
    return "sse"


async def encode_events(events: AsyncIterator[Any], format_: Format) -> AsyncIterator[bytes]:
    """Writes what JSON can say as events of a format."""
    async for event in events:
        text = orjson.dumps(event)
        yield format_sse_event(data_str=text.decode()) if format_ == "sse" else text + b"\n"


# Texts in batches, and what models make of them


#: Digits after the point of times and rates.
DIGITS = 6


class LabelledText(TypedDict):
    """One text with its label."""

    text: str
    sentiment: Annotated[str, Field(description="The likeliest label.")]
    confidence: float
    token_count: int
    processing_order: Annotated[int, Field(description="Place of the text in the request, from 0.")]
    truncated: Annotated[bool, Field(description="Whether the text lost its end.")]


def labelled(texts: Sequence[str], outcomes: Sequence[Outcome], start: int) -> list[LabelledText]:
    """The label of each text.

    Args:
        texts: The texts.
        outcomes: That of each; all succeeded.
        start: Place of the first text in its request.
    """
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


def list_devices(batches: Iterable[BatchSummary]) -> str | None:
    """The devices that computed, with commas between them; None if unknown."""
    return ", ".join(sorted({batch.device for batch in batches})) or None


def per_s(count: int, seconds: float) -> float:
    """A rate; 0 if no time has passed."""
    return round(count / seconds, 3) if seconds > 0 else 0.0


def held_length(max_length: int, results: Iterable[LabelledText]) -> int:
    """How many tokens were read of a text at most; a text that was cut tells the model's limit.

    Args:
        max_length: What was asked for.
        results: As from `labelled`.
    """
    cut_at = (result["token_count"] for result in results if result["truncated"])
    return min(cut_at, default=max_length)


# The routes


router = APIRouter(tags=["texts in, labels out"], route_class=JsonRoute)

KINDS = ("classification",)

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=10_000)]


class ProcessBatchRequest(RequestBody):
    """Texts to label."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=100)]
    max_length: Annotated[
        int,
        Field(ge=50, le=1024, description="Tokens that are read of each text, at most."),
        WHOLE,
    ] = 512
    batch_size: Annotated[
        int,
        Field(ge=1, le=32, description="Texts in one message; workers join messages."),
        WHOLE,
    ] = 16
    model: Annotated[str | None, Field(description="The first classifier if missing.")] = None


class BatchInfo(TypedDict):
    """How the texts were computed."""

    requested_batch_size: int
    actual_batches_used: Annotated[
        int, Field(description="Forward passes that these texts shared with those of others.")
    ]
    max_length: Annotated[int, Field(description="What held: a model may read fewer.")]
    device: str | None


class PerformanceMetrics(TypedDict):
    """How fast."""

    texts_per_second: float
    gpu_memory_used: Annotated[float | None, Field(description="In GB; null on a CPU.")]
    total_tokens_processed: int


class ProcessBatchResponse(TypedDict):
    """All labels, in the order of the texts."""

    results: list[LabelledText]
    total_texts: int
    processing_time: Annotated[float, Field(description="In seconds.")]
    average_time_per_text: Annotated[float, Field(description="In seconds.")]
    batch_info: BatchInfo
    performance_metrics: PerformanceMetrics


class BatchStatsResponse(BaseModel):
    """What these routes did, in all processes of all gateways, and their devices."""

    total_requests: int
    total_texts_processed: int
    average_batch_time: Annotated[float, Field(description="Of a forward pass, in seconds.")]
    peak_batch_size: int
    device: str | None
    model_loaded: bool
    current_gpu_memory: Annotated[float | None, Field(description="In GB; null on a CPU.")]
    max_gpu_memory: Annotated[float | None, Field(description="In GB; null on a CPU.")]


class BatchEvent(TypedDict, total=False):
    """An event of `/process-batch-stream`; which fields it has depends on `status`."""

    status: Required[Literal["started", "processing_batch", "batch_complete", "completed", "error"]]
    total_texts: int
    batch_size: int
    estimated_batches: int
    batch_number: Annotated[int, Field(description="From 1.")]
    progress: Annotated[float, Field(description="Share of the texts that are done, 0 to 1.")]
    batch_time: float
    texts_per_second: float
    partial_results: list[LabelledText]
    total_time: float
    average_time_per_text: float
    final_results: list[LabelledText]
    detail: Annotated[str, Field(description="What went wrong; the last event.")]
    kind: str
    retry_after_s: float


#: Its references lead to the models of the answer of `/process-batch`.
EVENT_SCHEMA = TypeAdapter(BatchEvent).json_schema(ref_template="#/components/schemas/{model}")
EVENT_SCHEMA.pop("$defs")

SSE_SCHEMA = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": EVENT_SCHEMA,
        }
    },
}


@router.post("/process-batch", response_model=ProcessBatchResponse)
async def process_batch(request: Request, body: ProcessBatchRequest) -> Response:
    """The label of each text."""
    gateway = get_gateway(request)
    model = _model_for(request, body)
    began_s = time.perf_counter()
    keywords = _keywords(model, body)
    outcomes = check_all(await run_outcomes(request, model, body.texts, keywords, body.batch_size))
    took_s = time.perf_counter() - began_s
    batches, count = collect_batches(outcomes), len(outcomes)
    results = labelled(body.texts, outcomes, 0)
    await gateway.batch_counters.count(count, batches)
    content: ProcessBatchResponse = {
        "results": results,
        "total_texts": count,
        "processing_time": round(took_s, DIGITS),
        "average_time_per_text": round(took_s / count, DIGITS),
        "batch_info": {
            "requested_batch_size": body.batch_size,
            "actual_batches_used": len(batches),
            "max_length": held_length(_max_length(model, body), results),
            "device": list_devices(batches),
        },
        "performance_metrics": {
            "texts_per_second": per_s(count, took_s),
            "gpu_memory_used": await _gpu_memory(request, model, batches),
            "total_tokens_processed": sum(result["token_count"] for result in results),
        },
    }
    return json_response(content)


@router.get("/batch-stats")
async def batch_stats(request: Request) -> BatchStatsResponse:
    """What was counted since the beginning, and the devices of the first classifier."""
    gateway = get_gateway(request)
    gateway.health.check()
    totals = await gateway.batch_counters.totals()
    model = next((model for model in gateway.models if model.kind in KINDS), None)
    devices = (
        DeviceFigures()
        if model is None
        else find_devices(await gateway.monitor.workers(), model.queue)
    )
    return BatchStatsResponse(
        total_requests=totals.requests,
        total_texts_processed=totals.texts,
        average_batch_time=round(totals.forward_s / max(totals.batches, 1), DIGITS),
        peak_batch_size=totals.peak_batch_size,
        device=", ".join(devices.names) or None,
        model_loaded=bool(devices.names),
        current_gpu_memory=in_gb(devices.allocated_bytes),
        max_gpu_memory=in_gb(devices.peak_bytes),
    )


@router.post(
    "/process-batch-stream",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "An event for each step.",
            "content": {
                "text/event-stream": {"itemSchema": SSE_SCHEMA},
                "application/x-ndjson": {"itemSchema": EVENT_SCHEMA},
            },
        }
    },
)
async def process_batch_stream(
    request: Request,
    body: ProcessBatchRequest,
    format_: Annotated[
        Format | None, Query(alias="format", description="By default what `Accept` asks for.")
    ] = None,
) -> Response:
    """The labels batch by batch, as server-sent events or as lines of JSON."""
    run = _Run(request, _model_for(request, body), body)
    chosen = format_for(request.headers.get("accept", ""), format_)
    media_type = SSE_TYPE if chosen == "sse" else LINE_TYPES[0]
    return EventStream(encode_events(run.events(), chosen), run.stop, media_type)


class _Run:
    """A stream: all batches are sent at once, and told of in order."""

    def __init__(self, request: Request, model: ServedModel, body: ProcessBatchRequest) -> None:
        self._gateway = get_gateway(request)
        self._wanted = body
        self._began_s = time.perf_counter()
        keywords, size = _keywords(model, body), body.batch_size
        batches = [body.texts[start : start + size] for start in range(0, len(body.texts), size)]
        #: The texts of each batch, and how they end.
        self._batches = [
            (texts, asyncio.ensure_future(run_outcomes(request, model, texts, keywords, size)))
            for texts in batches
        ]
        # Also looks at the errors that nobody awaits after the first.
        self._all = asyncio.gather(*(ended for _, ended in self._batches), return_exceptions=True)

    def stop(self) -> None:
        """Revokes what has not ended."""
        # Not `_all`, which would hold an error that nobody asks for.
        for _, ended in self._batches:
            ended.cancel()

    async def events(self) -> AsyncIterator[BatchEvent]:
        """The events, until the first error."""
        total = len(self._wanted.texts)
        yield {
            "status": "started",
            "total_texts": total,
            "batch_size": self._wanted.batch_size,
            "estimated_batches": len(self._batches),
        }
        results: list[LabelledText] = []
        outcomes: list[Outcome] = []
        for number, (texts, running) in enumerate(self._batches, 1):
            yield {
                "status": "processing_batch",
                "batch_number": number,
                "batch_size": len(texts),
                "progress": round(len(results) / total, DIGITS),
            }
            began_s = time.perf_counter()
            try:
                ended = check_all(await running, len(results) if self._batches[1:] else None)
            except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
                yield _error_event(number, error)
                return
            took_s = time.perf_counter() - began_s
            partial = labelled(texts, ended, len(results))
            results += partial
            outcomes += ended
            yield {
                "status": "batch_complete",
                "batch_number": number,
                "batch_time": round(took_s, DIGITS),
                "texts_per_second": per_s(len(partial), took_s),
                "partial_results": partial,
            }
        # Before the last event, after which callers hang up.
        await self._gateway.batch_counters.count(total, collect_batches(outcomes))
        total_s = time.perf_counter() - self._began_s
        yield {
            "status": "completed",
            "total_time": round(total_s, DIGITS),
            "average_time_per_text": round(total_s / total, DIGITS),
            "final_results": results,
        }


def _error_event(number: int, error: Exception) -> BatchEvent:
    problem = build_problem(error)
    event: BatchEvent = {"status": "error", "batch_number": number}
    event |= {"detail": problem.message, "kind": problem.kind}
    if problem.retry_after_s is not None:
        event["retry_after_s"] = problem.retry_after_s
    return event


def _model_for(request: Request, body: ProcessBatchRequest) -> ServedModel:
    """The model of a request that may pass.

    Raises:
        Problem: There is no such model, too much text, no worker, or no Redis.
    """
    gateway = get_gateway(request)
    model = gateway.models.find(body.model, KINDS)
    request.state.caller.check(len(body.texts), sum(map(len, body.texts)))
    gateway.health.check()
    gateway.health.absence.check(model.name, model.queue)
    return model


def _max_length(model: ServedModel, body: ProcessBatchRequest) -> int:
    return min(body.max_length, model.settings.max_length or body.max_length)


def _keywords(model: ServedModel, body: ProcessBatchRequest) -> dict[str, Any]:
    limit = _max_length(model, body)
    # Jobs with other keywords share no batches, so none is sent without need.
    return {} if limit == model.settings.max_length else {"max_length": limit}


async def _gpu_memory(
    request: Request, model: ServedModel, batches: set[BatchSummary]
) -> float | None:
    if all(batch.device.startswith("cpu") for batch in batches):
        return None
    devices = find_devices(await get_gateway(request).monitor.workers(), model.queue)
    return in_gb(devices.allocated_bytes)

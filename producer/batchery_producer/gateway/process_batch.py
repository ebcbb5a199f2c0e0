"""Texts in, labels out: `/process-batch`, the same as a stream, and what both did."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
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
from batchery_producer.gateway.running import get_gateway
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


class LabelRun:
    """One request: its texts, and what has become of them.

    Attributes:
        results: The labels so far, in the order of the texts.
        batches: The forward passes that they took part in; results from a cache have none.
    """

    def __init__(self, request: Request, body: ProcessBatchRequest) -> None:
        request.state.caller.check(len(body.texts), sum(map(len, body.texts)))
        self._request, self.body, self.gateway = request, body, get_gateway(request)
        self.model = self.gateway.models.find(body.model, KINDS)
        self.results: list[LabelledText] = []
        self.batches: set[BatchSummary] = set()
        self._began_s = time.perf_counter()

    async def send(self, texts: Sequence[str]) -> list[Outcome]:
        """What comes of some of its texts."""
        keywords = self.body.keywords(self.model)
        return await run_outcomes(self._request, self.model, texts, keywords, self.body.batch_size)

    def add(self, texts: Sequence[str], outcomes: Sequence[Outcome]) -> list[LabelledText]:
        """Adds the labels of the next texts, and returns them."""
        labelled: list[LabelledText] = [
            {
                "text": text,
                "sentiment": outcome.value["label"],
                "confidence": outcome.value["score"],
                "token_count": outcome.value["tokens"],
                "processing_order": order,
                "truncated": outcome.value.get("truncated", False),
            }
            for order, (text, outcome) in enumerate(
                zip(texts, outcomes, strict=True), len(self.results)
            )
        ]
        self.results += labelled
        self.batches |= {each.batch for each in outcomes if each.batch is not None}
        return labelled

    async def end(self) -> float:
        """Counts the request; returns how long it took, in seconds."""
        took_s = time.perf_counter() - self._began_s
        forward_s = sum(batch.forward_ms for batch in self.batches) / 1000
        sums = {"texts": len(self.results), "batches": len(self.batches), "forward_s": forward_s}
        peak = max((batch.size for batch in self.batches), default=0)
        key = self.gateway.store.key(COUNTERS)

        def add(client: Any) -> None:
            with client.pipeline(transaction=False) as pipe:
                for name, amount in {"requests": 1, **sums}.items():
                    pipe.zincrby(key, amount, name)
                pipe.zadd(key, {"peak_batch_size": peak}, gt=True)
                pipe.execute()

        # If Redis has gone, the request is not counted: its labels matter more.
        with suppress(Problem):
            await self.gateway.store.run(add)
        return took_s


@router.post("/process-batch")
async def process_batch(request: Request, body: ProcessBatchRequest) -> ProcessBatchResponse:
    """The label of each text."""
    run = LabelRun(request, body)
    run.add(body.texts, check_all(await run.send(body.texts)))
    took_s, count, own = await run.end(), len(body.texts), run.model.settings
    devices = sorted({batch.device for batch in run.batches})
    used_gb = None
    if not all(each.startswith("cpu") for each in devices):
        workers = await run.gateway.monitor.workers()
        used_gb = describe_devices(workers, run.model.queue)[1]
    return {
        "results": run.results,
        "total_texts": count,
        "processing_time": took_s,
        "average_time_per_text": took_s / count,
        "batch_info": {
            "requested_batch_size": body.batch_size,
            "actual_batches_used": len(run.batches),
            "max_length": min(body.max_length, own.max_length or body.max_length),
            "device": ", ".join(devices) or None,
        },
        "performance_metrics": {
            "texts_per_second": count / took_s,
            "gpu_memory_used": used_gb,
            "total_tokens_processed": sum(each["token_count"] for each in run.results),
        },
    }


@router.post(
    "/process-batch-stream",
    response_class=StreamingResponse,
    responses={200: {"description": "An event for each step.", "content": EVENTS_CONTENT}},
)
async def process_batch_stream(request: Request, body: ProcessBatchRequest) -> Response:
    """The labels batch by batch, as server-sent events."""
    run, size = LabelRun(request, body), body.batch_size
    # Here an error has a status of its own.
    run.gateway.health.check(run.model)
    batches = [body.texts[start : start + size] for start in range(0, len(body.texts), size)]
    calls = [asyncio.ensure_future(run.send(texts)) for texts in batches]
    # Also looks at the errors that nobody awaits after the first.
    asyncio.gather(*calls, return_exceptions=True)
    events = _list_events(run, batches, calls)
    return EventStream(
        (write_event(event) async for event in events), lambda: [call.cancel() for call in calls]
    )


async def _list_events(
    run: LabelRun,
    batches: Sequence[Sequence[str]],
    calls: Sequence["asyncio.Future[list[Outcome]]"],
) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, in order, until the first error; all batches are sent at once."""
    sizes = {"total_texts": len(run.body.texts), "batch_size": run.body.batch_size}
    yield {"status": "started", **sizes, "estimated_batches": len(batches)}
    for number, (texts, call) in enumerate(zip(batches, calls, strict=True), 1):
        step, done = {"batch_number": number}, len(run.results)
        progress = {"batch_size": len(texts), "progress": done / len(run.body.texts)}
        yield {"status": "processing_batch", **step, **progress}
        began_s = time.perf_counter()
        try:
            outcomes = check_all(await call, done if batches[1:] else None)
        except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
            problem = build_problem(error)
            yield {"status": "error", **step, "detail": problem.message, "kind": problem.kind}
            return
        took_s = time.perf_counter() - began_s
        yield {
            "status": "batch_complete",
            **step,
            "batch_time": took_s,
            "texts_per_second": len(texts) / max(took_s, 1e-6),
            "partial_results": run.add(texts, outcomes),
        }
    # Before the last event, after which callers hang up.
    took_s = await run.end()
    times = {"total_time": took_s, "average_time_per_text": took_s / len(run.results)}
    yield {"status": "completed", **times, "final_results": run.results}


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

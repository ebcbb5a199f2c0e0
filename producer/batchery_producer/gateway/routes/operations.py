"""For those who run a gateway: `/health`, `/status`, `/metrics`, and the page at `/`."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pydantic import ConfigDict, Field
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from typing_extensions import TypedDict

from batchery.cli.survey import Survey
from batchery.media_settings import MEDIA_KINDS
from batchery.operations.families import collect_cluster, collect_devices, collect_failures
from batchery.protocol.figures import BatchSums, divide
from batchery_producer.gateway.answers import json_of_arguments, json_response
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.health import ClusterSnapshot
from batchery_producer.gateway.inference import check_all, run_outcomes
from batchery_producer.gateway.media import read_medium
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody

router = APIRouter(tags=["operations"])

page_router = APIRouter(tags=["page"], route_class=JsonRoute)


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """Answers 200 while jobs can be sent, 503 while Redis is away."""
    get_gateway(request).health.check()
    return Response()


# Prometheus


#: Of its own: threads that others share may all wait for Redis.
ENCODER = ThreadPoolExecutor(1, "batchery-metrics")


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counts since the start, in the text format of Prometheus."""
    gateway = get_gateway(request)
    look = await gateway.monitor.latest()
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    collector = MetricsCollector(gateway.measurements, look)
    # With several processes it reads files.
    text = await asyncio.get_running_loop().run_in_executor(ENCODER, encode, collector)
    return Response(text, headers={"Content-Type": media_type})


class MetricsCollector(Collector):
    """All metrics of one answer."""

    def __init__(self, measurements: Measurements, look: ClusterSnapshot) -> None:
        self._measurements = measurements
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """First the gateway's own."""
        yield from self._measurements.registry.collect()
        survey = self._look.now
        yield from collect_cluster(survey)
        if survey is not None:
            yield from collect_failures(survey.figures)
            yield from collect_devices(survey.figures)


# The figures of the page


@router.get("/status")
async def status(request: Request) -> Response:
    """Figures of the last seconds; `problem` says why there are none."""
    gateway = get_gateway(request)
    look = await gateway.monitor.latest()
    now, before = look.now or Survey({}, {}), look.before
    batches = [figures.batches for figures in now.figures.values()]
    failures = sum((each.failures for each in batches), Counter[str]())
    content = {
        "problem": look.problem or None,
        "age_s": round(look.age_s, 3),
        "workers": len(batches),
        "notes": [f"{name}: {why}" for name, why in now.problems(before).items()],
        "throughput": measure_throughput(now, before),
        "jobs": sum(each.jobs for each in batches),
        "items": sum(each.items for each in batches),
        "queues": list(list_queues(now)),
        "devices": list(list_devices(now, before)),
        "failures": [{"error": name, "count": count} for name, count in failures.most_common()],
        "dead_letters": now.dead_letters,
        "models": [
            {
                "name": each.name,
                "kind": each.kind,
                "queue": each.queue,
                "aliases": each.settings.aliases,
            }
            for each in gateway.models
        ],
    }
    answer = json_response(content)
    answer.headers["Cache-Control"] = "no-store"
    return answer


def measure_throughput(now: Survey, before: Survey | None) -> dict[str, float] | None:
    """What all workers did together in the last seconds, each by its own clock."""
    gained = [each for name in now.figures if (each := now.since(name, before)) is not None]
    if not gained:
        return None
    names = ("items", "jobs", "tokens")
    sums = [sum(getattr(each.batches, name) / each.clock_s for each in gained) for name in names]
    return {f"{name}_per_s": round(per_s, 3) for name, per_s in zip(names, sums, strict=True)}


def list_queues(survey: Survey) -> Iterator[dict[str, Any]]:
    """What waits in each queue, by name, be it in Redis or in a worker, and since when."""
    in_workers: Counter[str] = Counter()
    for figures in survey.figures.values():
        for name, held in figures.waiting_by_queue.items():
            in_workers[name] += held.jobs
    for name in sorted(set(survey.queues) | set(in_workers) - {""}):
        oldest_s = survey.find_oldest_s(name)
        yield {
            "name": name,
            "waiting": survey.queues.get(name, 0) + in_workers[name],
            "in_workers": in_workers[name],
            "oldest_s": round(oldest_s, 3) if oldest_s else None,
        }


def list_devices(now: Survey, before: Survey | None) -> Iterator[dict[str, Any]]:
    """The devices of all workers that answered: in the last seconds, and since they started."""
    for worker, figures in now.figures.items():
        gained = now.since(worker, before)
        for name, device in figures.devices.items():
            lately = gained.devices.get(name) if gained is not None else None
            done = lately.done if lately is not None else BatchSums()
            seconds = gained.clock_s if gained is not None and lately is not None else None
            resident_kib = device.resident_kib
            yield {
                "worker": worker,
                "name": name,
                "state": device.state,
                "batches_in_flight": device.batches_in_flight,
                "items_per_s": divide(done.items, seconds),
                # A pass that began before the first survey counts as a whole.
                "busy": min(1.0, round(done.forward_ms / 1e3 / seconds, 3)) if seconds else None,
                "batch_size": done.mean_batch_size,
                "mean_batch_size": device.done.mean_batch_size,
                "padding_waste": done.padding_waste,
                "mean_padding_waste": device.done.padding_waste,
                "resident_bytes": None if resident_kib is None else resident_kib * 1024,
                "memory_bytes": device.memory.reserved_bytes,
                "memory_size_bytes": device.memory.total_bytes,
            }


# The page: its files, and the box in which people try a model


#: The page loads nothing from elsewhere, sends nothing elsewhere, and is shown in no other page.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # It asks each time whether it has changed, so that no page talks to a newer gateway.
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """The files of the page, which keeps to itself."""

    def file_response(self, *arguments: Any, **keywords: Any) -> Response:
        """A file, or that it has not changed."""
        response = super().file_response(*arguments, **keywords)
        response.headers.update(HEADERS)
        return response


FILES = PageFiles(directory=Path(__file__).parents[1] / "page")


class TryRequest(RequestBody):
    """One item for one model."""

    model_config = ConfigDict(extra="forbid")

    model: str
    item: Annotated[Any, Field(description="What the model takes: a text, or any JSON.")]
    keywords: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Keywords of the model's task.")
    ]


class TryResponse(TypedDict):
    """What the model made of it."""

    model: str
    kind: str
    duration_ms: Annotated[float, Field(description="From the request to the result.")]
    result: Any


@page_router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """The page."""
    return await FILES.get_response("index.html", request.scope)


@page_router.get("/page/{name}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    """Its script and its style sheet."""
    return await FILES.get_response(name, request.scope)


@page_router.post("/page/try", response_model=TryResponse)
async def try_model(request: Request, body: TryRequest) -> Response:
    """Runs one item through a model of any kind; the result is what Celery's clients get."""
    gateway = get_gateway(request)
    model = gateway.models.find(body.model, {each.kind for each in gateway.models})
    is_medium = model.kind in MEDIA_KINDS
    item = read_medium(body.item) if is_medium else body.item
    json = json_of_arguments([None if is_medium else item, body.keywords])
    request.state.caller.check(1, len(item if isinstance(item, str) else json))
    began_s = time.perf_counter()
    (outcome,) = check_all(await run_outcomes(request, model, [item], body.keywords))
    content: TryResponse = {
        "model": model.name,
        "kind": model.kind,
        "duration_ms": round((time.perf_counter() - began_s) * 1e3, 2),
        "result": outcome.value,
    }
    return json_response(content)

"""`/health`, `/status` and `/metrics`: for probes, the page and Prometheus."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from batchery.operations.families import collect_cluster, collect_devices, collect_failures
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.monitor import (
    ClusterSnapshot,
    ModelStatus,
    StatusResponse,
    overview,
)
from batchery_producer.gateway.running import get_gateway

router = APIRouter(tags=["operations"])


@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """Answers 200 while jobs can be sent, 503 while Redis is away."""
    get_gateway(request).health.check()
    return Response()


@router.get("/status", response_model=StatusResponse)
async def status(request: Request) -> Response:
    """Figures of the last seconds; `problem` says why there are none."""
    gateway = get_gateway(request)
    look = await gateway.monitor.latest()
    models = [
        ModelStatus(name=each.name, kind=each.kind, queue=each.queue, aliases=each.settings.aliases)
        for each in gateway.models
    ]
    found = overview(look.now, look.before, models, look.problem, look.age_s)
    return Response(
        found.model_dump_json(),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


#: Of its own: threads that others share may all wait for Redis.
ENCODER = ThreadPoolExecutor(1, "batchery-metrics")


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counts since the start, in the text format of Prometheus."""
    gateway = get_gateway(request)
    look = await gateway.monitor.latest()
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(gateway.measurements, look))
    # With several processes it reads files.
    text = await asyncio.get_running_loop().run_in_executor(ENCODER, encode, registry)
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

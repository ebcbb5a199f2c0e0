"""`/health`, `/status` and `/metrics`: for probes, the page and Prometheus."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from batchery.cli.survey import Survey
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.monitor import (
    ClusterSnapshot,
    DeviceStatus,
    ModelStatus,
    StatusResponse,
    list_devices,
    list_queues,
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

OF_DEVICE = ["worker", "device"]

#: Of a device: name in its worker's sums, name here, what it is, and units per unit.
DEVICE_SUMS = (
    ("batches", "batches", "Batches that ran.", 1.0),
    ("items", "items", "Items that ran.", 1.0),
    ("tokens", "tokens", "Tokens of these items.", 1.0),
    ("computed_tokens", "computed_tokens", "Tokens that were computed: with padding.", 1.0),
    ("forward_ms", "forward_seconds", "Time in forward passes.", 1e-3),
)

#: Of a device: name, what it is, and its value, which may be None.
DEVICE_GAUGES: tuple[tuple[str, str, Callable[[DeviceStatus], float | None]], ...] = (
    ("ready", "Whether it takes batches.", lambda device: device.state == "ready"),
    ("batches_in_flight", "Batches that it holds.", lambda device: device.batches_in_flight),
    ("resident_memory_bytes", "Main memory of its process.", lambda device: device.resident_bytes),
    ("memory_bytes", "Memory that torch holds of a GPU.", lambda device: device.memory_bytes),
    ("memory_size_bytes", "All memory of the GPU.", lambda device: device.memory_size_bytes),
)


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
        yield from of_survey(self._look.now)


def of_survey(survey: Survey | None) -> Iterator[Metric]:
    """The metrics of workers, devices and queues; without a survey, only that there is none."""
    yield GaugeMetricFamily(
        "batchery_broker_up", "Whether the broker answered.", value=survey is not None
    )
    if survey is None:
        return
    yield from _queues(survey)
    answers = survey.figures
    yield GaugeMetricFamily("batchery_workers", "Workers that answered.", value=len(answers))
    failures = CounterMetricFamily(
        "batchery_worker_failures", "Failed jobs and items.", labels=["worker", "error"]
    )
    for worker, figures in answers.items():
        for error, count in figures.batches.failures.items():
            failures.add_metric([worker, error], count)
    yield failures
    for name, metric, text, unit in DEVICE_SUMS:
        family = CounterMetricFamily(f"batchery_device_{metric}", text, labels=OF_DEVICE)
        for worker, figures in answers.items():
            for device, state in figures.devices.items():
                family.add_metric([worker, device], getattr(state.done, name) * unit)
        yield family
    devices = list(list_devices(survey))
    for metric, text, read in DEVICE_GAUGES:
        gauge = GaugeMetricFamily(f"batchery_device_{metric}", text, labels=OF_DEVICE)
        for each in devices:
            if (value := read(each)) is not None:
                gauge.add_metric([each.worker, each.name], value)
        yield gauge


def _queues(survey: Survey) -> Iterator[Metric]:
    waiting = GaugeMetricFamily(
        "batchery_queue_waiting_jobs", "Jobs in Redis and in workers.", labels=["queue"]
    )
    oldest = GaugeMetricFamily(
        "batchery_queue_oldest_job_seconds", "Age of the oldest of them.", labels=["queue"]
    )
    for queue in list_queues(survey):
        waiting.add_metric([queue.name], queue.waiting)
        if queue.oldest_s is not None or not queue.waiting:
            oldest.add_metric([queue.name], queue.oldest_s or 0.0)
    yield waiting
    yield oldest
    if survey.dead_letters is not None:
        yield GaugeMetricFamily("batchery_dead_letters", "Dead letters.", value=survey.dead_letters)

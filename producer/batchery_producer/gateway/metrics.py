"""What Prometheus gets: the gateway's own counts, and the figures of queues and devices."""

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchery.cli.survey import Survey
from batchery_producer.gateway.monitor import ClusterSnapshot, list_devices, list_queues
from batchery_producer.gateway.problems import STATUS, Kind, build_problem
from batchery_producer.results.answers import Outcome

# Of the gateway itself


#: Label of all paths that are no route: else whoever asks for many makes as many series.
OTHER_ROUTE = "other"

#: Upper bounds of the durations that are told apart, in seconds.
DURATIONS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Measurements:
    """The gateway's metrics, those of all its processes together."""

    def __init__(self, directory: str | None = None) -> None:
        """Makes them, all 0.

        Args:
            directory: Where several processes share them; None for one process.
        """
        self.registry = CollectorRegistry()
        if directory is not None:
            MultiProcessCollector(self.registry, directory)  # type: ignore[no-untyped-call]
        # Shared ones are read from the directory alone.
        own = self.registry if directory is None else None
        prefix = "batchery_gateway"
        self.requests = Counter(
            f"{prefix}_requests", "Requests answered.", ["route", "status"], registry=own
        )
        self.durations = Histogram(
            f"{prefix}_request_duration_seconds",
            "Time from a request's head to the end of its answer.",
            ["route"],
            buckets=DURATIONS_S,
            registry=own,
        )
        self.in_flight = Gauge(
            f"{prefix}_requests_in_flight",
            "Requests that are being answered.",
            multiprocess_mode="livesum",
            registry=own,
        )
        self.items = Counter(f"{prefix}_items", "Items with a result.", ["model"], registry=own)
        self.tokens = Counter(
            f"{prefix}_tokens", "Tokens of items with a result.", ["model"], registry=own
        )
        self.failed = Counter(
            f"{prefix}_failed_items",
            "Items that failed, by kind.",
            ["kind"],
            registry=own,
        )
        # To look a label up takes as long as to count.
        self._requests_of = cache(self.requests.labels)
        self._durations_of = cache(self.durations.labels)

    def request_done(self, route: str, status: int, duration_s: float) -> None:
        """Counts a request."""
        self._requests_of(route, str(status)).inc()
        self._durations_of(route).observe(duration_s)

    def results(self, model: str, outcomes: Sequence[Outcome]) -> None:
        """Counts the outcomes of a request's items."""
        values = [outcome.value for outcome in outcomes if outcome.error is None]
        self.items.labels(model).inc(len(values))
        self.tokens.labels(model).inc(sum(map(_tokens, values)))
        for outcome in outcomes:
            if outcome.error is not None:
                self.failed.labels(build_problem(outcome.error).kind.value).inc()


def _tokens(value: object) -> int:
    tokens = value.get("tokens", 0) if isinstance(value, dict) else 0
    return tokens if isinstance(tokens, int) else 0


class Measured:
    """Counts requests; ASGI around everything."""

    def __init__(
        self, app: ASGIApp, *, measurements: Measurements, routes: Iterable[str] = ()
    ) -> None:
        """Wraps an application.

        Args:
            app: What it wraps.
            measurements: Where it counts.
            routes: The paths of all routes, as templates; all others are one.
        """
        self._app = app
        self._measurements = measurements
        self._routes: Collection[str] = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and counts it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_whole = STATUS[Kind.GONE], False

        async def count(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        began_s = time.perf_counter()
        in_flight = self._measurements.in_flight
        in_flight.inc()
        try:
            await self._app(scope, receive, count)
            if not is_whole:
                # The caller has hung up before the end of the answer.
                status = STATUS[Kind.GONE]
        except Exception:
            status = STATUS[Kind.FAILED]
            raise
        finally:
            in_flight.dec()
            self._measurements.request_done(
                self._find_route(scope), status, time.perf_counter() - began_s
            )

    def _find_route(self, scope: Scope) -> str:
        # One that was refused before it came to its route has only a path.
        path = getattr(scope.get("route"), "path", None) or scope["path"]
        return path if path in self._routes else OTHER_ROUTE


# The route, and the figures of others


router = APIRouter(tags=["operations"])

#: Of its own: threads that others share may all wait for Redis.
ENCODER = ThreadPoolExecutor(1, "batchery-metrics")

OF_DEVICE = ["worker", "device"]

#: Sums of a device: name in its worker's figures, name here, what it is, and units per unit.
DEVICE_SUMS = (
    ("batches", "batchery_device_batches", "Batches that ran.", 1.0),
    ("items", "batchery_device_items", "Items that ran.", 1.0),
    ("tokens", "batchery_device_tokens", "Tokens of these items.", 1.0),
    (
        "computed_tokens",
        "batchery_device_computed_tokens",
        "Tokens that were computed: with padding.",
        1.0,
    ),
    ("forward_ms", "batchery_device_forward_seconds", "Time in forward passes.", 1e-3),
)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counts since the start, in the text format of Prometheus."""
    gateway = request.app.state.gateway
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
    answers = {name: each for name, each in survey.workers.items() if "batches" in each}
    yield GaugeMetricFamily("batchery_workers", "Workers that answered.", value=len(answers))
    failures = CounterMetricFamily(
        "batchery_worker_failures", "Failed jobs and items.", labels=["worker", "error"]
    )
    sums = {
        name: CounterMetricFamily(metric, text, labels=OF_DEVICE)
        for name, metric, text, _ in DEVICE_SUMS
    }
    for worker, figures in answers.items():
        for error, count in figures["batches"].get("failures", {}).items():
            failures.add_metric([worker, error], count)
        for device, state in figures["devices"].items():
            for name, _, _, unit in DEVICE_SUMS:
                sums[name].add_metric([worker, device], state.get("done", {}).get(name, 0) * unit)
    yield failures
    yield from sums.values()
    yield from _devices(survey)


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


def _devices(survey: Survey) -> Iterator[Metric]:
    def gauge(name: str, text: str) -> Any:
        return GaugeMetricFamily(f"batchery_device_{name}", text, labels=OF_DEVICE)

    ready = gauge("ready", "Whether it takes batches.")
    in_flight = gauge("batches_in_flight", "Batches that it holds.")
    resident = gauge("resident_memory_bytes", "Main memory of its process.")
    held = gauge("memory_bytes", "Memory that torch holds of a GPU.")
    size = gauge("memory_size_bytes", "All memory of the GPU.")
    for device in list_devices(survey):
        labels = [device.worker, device.name]
        ready.add_metric(labels, device.state == "ready")
        in_flight.add_metric(labels, device.batches_in_flight)
        for family, value in (
            (resident, device.resident_bytes),
            (held, device.memory_bytes),
            (size, device.memory_size_bytes),
        ):
            if value is not None:
                family.add_metric(labels, value)
    yield from (ready, in_flight, resident, held, size)

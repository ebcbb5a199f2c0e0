"""What the gateway counts of itself, for Prometheus."""

import time
from collections.abc import Collection, Iterable, Sequence
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchery_producer.answers import Outcome
from batchery_producer.gateway.problems import Kind, build_problem

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
    if not isinstance(value, dict):
        return 0
    counts = [value.get(name) for name in ("tokens", "tokens_in", "tokens_out")]
    return sum(count for count in counts if isinstance(count, int))


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
        status, is_whole = Kind.GONE.status, False

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
                status = Kind.GONE.status
        except Exception:
            status = Kind.FAILED.status
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

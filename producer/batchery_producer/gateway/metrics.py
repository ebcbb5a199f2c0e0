"""What the gateway counts of itself, for Prometheus."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from batchery_producer.answers import Outcome
from batchery_producer.gateway.problems import build_problem

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

    def count_request(self, route: str, status: int, duration_s: float) -> None:
        """Counts a request."""
        self.requests.labels(route, str(status)).inc()
        self.durations.labels(route).observe(duration_s)

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

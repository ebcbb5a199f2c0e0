"""The no-op job with something that listens to it: on Batchery, or on Celery as it is."""

import os
from typing import Any

from celery import Celery, Task, signals

from benchmarks.peers.celery_client import configure, run

LISTENER = os.environ.get("PEER_LISTENER", "nothing")
STOCK = os.environ.get("PEER_STOCK") == "1"

app = Celery("bench")
configure(app)


class Hooks(Task):  # type: ignore[type-arg]
    """A hook that counts."""

    abstract = True
    seen = 0

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        """Counts a job."""
        Hooks.seen += 1


def _count(**_: Any) -> None:
    Hooks.seen += 1


if LISTENER == "sentry":
    import sentry_sdk
    from sentry_sdk.transport import Transport

    class Nowhere(Transport):
        """Sends nothing."""

        def capture_envelope(self, envelope: Any) -> None:
            """Drops an envelope."""

    sentry_sdk.init(dsn="http://key@127.0.0.1:1/1", transport=Nowhere)
elif LISTENER.startswith("otel"):
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    # Spans are made, and go nowhere.
    trace.set_tracer_provider(TracerProvider())
    if not STOCK:
        from batchery import otel

        otel.instrument()
    if STOCK or LISTENER == "otel-jobs":
        CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]
elif LISTENER == "receivers":
    signals.task_prerun.connect(_count, weak=False)
    signals.task_success.connect(_count, weak=False)
    signals.task_postrun.connect(_count, weak=False)

if STOCK:

    @app.task(name="noop", base=Hooks if LISTENER == "hook" else Task)
    def noop(item: Any) -> Any:
        """Does nothing."""
        return item

else:
    from batchery import BatchTask, install

    install(app)

    class HookedBatch(Hooks, BatchTask):
        """The same hook on a batch task."""

        abstract = True

    @app.task(name="noop", base=HookedBatch if LISTENER == "hook" else BatchTask, max_batch_size=64)
    def noop(items: list[Any]) -> list[Any]:
        """Does nothing."""
        return items


if __name__ == "__main__":
    run(app, "noop")

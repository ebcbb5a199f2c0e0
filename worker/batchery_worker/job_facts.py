"""What the tracer is told of the batch that its job was in: for its result and its run time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

from batchery.task import computed

#: Facts of the batch of the job that this thread is completing.
_facts: ContextVar[Mapping[str, Any] | None] = ContextVar("batchery_facts", default=None)


@contextmanager
def tagging(facts: Mapping[str, Any] | None) -> Iterator[None]:
    """Has this thread's results and times tell of a batch; None for a job that was in none."""
    token = _facts.set(facts)
    try:
        yield
    finally:
        _facts.reset(token)


def tracer_clock() -> float:
    """The tracer's clock: once the task has answered, the device's time has passed as well."""
    facts = _facts.get()
    answered = facts is not None and computed.get() is None
    return monotonic() + (facts["forward_ms"] / 1e3 if facts and answered else 0.0)


def tag_results(backend: Any) -> None:
    """Lets a backend write the facts of the batch into each result, as the field `batch`.

    Celery gives each thread a backend of its own; it has no public way to add a field.
    """
    if getattr(backend, "batchery_tagged", False):
        return
    stock = backend._get_result_meta

    def with_facts(*args: Any, **keywords: Any) -> dict[str, Any]:
        meta: dict[str, Any] = stock(*args, **keywords)
        facts = _facts.get()
        if facts is not None:
            meta["batch"] = dict(facts)
        return meta

    backend._get_result_meta = with_facts
    backend.batchery_tagged = True

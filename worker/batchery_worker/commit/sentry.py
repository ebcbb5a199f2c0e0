"""Sentry beside commits by the device: its wrappers of Celery's tracer, recognised and replaced.

Sentry wraps the tracer of each task, and its `__call__`. Around a success without a trace the two
do nothing that anybody sees. So such a job is committed by the device, and Sentry is not called.
With traces, they are called around a job that is done, and made to begin when its device began.

Nothing here imports Sentry: the user's code decides whether it is there.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

#: The module of Sentry that wraps Celery.
INTEGRATION = "sentry_sdk.integrations.celery"


def unwrapped(function: Any) -> Any:
    """The function that Sentry has wrapped, as often as it may have."""
    while getattr(function, "__globals__", {}).get("__name__") == INTEGRATION:
        function = function.__wrapped__
    return function


def is_active() -> bool:
    """Whether Sentry is initialised with its integration for Celery."""
    integration = sys.modules.get(INTEGRATION)
    if integration is None:
        return False
    client = sys.modules["sentry_sdk"].get_client()
    return client.get_integration(integration.CeleryIntegration) is not None


def is_tracing() -> bool:
    """Whether each job may become a transaction."""
    if not is_active():
        return False
    options: Mapping[str, Any] = sys.modules["sentry_sdk"].get_client().options
    names = ("traces_sample_rate", "traces_sampler")
    return options.get("enable_tracing") is not False and any(
        options.get(name) is not None for name in names
    )


def can_trace() -> bool:
    """Whether this version of Sentry has the wrappers that `traced` needs."""
    integration = sys.modules[INTEGRATION]
    return hasattr(integration, "_wrap_tracer") and hasattr(integration, "_wrap_task_call")


def traces() -> bool:
    """Whether each job that a device has committed may become a transaction."""
    return is_tracing() and can_trace()


def isolated(task_id: str) -> AbstractContextManager[Any] | None:
    """Enters a scope of a job's own, for what listens before its tracer; None without Sentry.

    A receiver of `task_prerun` may set tags, which the job's event must have, and no other.
    """
    if not is_active():
        return None
    scope: AbstractContextManager[Any] = sys.modules["sentry_sdk"].isolation_scope()
    isolation = scope.__enter__()
    isolation.clear_breadcrumbs()
    isolation.set_tag("celery_task_id", task_id)
    return scope


def traced(
    task: Any, after: Callable[[], None], job: tuple[str, Any, Any, Mapping[str, Any]], ran_s: float
) -> None:
    """Calls what listens after a job inside of a transaction, which a sampled trace becomes.

    Args:
        task: The task.
        after: Calls the listeners.
        job: Its id, arguments, keywords and headers, as Celery gives them to a tracer.
        ran_s: How long its device had it, in seconds.
    """
    integration: Any = sys.modules[INTEGRATION]

    def earlier(*_: Any, **__: Any) -> None:
        _begin_earlier(ran_s)

    def run(_: str, args: Any, kwargs: Any, __: Any) -> None:
        _begin_earlier(ran_s)
        integration._wrap_task_call(task, earlier)(*args, **kwargs)
        after()

    integration._wrap_tracer(task, run)(*job)


def _begin_earlier(seconds: float) -> None:
    """Moves the beginning of the current span to the past."""
    span: Any = sys.modules["sentry_sdk"].get_current_span()
    if span is not None and hasattr(span, "_start_timestamp_monotonic_ns"):
        span.start_timestamp -= timedelta(seconds=seconds)
        span._start_timestamp_monotonic_ns -= int(seconds * 1e9)

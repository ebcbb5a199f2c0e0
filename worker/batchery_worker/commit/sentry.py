"""Sentry beside commits by the device: its wrappers of Celery's tracer, recognised.

Sentry wraps the tracer of each task, and its `__call__`. Around a success the two do nothing but
time it. So such a job is committed by the device, and Sentry is not called.

Nothing here imports Sentry: the user's code decides whether it is there.
"""

import sys
from contextlib import AbstractContextManager
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

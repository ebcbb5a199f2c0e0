"""The form in which Celery stores results, and where anybody else may write it."""

import json
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend
from kombu.utils import json as kombu_json

from batchery.task import BatchTask

#: Fields of every stored result. A stamp with such a name would overwrite the field, so a job with
#: such a stamp is left to Celery.
ALWAYS_STORED = frozenset(
    {"status", "result", "traceback", "children", "date_done", "task_id", "batch"}
)


def only_celery_stores(app: Celery, task: BatchTask) -> str | None:
    """The reason why only Celery's backend can write the results of a task; None if we can.

    Args:
        app: The app of the process.
        task: One of its tasks.
    """
    backend: Any = task.backend
    # Completion threads have a subclass of the class that the app chose.
    chosen = getattr(backend, "stock_class", type(backend))
    clauses = (
        (backend is not app.backend, "a result backend of its own"),
        (chosen is not RedisBackend, "a result backend other than Celery's for Redis"),
        (backend.serializer != "json", "a result serializer other than JSON"),
        (getattr(backend, "compression", None), "compressed results"),
    )
    return next((reason for holds, reason in clauses if holds), None)


def stored_fields(
    message: Mapping[str, Any], *, ignores_result: bool, extended: bool
) -> Mapping[str, Any] | None:
    """The fields of the stored result that only some jobs have.

    Args:
        message: The headers of the job's message, with `args` and `kwargs` decoded.
        ignores_result: The task's setting, which counts if the message has none.
        extended: The setting `result_extended`.

    Returns:
        The fields; None if the job's result is not stored.
    """
    ignores = message.get("ignore_result")
    if ignores_result if ignores is None else ignores:
        return None
    fields = {}
    if message.get("group"):
        fields["group_id"] = message["group"]
    if message.get("parent_id"):
        fields["parent_id"] = message["parent_id"]
    if extended:
        fields.update(_extended_fields(message))
    return fields


def encode_fields(task_id: str, fields: Mapping[str, Any]) -> str:
    """The job's own part of a stored result, in JSON, without the braces around it.

    Args:
        task_id: Id of the job.
        fields: From `stored_fields`.

    Raises:
        TypeError: JSON cannot write a field.
        ValueError: JSON cannot write a field either.
    """
    more = f"{kombu_json.dumps(fields)[1:-1]}, " if fields else ""
    return f'{more}"task_id": {json.dumps(task_id)}'


def _extended_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    fields = {
        "name": message.get("task"),
        "args": message.get("args"),
        "kwargs": message.get("kwargs"),
        "worker": message.get("hostname"),
        "retries": message.get("retries"),
        "queue": (message.get("delivery_info") or {}).get("routing_key"),
    }
    stamps = message.get("stamps")
    if stamps:
        headers = message.get("stamped_headers")
        fields["stamped_headers"] = headers
        fields.update((name, value) for name, value in stamps.items() if name in (headers or ()))
    return fields

"""Batch tasks of an allow list: sent, looked at and revoked over HTTP."""

import asyncio
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Annotated, Any, Self

from celery import states, uuid
from fastapi import APIRouter, Path, Query, Request
from kombu.exceptions import EncodeError
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from batchery.errors import BatchArgumentError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.protocol.headers import MAX_ITEMS, with_tenant
from batchery.task import BatchTask
from batchery.tracing import trace_headers
from batchery_producer.answers import build_header
from batchery_producer.gateway.answers import json_of_arguments
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.inference import read_timeout_s, unless_gone
from batchery_producer.gateway.problems import Kind, Problem, build_problem
from batchery_producer.gateway.running import get_gateway
from batchery_producer.gateway.store import TaskRecord, TaskState, has_ended, to_json
from batchery_producer.gateway.webhooks import TASK, find_target
from batchery_producer.publisher import is_known, send_one
from batchery_producer.request_fields import RequestBody

router = APIRouter(tags=["tasks"], route_class=JsonRoute)

#: One path has one name of its parameter.
TaskId = Annotated[str, Path(alias="task", description="Id of a task, from `POST`.")]


def is_allowed(name: str, entries: Iterable[str]) -> bool:
    """Whether an allow list has a task.

    Args:
        name: Name of the task.
        entries: Names, or beginnings of names with a `*` behind them.
    """
    return any(
        name.startswith(entry[:-1]) if entry.endswith("*") else name == entry for entry in entries
    )


class TaskRequest(RequestBody):
    """A batch task, with an item or items."""

    model_config = ConfigDict(extra="forbid")

    item: Any = Field(None, description="Its item.")
    items: list[Any] = Field([], min_length=1, max_length=MAX_ITEMS, description="Several items.")
    keywords: dict[str, Any] = Field({}, description="Its keywords.")
    wait_s: float | None = Field(
        None, ge=0, description="How long to wait for the result, in seconds; up to `timeout_s`."
    )
    webhook: str | None = Field(
        None, max_length=2000, description="URL to which the result is posted."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if len(self.model_fields_set & {"item", "items"}) != 1:
            raise ValueError("expected item or items, one of the two")
        return self

    @property
    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """What the task is called with."""
        return [self.items or self.item], self.keywords


@router.post(
    "/tasks/{task}",
    response_model=TaskState,
    responses={202: {"model": TaskState, "description": "No result yet; see `Location`."}},
)
async def send_task(
    request: Request,
    name: Annotated[str, Path(alias="task", description="Name of a task.")],
    body: TaskRequest,
) -> Response:
    """Sends a task; answers with its result, or with its id if that takes longer."""
    gateway, records = get_gateway(request), get_gateway(request).task_records
    _check(request, name, body)
    gateway.health.check()
    wait_s = _wait_s(request, body.wait_s)
    # A timeout leaves nothing half sent.
    record = await asyncio.shield(_send(request, name, body))
    pending = _answer({"id": record.id, "task": name, "status": states.PENDING}, 202)
    if not wait_s:
        return pending
    try:
        state = await unless_gone(request, records.wait_for_end(record, wait_s))
    except asyncio.CancelledError:
        # The gateway stops, and the task goes on: sent again, it would run twice.
        return pending
    except Problem:
        # Nobody else can ask for it, or will be told.
        if body.webhook is None:
            await _revoke(request, record)
        raise
    return _answer(state, 200 if has_ended(state) else 202)


@router.get("/tasks/{task}", response_model=TaskState)
async def get_task(
    request: Request, task_id: TaskId, wait_s: Annotated[float, Query(ge=0)] = 0
) -> Response:
    """How a task is; waits for its end if it is told to."""
    record, records = await _find(request, task_id), get_gateway(request).task_records
    waiting = records.wait_for_end(record, _wait_s(request, wait_s))
    return _answer(await (unless_gone(request, waiting) if wait_s else waiting), 200)


@router.delete("/tasks/{task}", response_model=TaskState)
async def revoke_task(request: Request, task_id: TaskId) -> Response:
    """Tells workers not to begin a task; one that has ended stays as it is."""
    record, records = await _find(request, task_id), get_gateway(request).task_records
    state = await asyncio.to_thread(records.read_state, record)
    if not has_ended(state):
        await _revoke(request, record)
        state = await asyncio.to_thread(records.read_state, record)
    return _answer(state, 200)


def _check(request: Request, name: str, body: TaskRequest) -> None:
    """Makes sure that a caller may call a task in this way.

    Raises:
        Problem: It is not allowed or not known, too large, or no batch task.
    """
    app, settings = get_gateway(request).app, get_gateway(request).settings.gateway
    why = ""
    if not is_allowed(name, settings.tasks):
        why, code = "not in the list of tasks that may be called; see", "task_not_allowed"
    elif name not in settings.tasks and not is_known(app, name):
        why = "the app has no such task; if it is another app's, name it in full in"
        code = "task_not_found"
    if why:
        text = f"task {name!r:.100}: {why} the setting gateway.tasks"
        raise Problem(Kind.NOT_FOUND, text, code=code)
    chars = len(json_of_arguments(body.arguments).decode())
    request.state.caller.check(max(len(body.items), 1), chars)
    known: Any = app.tasks.get(name)
    if known is not None and not isinstance(known, BatchTask):
        raise Problem(Kind.INVALID, f"{name}: is no batch task")
    if body.webhook is not None:
        find_target(body.webhook, settings.webhook_hosts)
        key = settings.keys.get(request.state.caller.name)
        if key is not None and key.webhook_secret is None:
            text = "your key has no webhook_secret in the settings, with which it would be signed"
            raise Problem(Kind.INVALID, f"webhook: {text}", param="webhook")


async def _send(request: Request, name: str, body: TaskRequest) -> TaskRecord:
    """Sends a task, and notes whose it is.

    Raises:
        Problem: It cannot be sent.
    """
    record = TaskRecord(uuid(), name, request.state.caller.name, len(body.items))
    try:
        await asyncio.to_thread(_publish, request, record, body)
    except Exception as error:
        raise build_problem(error) from error
    await get_gateway(request).task_records.add(record)
    return record


def _publish(request: Request, record: TaskRecord, body: TaskRequest) -> None:
    """Sends a task as the app's own code would: to its queues, in a stock message.

    Raises:
        Problem: Its arguments do not fit.
        Exception: Whatever Celery raises.
    """
    gateway, caller, name = get_gateway(request), request.state.caller, record.task
    options: dict[str, Any] = {
        "task_id": record.id,
        "headers": {**trace_headers(), **build_header(record.count, {})},
        "expires": gateway.task_records.expires_s,
    }
    if caller.priority is not None:
        options["priority"] = caller.priority
    if not is_known(gateway.app, name):
        options["queue"] = name
    if body.webhook is not None:
        args, to = [body.webhook, asdict(record)], {"queue": JOBS_QUEUE}
        callback = gateway.app.signature(TASK, args=args, immutable=True, options=to)
        options |= {"link": [callback], "link_error": [callback]}
    try:
        send_one(gateway.app, name, *body.arguments, **with_tenant(options, caller.tenant))
    except (BatchArgumentError, EncodeError, TypeError) as error:
        # Celery compares the keywords with the signature of a task that it knows.
        raise Problem(Kind.INVALID, f"{name}: {error}") from error


async def _find(request: Request, task_id: str) -> TaskRecord:
    gateway = get_gateway(request)
    gateway.health.check()
    found: TaskRecord = await gateway.task_records.find(task_id, request.state.caller.name)
    return found


async def _revoke(request: Request, record: TaskRecord) -> None:
    gateway = get_gateway(request)
    await gateway.task_records.add(replace(record, revoked=True))
    control: Any = gateway.app.control
    try:
        await asyncio.to_thread(control.revoke, record.id)
    except Exception as error:
        raise build_problem(error) from error


def _wait_s(request: Request, wanted_s: float | None) -> float:
    longest_s: float = read_timeout_s(request)
    return longest_s if wanted_s is None else min(wanted_s, longest_s)


def _answer(state: TaskState, status: int) -> Response:
    headers = {"Location": f"/tasks/{state['id']}"} if status == 202 else {}
    return Response(to_json(state), status, headers, media_type="application/json")

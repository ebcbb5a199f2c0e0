"""Tasks of an allow list: sent, looked at and revoked over HTTP."""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Self

import orjson
from celery import Celery, states, uuid
from fastapi import APIRouter, Header, Path, Query, Request
from kombu.exceptions import EncodeError, OperationalError
from pydantic import ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from batchery.errors import BatchArgumentError
from batchery.protocol.headers import MAX_ITEMS, with_tenant
from batchery.task import BatchTask
from batchery.tracing import trace_headers
from batchery_producer.answers import build_header
from batchery_producer.gateway.answers import json_of_arguments
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.inference import read_timeout_s, unless_gone
from batchery_producer.gateway.problems import Kind, Problem, build_problem, redis_problem
from batchery_producer.gateway.running import get_gateway
from batchery_producer.gateway.task_records import TaskRecord, TaskState, to_json
from batchery_producer.gateway.webhooks import resolve_target
from batchery_producer.publisher import is_known
from batchery_producer.request_fields import RequestBody

# Which tasks callers may name


#: Beginnings of the names of Celery's own tasks, which run parts of workflows, and of ours.
INTERNAL = ("celery.", "batchery.gateway.")


def is_allowed(name: str, entries: Iterable[str]) -> bool:
    """Whether an allow list has a task.

    Args:
        name: Name of the task.
        entries: Names, or beginnings of names with a `*` behind them. Tasks of Celery itself and
            of the gateway must be named more closely than by `*` alone.
    """
    return any(
        name.startswith(entry[:-1]) if entry.endswith("*") else name == entry
        for entry in entries
        if not name.startswith(INTERNAL) or entry.startswith(INTERNAL)
    )


# Sending any task of the app, on behalf of a caller


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """What a caller wants to run.

    Attributes:
        task: Name of the task.
        args: Positional arguments; of a batch task, its item or its list of items.
        kwargs: Keyword arguments.
        count: Number of items in the list; 0 if there is a single one, or arguments.
        is_batch: Whether the caller takes it for a batch task.
    """

    task: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    count: int
    is_batch: bool

    @property
    def json(self) -> bytes:
        """The arguments, for limits and digests.

        Raises:
            Problem: Workers could not read them.
        """
        return json_of_arguments([self.args, self.kwargs])

    def digest(self, *more: str | None) -> str:
        """Digest of the call, and of other fields of its request."""
        parts = [self.task, self.count, self.is_batch, *more]
        return hashlib.sha256(orjson.dumps(parts) + self.json).hexdigest()


def check_form(app: Celery, call: RequestedCall) -> None:
    """Makes sure that the arguments are of the right form, if the app knows the task.

    Raises:
        Problem: A batch task takes an item, and others take arguments.
    """
    known: Any = app.tasks.get(call.task)
    if known is None or isinstance(known, BatchTask) is call.is_batch:
        return
    text = (
        "is no batch task; send args and kwargs, not items"
        if call.is_batch
        else "is a batch task; send item or items, and keywords"
    )
    raise Problem(Kind.INVALID, f"{call.task}: {text}")


async def send_call(
    app: Celery,
    call: RequestedCall,
    task_id: str,
    caller: Caller,
    *,
    reply: Mapping[str, Any],
    expires_s: int | None,
    callback: Any = None,
) -> None:
    """Sends a task as the app's own code would: to its queues, in a stock message.

    Args:
        app: The app.
        call: The task.
        task_id: Its id.
        caller: For whom it runs.
        reply: Headers that ask for an announcement of its end.
        expires_s: Within how many seconds a worker must begin it.
        callback: What its worker sends when it has ended, well or not.

    Raises:
        Problem: It could not be sent.
    """
    options: dict[str, Any] = {
        "task_id": task_id,
        "headers": {**trace_headers(), **build_header(call.count, reply)},
        "expires": expires_s,
    }
    if callback is not None:
        options |= {"link": [callback], "link_error": [callback]}
    if caller.priority is not None:
        options["priority"] = caller.priority
    if call.is_batch and not is_known(app, call.task):
        options["queue"] = call.task
    options = with_tenant(options, caller.tenant)
    known: Any = app.tasks.get(call.task)
    send = partial(app.send_task, call.task) if known is None else known.apply_async
    try:
        await asyncio.to_thread(send, tuple(call.args), dict(call.kwargs), **options)
    except (BatchArgumentError, EncodeError, TypeError) as error:
        # Celery compares the arguments with the signature of a task that it knows.
        raise Problem(Kind.INVALID, f"{call.task}: {error}") from error
    except Exception as error:
        raise build_problem(error) from error


# The routes


router = APIRouter(tags=["tasks"], route_class=JsonRoute)

#: Fields of the two forms of a request.
ITEM_FIELDS = frozenset({"item", "items", "keywords"})
ARGUMENT_FIELDS = frozenset({"args", "kwargs"})

WaitS = Annotated[
    float | None,
    Field(ge=0, description="How long to wait for the result, in seconds; at most `timeout_s`."),
]

#: One path has one name of its parameter.
TaskId = Annotated[str, Path(alias="task", description="Id of a task, from `POST`.")]


def _without(*fields: str) -> dict[str, Any]:
    return {"not": {"anyOf": [{"required": [field]} for field in fields]}}


class TaskRequest(RequestBody):
    """A task: with an item or items for a batch task, with arguments for any other."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "oneOf": [
                {"required": ["item"], **_without("items", *sorted(ARGUMENT_FIELDS))},
                {"required": ["items"], **_without("item", *sorted(ARGUMENT_FIELDS))},
                _without(*sorted(ITEM_FIELDS)),
            ]
        },
    )

    item: Annotated[Any, Field(description="The item of a batch task.")] = None
    items: Annotated[
        list[Any],
        Field(
            default_factory=list, min_length=1, max_length=MAX_ITEMS, description="Several items."
        ),
    ]
    keywords: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Keywords of a batch task.")
    ]
    args: Annotated[
        list[Any], Field(default_factory=list, description="Of a task that is no batch task.")
    ]
    kwargs: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Of a task that is no batch task.")
    ]
    wait_s: WaitS = None
    webhook: Annotated[
        str | None, Field(max_length=2000, description="URL to which the result is posted.")
    ] = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        given = self.model_fields_set
        if len(given & {"item", "items"}) == 1 and not given & ARGUMENT_FIELDS:
            return self
        if not given & ITEM_FIELDS:
            # A task may need no arguments at all.
            return self
        raise ValueError("expected item or items, with keywords; or else args and kwargs")

    def call(self, task: str) -> RequestedCall:
        """The task with its arguments."""
        if self.items:
            return RequestedCall(task, [self.items], self.keywords, len(self.items), is_batch=True)
        if "item" in self.model_fields_set:
            return RequestedCall(task, [self.item], self.keywords, 0, is_batch=True)
        return RequestedCall(task, self.args, self.kwargs, 0, is_batch=False)


@router.post(
    "/tasks/{task}",
    response_model=TaskState,
    responses={
        202: {"model": TaskState, "description": "No result yet; see `Location`."},
        409: {"description": "The `Idempotency-Key` was used for another request."},
    },
)
async def send_task(
    request: Request,
    name: Annotated[str, Path(alias="task", description="Name of a task.")],
    body: TaskRequest,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Response:
    """Sends a task; answers with its result, or with its id if that takes longer."""
    gateway, caller = get_gateway(request), request.state.caller
    if not is_allowed(name, gateway.settings.gateway.tasks):
        raise Problem(
            Kind.NOT_FOUND,
            f"task {name!r:.100}: not in the list of tasks that may be called; see the setting"
            " gateway.tasks",
            code="task_not_allowed",
        )
    if name not in gateway.settings.gateway.tasks and not is_known(gateway.app, name):
        raise Problem(
            Kind.NOT_FOUND,
            f"task {name!r:.100}: the app has no such task; if it is another app's, name it in"
            " full in the setting gateway.tasks",
            code="task_not_found",
        )
    call = body.call(name)
    caller.check(max(call.count, 1), len(call.json.decode()))
    check_form(gateway.app, call)
    if body.webhook is not None:
        resolve_target(body.webhook, gateway.settings.gateway.webhook_hosts)
    gateway.health.check()
    wait_s = _wait_s(request, body.wait_s)
    # A timeout leaves nothing half sent.
    sent = _sent(request, call, body.webhook, idempotency_key)
    record = await asyncio.shield(sent)
    pending = _answer({"id": record.id, "task": name, "status": states.PENDING}, 202)
    if not wait_s:
        return pending
    try:
        await _wait(request, record.id, wait_s)
    except Problem as problem:
        if problem.kind is not Kind.GONE:
            # The gateway stops, and the task goes on: sent again, it would run twice.
            return pending
        # Nobody else can ask for it, or will be told.
        if idempotency_key is None and body.webhook is None:
            await _revoke(request, record)
        raise
    state = await gateway.task_records.state(record)
    return _answer(state, 200 if _has_ended(state) else 202)


@router.get("/tasks/{task}", response_model=TaskState)
async def get_task(
    request: Request, task_id: TaskId, wait_s: Annotated[float, Query(ge=0)] = 0
) -> Response:
    """How a task is; waits for its end if it is told to."""
    gateway, caller = get_gateway(request), request.state.caller
    gateway.health.check()
    records = gateway.task_records
    record = await records.find(task_id, caller.name)
    state = await records.state(record)
    if wait_s and not _has_ended(state):
        await _wait(request, task_id, _wait_s(request, wait_s))
        # It may have been revoked meanwhile.
        record = await records.find(task_id, caller.name)
        state = await records.state(record)
    return _answer(state, 200)


@router.delete("/tasks/{task}", response_model=TaskState)
async def revoke_task(request: Request, task_id: TaskId) -> Response:
    """Tells workers not to begin a task; one that has ended stays as it is."""
    gateway, caller = get_gateway(request), request.state.caller
    gateway.health.check()
    records = gateway.task_records
    record = await records.find(task_id, caller.name)
    state = await records.state(record)
    if not _has_ended(state):
        state = await records.state(await _revoke(request, record))
    return _answer(state, 200)


async def _sent(
    request: Request, call: RequestedCall, webhook: str | None, key: str | None
) -> TaskRecord:
    """Sends a task, or finds the one that was sent for the same idempotency key.

    Raises:
        Problem: It cannot be sent, or the key was used for another one.
    """
    gateway, caller = get_gateway(request), request.state.caller
    records = gateway.task_records
    record = TaskRecord(uuid(), call.task, caller.name, call.count)
    if key is not None:
        task_id, is_new = await records.once(caller.name, key, call.digest(webhook))
        if not is_new:
            found: TaskRecord = await records.find(task_id, caller.name)
            return found
        record = replace(record, id=task_id)
    try:
        callback = None
        if webhook is not None:
            await run_in_threadpool(gateway.webhooks.add, webhook, record)
            callback = gateway.webhooks.callback(record.id, caller.tenant)
        await send_call(
            gateway.app,
            call,
            record.id,
            caller,
            reply=await gateway.result_waiter.headers(),
            expires_s=records.expires_s,
            callback=callback,
        )
    except Problem:
        if webhook is not None:
            await run_in_threadpool(gateway.webhooks.forget, record.id)
        if key is not None:
            await records.not_sent(caller.name, key)
        raise
    await records.add(record)
    return record


async def _revoke(request: Request, record: TaskRecord) -> TaskRecord:
    gateway = get_gateway(request)
    revoked: TaskRecord = await gateway.task_records.revoke(record)
    await run_in_threadpool(gateway.webhooks.forget, record.id)
    control: Any = gateway.app.control
    try:
        await asyncio.to_thread(control.revoke, record.id)
    except OperationalError as error:
        raise redis_problem(error) from error
    return revoked


async def _wait(request: Request, task_id: str, wait_s: float) -> None:
    if wait_s > 0:
        await unless_gone(request, get_gateway(request).result_waiter.wait(task_id, wait_s))


def _wait_s(request: Request, wanted_s: float | None) -> float:
    longest_s: float = read_timeout_s(request)
    return longest_s if wanted_s is None else min(wanted_s, longest_s)


def _has_ended(state: TaskState) -> bool:
    return state["status"] in states.READY_STATES


def _answer(state: TaskState, status: int) -> Response:
    headers = {"Location": f"/tasks/{state['id']}"} if status == 202 else {}
    return Response(to_json(state), status, headers, media_type="application/json")

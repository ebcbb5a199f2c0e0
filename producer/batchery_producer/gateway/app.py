"""The gateway's application: what it holds, and its routes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from celery import Celery
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from batchery.settings import Settings
from batchery_producer.async_client import AsyncClient
from batchery_producer.gateway.batch_counters import BatchCounters
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.device_figures import DeviceLook
from batchery_producer.gateway.guard import Guard
from batchery_producer.gateway.health import Health, stop
from batchery_producer.gateway.inference import Inference
from batchery_producer.gateway.problems import Kind, Problem, answer, problem_of
from batchery_producer.gateway.result_waiter import ResultWaiter
from batchery_producer.gateway.routes import (
    openai_embeddings,
    openai_models,
    probes,
    process_batch,
    tasks,
)
from batchery_producer.gateway.served_models import ServedModels
from batchery_producer.gateway.store import Store
from batchery_producer.gateway.task_calls import TaskSender
from batchery_producer.gateway.task_records import TaskRecords
from batchery_producer.gateway.webhooks import Webhooks

#: Kinds of the statuses that the framework itself answers with.
FRAMEWORK_KINDS = {
    400: Kind.INVALID,
    404: Kind.NOT_FOUND,
    405: Kind.NO_SUCH_METHOD,
    413: Kind.TOO_LARGE,
    415: Kind.INVALID,
}


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes share; `request.app.state.gateway`."""

    app: Celery
    settings: Settings
    models: ServedModels
    inference: Inference
    health: Health
    batch_counters: BatchCounters
    devices: DeviceLook
    task_sender: TaskSender
    task_records: TaskRecords
    result_waiter: ResultWaiter
    webhooks: Webhooks


def make_app(app: Celery, settings: Settings) -> FastAPI:
    """Makes the application.

    Args:
        app: The Celery app to which jobs are sent.
        settings: Its models, and the table `gateway`.

    Raises:
        SettingsError: A key has a class that is not there.
    """
    callers = Callers(settings)

    @asynccontextmanager
    async def lifespan(web: FastAPI) -> AsyncIterator[None]:
        async with _running(app, settings) as web.state.gateway:
            yield

    web = FastAPI(
        title="Batchery",
        description="Batched inference on a Celery queue.",
        version=version("batchery"),
        lifespan=lifespan,
        # Its pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    for module in (openai_embeddings, openai_models, probes, process_batch, tasks):
        web.include_router(module.router)
    web.add_exception_handler(Problem, _on_problem)
    web.add_exception_handler(RequestValidationError, _on_invalid)
    web.add_exception_handler(HTTPException, _on_http)
    web.add_exception_handler(Exception, _on_problem)
    web.add_middleware(Guard, callers=callers, settings=settings.gateway)
    if settings.gateway.cors_origins:
        # Outermost: a browser's first request has no key.
        web.add_middleware(
            CORSMiddleware,
            allow_origins=settings.gateway.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return web


@asynccontextmanager
async def _running(app: Celery, settings: Settings) -> AsyncIterator[Gateway]:
    """What the routes share, with what runs beside them."""
    health, store, waiter = Health(app), Store(app), ResultWaiter(app)
    records = TaskRecords(store)
    webhooks = Webhooks(store, records, waiter, settings.gateway)
    async with AsyncClient(app) as client:
        await health.look()
        watching = [asyncio.create_task(health.watch())]
        if settings.gateway.webhook_hosts:
            watching.append(asyncio.create_task(webhooks.watch()))
        try:
            yield Gateway(
                app,
                settings,
                ServedModels(settings.models),
                Inference(client, settings.gateway.timeout_s),
                health,
                batch_counters=BatchCounters(store),
                devices=DeviceLook(app),
                task_sender=TaskSender(app),
                task_records=records,
                result_waiter=waiter,
                webhooks=webhooks,
            )
        finally:
            for each in watching:
                await stop(each)
            await asyncio.to_thread(waiter.close)


async def _on_problem(request: Request, error: Exception) -> Response:
    return answer(request.url.path, problem_of(error))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return answer(request.url.path, invalid(first))


def invalid(error: Mapping[str, Any]) -> Problem:
    """The problem that one of pydantic's errors tells of."""
    if error["type"] == "json_invalid":
        return Problem(Kind.INVALID, f"the body is no JSON: {error['ctx']['error']}")
    text = str(error["msg"]).removeprefix("Value error, ")
    where = ".".join(str(part) for part in error["loc"] if part != "body")
    return Problem(Kind.INVALID, f"{where}: {text}" if where else text, param=where or None)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = FRAMEWORK_KINDS.get(error.status_code, Kind.FAILED)
    path = request.url.path
    texts = {
        404: f"{request.method} {path}: no such route",
        405: f"{request.method} {path}: no such method here",
    }
    headers = dict(error.headers or {})
    return answer(
        path, Problem(kind, texts.get(error.status_code, str(error.detail)), headers=headers)
    )

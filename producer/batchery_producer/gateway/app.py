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
from starlette.routing import Route

from batchery.gateway_settings import GatewaySettings
from batchery.settings import Settings
from batchery_producer.async_client import AsyncClient
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.guard import Guard
from batchery_producer.gateway.health import Health, stop
from batchery_producer.gateway.inference import Inference
from batchery_producer.gateway.measurements import Measured, Measurements
from batchery_producer.gateway.monitor import Monitor
from batchery_producer.gateway.problems import Kind, Problem, answer, problem_of
from batchery_producer.gateway.routes import (
    metrics,
    openai_embeddings,
    openai_models,
    page,
    probes,
    status,
)
from batchery_producer.gateway.served_models import ServedModels

#: Kinds of the statuses that the framework itself answers with.
FRAMEWORK_KINDS = {
    400: Kind.INVALID,
    404: Kind.NOT_FOUND,
    405: Kind.NO_SUCH_METHOD,
    413: Kind.TOO_LARGE,
    415: Kind.INVALID,
}

#: The routes of each API.
ROUTES = (openai_embeddings, openai_models, probes, status, metrics, page)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What the routes share; `request.app.state.gateway`."""

    app: Celery
    settings: Settings
    models: ServedModels
    inference: Inference
    health: Health
    monitor: Monitor
    measurements: Measurements


def make_app(app: Celery, settings: Settings, metrics_folder: str | None = None) -> FastAPI:
    """Makes the application.

    Args:
        app: The Celery app to which jobs are sent.
        settings: Its models, and the table `gateway`.
        metrics_folder: Where several processes share what they count; None for one process.

    Raises:
        SettingsError: A key has a class that is not there.
    """
    callers = Callers(settings)
    models = ServedModels(settings.models)
    measurements = Measurements(metrics_folder)

    @asynccontextmanager
    async def lifespan(web: FastAPI) -> AsyncIterator[None]:
        health = Health(app)
        monitor = Monitor(app, {model.queue for model in models})
        async with AsyncClient(app) as client:
            inference = Inference(client, settings.gateway.timeout_s, measurements)
            web.state.gateway = Gateway(
                app, settings, models, inference, health, monitor, measurements
            )
            await health.look()
            watching = asyncio.create_task(health.watch())
            try:
                yield
            finally:
                await stop(watching)
                await monitor.close()

    web = FastAPI(
        title="Batchery",
        description="Batched inference on a Celery queue.",
        version=version("batchery"),
        lifespan=lifespan,
        # Its pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    for module in ROUTES:
        web.include_router(module.router)
    web.add_exception_handler(Problem, _on_problem)
    web.add_exception_handler(RequestValidationError, _on_invalid)
    web.add_exception_handler(HTTPException, _on_http)
    web.add_exception_handler(Exception, _on_problem)
    _wrap(web, settings.gateway, callers, measurements)
    return web


def _wrap(
    web: FastAPI, settings: GatewaySettings, callers: Callers, measurements: Measurements
) -> None:
    """Puts around the routes what every request passes; the innermost first."""
    web.add_middleware(Guard, callers=callers, settings=settings)
    if settings.cors_origins:
        # Outermost: a browser's first request has no key.
        web.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    routes = [
        route.path
        for router in (web, *(module.router for module in ROUTES))
        for route in router.routes
        if isinstance(route, Route)
    ]
    web.add_middleware(Measured, measurements=measurements, routes=routes)


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

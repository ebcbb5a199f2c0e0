"""The gateway's application: its routes, what is put around them, and its schema."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from celery import Celery
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from batchery.settings import Settings
from batchery_producer.gateway import process_batch
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.guard import Guard
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.problems import ERRORS, Kind, Problem, answer, build_problem
from batchery_producer.gateway.routes import cohere, completions, openai, operations, tasks, tei
from batchery_producer.gateway.running import Gateway, running

#: Kinds of the statuses that the framework itself answers with.
FRAMEWORK_KINDS = {
    400: Kind.INVALID,
    404: Kind.NOT_FOUND,
    405: Kind.NO_SUCH_METHOD,
    413: Kind.TOO_LARGE,
    415: Kind.NOT_JSON,
}

#: All routes; those of more general paths come later.
ROUTERS = (
    openai.router,
    openai.plain_router,
    completions.router,
    cohere.router,
    tei.router,
    process_batch.router,
    tasks.router,
    operations.router,
    operations.page_router,
)


def list_routes() -> list[Route]:
    """All routes; FastAPI's own list has the routers."""
    return [each for router in ROUTERS for each in router.routes if isinstance(each, Route)]


#: How callers send their key, for the schema.
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


class Web(FastAPI):
    """The application; its `/openapi.json` has the keys, if there are any."""

    def openapi(self) -> dict[str, Any]:
        """The schema of all routes."""
        schema = super().openapi()
        if self.state.callers.have_keys:
            schema["components"]["securitySchemes"] = SECURITY_SCHEMES
            schema["security"] = [{name: []} for name in SECURITY_SCHEMES]
        return schema


def make_app(
    app: Celery,
    settings: Settings,
    metrics_folder: str | None = None,
) -> FastAPI:
    """Makes the application.

    Args:
        app: The Celery app to which jobs are sent.
        settings: Its models, and the table `gateway`.
        metrics_folder: Where several processes share what they count; None for one process.

    Raises:
        DatasetError: There is no such place for files.
    """
    callers = Callers(settings)
    measurements = Measurements(metrics_folder)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, Gateway]]:
        async with running(app, settings, measurements) as gateway:
            yield {"gateway": gateway}

    web = Web(
        title="Batchery",
        description="Batched inference on a Celery queue.",
        version=version("batchery"),
        lifespan=lifespan,
        # It would send callers on to `http://`, whatever a proxy speaks with them.
        redirect_slashes=False,
        # Its pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    web.state.callers = callers
    for router in ROUTERS:
        web.include_router(router, responses=ERRORS)
    # All others come to the guard.
    web.add_exception_handler(RequestValidationError, _on_invalid)
    web.add_exception_handler(HTTPException, _on_http)
    web.add_middleware(
        Guard,
        callers=callers,
        settings=settings.gateway,
        measurements=measurements,
        routes=[each.path for each in list_routes()],
    )
    if settings.gateway.cors_origins:
        # Around the guard: a browser's first request has no key.
        web.add_middleware(
            CORSMiddleware,
            allow_origins=settings.gateway.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Should-Retry", "Location"],
        )
    return web


async def _on_invalid(request: Request, error: Exception) -> Response:
    return answer(request.url.path, build_problem(error))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = FRAMEWORK_KINDS.get(error.status_code, Kind.FAILED)
    path = request.url.path
    texts = {
        404: f"{request.method} {path}: no such route",
        405: f"{request.method} {path}: no such method here",
    }
    text = texts.get(error.status_code, str(error.detail))
    return answer(path, Problem(kind, text, headers=error.headers))

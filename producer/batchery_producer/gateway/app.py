"""The gateway's application: its routes, what is put around them, and its schema."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from celery import Celery
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from batchery.settings import Settings
from batchery_producer.gateway import process_batch
from batchery_producer.gateway.bodies import FORM_BYTES
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.guard import Guard
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.problems import ERRORS, Kind, Problem, answer, build_problem
from batchery_producer.gateway.routes import (
    audio,
    cohere,
    completions,
    openai,
    operations,
    tasks,
    tei,
)
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
    audio.router,
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

    web = FastAPI(
        title="Batchery",
        description="Batched inference on a Celery queue.",
        version=version("batchery"),
        lifespan=lifespan,
        # For the schema: the guard looks at the key.
        dependencies=[Depends(HTTPBearer(auto_error=False))] if callers.have_keys else [],
        # It would send callers on to `http://`, whatever a proxy speaks with them.
        redirect_slashes=False,
        # Its pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
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
        uploads={
            openai.FILES_URL: settings.gateway.max_file_bytes,
            # A form has more than its file.
            **dict.fromkeys(audio.URLS, settings.media.max_bytes + FORM_BYTES),
        },
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

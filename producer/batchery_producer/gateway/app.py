"""The gateway's application: its routes, what is put around them, and its schema."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from celery import Celery
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchery.errors import BatcheryError
from batchery.settings import Settings
from batchery_producer.gateway import process_batch
from batchery_producer.gateway.callers import Callers
from batchery_producer.gateway.guard import Guard, needs_no_key
from batchery_producer.gateway.metrics import Measured, Measurements
from batchery_producer.gateway.problems import (
    FORMS,
    ErrorFormat,
    Kind,
    Problem,
    answer,
    build_problem,
    choose_error_format,
    log_failure,
)
from batchery_producer.gateway.routes import cohere, completions, openai, operations, tasks, tei
from batchery_producer.gateway.running import running

# The errors of each route in the schema


REF = "#/components/schemas/"


def describe_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds to each route how its API tells errors; what a route says itself stays.

    Args:
        schema: OpenAPI, as FastAPI makes it. It is changed.
    """
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for form in FORMS.values():
        body = TypeAdapter(form.schema).json_schema(ref_template=REF + "{model}")
        schemas.update(body.pop("$defs", {}))
        schemas[form.schema.__name__] = body
    for path, methods in schema["paths"].items():
        errors = list_responses(choose_error_format(path))
        for operation in methods.values():
            own = operation["responses"]
            if FRAMEWORK_BODY in str(own.get("422")):
                del own["422"]
            operation["responses"] = {**errors, **own}
    return schema


def describe_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose routes need a key, but for those that need none."""
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    for path, methods in schema["paths"].items():
        if needs_no_key(path) and "get" in methods:
            methods["get"]["security"] = []
    components = {**schema["components"], "securitySchemes": schemes}
    return {**schema, "components": components, "security": [{name: []} for name in schemes]}


#: How FastAPI would tell that a request is wrong, which it never does here.
FRAMEWORK_BODY = "HTTPValidationError"


def list_responses(form: ErrorFormat) -> dict[str, Any]:
    """The errors of an API by their status."""
    meanings = defaultdict(list)
    for kind in Kind:
        if kind.meaning:
            meanings[form.get_status(kind)].append(kind.meaning)
    content = {"application/json": {"schema": {"$ref": REF + form.schema.__name__}}}
    return {
        str(status): {"description": " ".join(meanings[status]), "content": content}
        for status in sorted(meanings)
    }


# The application


#: Kinds of the statuses that the framework itself answers with.
FRAMEWORK_KINDS = {
    400: Kind.INVALID,
    404: Kind.NOT_FOUND,
    405: Kind.NO_SUCH_METHOD,
    413: Kind.TOO_LARGE,
    415: Kind.NOT_JSON,
}

#: pydantic's errors of a body that is missing, null, a list or the like.
NO_OBJECT = ("missing", "dict_type", "model_attributes_type")

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


def list_routes() -> list[BaseRoute]:
    """All routes; FastAPI's own list has the routers."""
    return [route for router in ROUTERS for route in router.routes]


class Web(FastAPI):
    """The application; its `/openapi.json` has the errors of each route, too."""

    def openapi(self) -> dict[str, Any]:
        """The schema of all routes."""
        if self.openapi_schema is None:
            self.openapi_schema = describe_errors(super().openapi())
        have_keys = self.state.callers.have_keys
        return describe_keys(self.openapi_schema) if have_keys else self.openapi_schema


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
    async def lifespan(web: FastAPI) -> AsyncIterator[None]:
        async with running(app, settings, measurements) as web.state.gateway:
            yield

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
        web.include_router(router)
    web.add_exception_handler(Problem, _on_problem)
    # The last of these handlers is outside of all else, and logs a trace.
    web.add_exception_handler(BatcheryError, _on_problem)
    web.add_exception_handler(RequestValidationError, _on_invalid)
    web.add_exception_handler(HTTPException, _on_http)
    web.add_exception_handler(Exception, _on_failure)
    # What every request passes; the innermost first.
    web.add_middleware(Guard, callers=callers, settings=settings.gateway)
    if settings.gateway.cors_origins:
        # Around the guard: a browser's first request has no key.
        web.add_middleware(
            CORSMiddleware,
            allow_origins=settings.gateway.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "X-Should-Retry", "Location"],
        )
    paths = [each.path for each in (*web.routes, *list_routes()) if isinstance(each, Route)]
    web.add_middleware(Measured, measurements=measurements, routes=paths)
    return web


async def _on_problem(request: Request, error: Exception) -> Response:
    problem = build_problem(error)
    log_failure(request.scope, problem)
    if problem.kind is Kind.FAILED and problem is not error:
        # One of the gateway's own; it may name files and hosts. The server logs it.
        problem.message = "the gateway failed; its log says why"
    return answer(request.url.path, problem)


async def _on_failure(request: Request, error: Exception) -> Response:
    response = await _on_problem(request, error)
    # The guard gives their name to all other answers.
    response.headers["X-Request-Id"] = request.state.request_id
    return response


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return answer(request.url.path, invalid(first))


def invalid(error: Mapping[str, Any]) -> Problem:
    """The problem that one of pydantic's errors tells of."""
    text = str(error["msg"]).removeprefix("Value error, ")
    if tuple(error["loc"]) == ("body",) and error["type"] in NO_OBJECT:
        text = "the body is empty, or no object of JSON; send an object of the request's fields"
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
    text = texts.get(error.status_code, str(error.detail))
    return answer(path, Problem(kind, text, headers=error.headers))

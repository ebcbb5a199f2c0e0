"""The page at `/`: its three files, and the box in which people try a model."""

import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import FileResponse, Response
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import json_of_arguments, json_response
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.inference import check_all, run_outcomes
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody

router = APIRouter(tags=["page"], route_class=JsonRoute)

FOLDER = Path(__file__).parents[1] / "page"

#: Types of the files that the page consists of.
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
}

#: The page loads nothing from elsewhere, sends nothing elsewhere, and is shown in no other page.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # It asks each time whether it has changed, so that no page talks to a newer gateway.
    "Cache-Control": "no-cache",
}


class TryRequest(RequestBody):
    """One item for one model."""

    model_config = ConfigDict(extra="forbid")

    model: str
    item: Annotated[Any, Field(description="What the model takes: a text, or any JSON.")]
    keywords: Annotated[
        dict[str, Any], Field(default_factory=dict, description="Keywords of the model's task.")
    ]


class TryResponse(TypedDict):
    """What the model made of it."""

    model: str
    kind: str
    duration_ms: Annotated[float, Field(description="From the request to the result.")]
    result: Any


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Its script and its style sheet."""
    return _file(name)


@router.get("/favicon.ico", include_in_schema=False)
async def no_icon() -> Response:
    """Says that there is none; browsers ask for it."""
    return Response(status_code=204, headers={"Cache-Control": "max-age=86400"})


@router.post("/page/try", response_model=TryResponse)
async def try_model(request: Request, body: TryRequest) -> Response:
    """Runs one item through a model of any kind; the result is what Celery's clients get."""
    gateway = get_gateway(request)
    model = gateway.models.find(body.model, {each.kind for each in gateway.models})
    item = body.item
    json = json_of_arguments([item, body.keywords])
    request.state.caller.check(1, len(item if isinstance(item, str) else json))
    began_s = time.perf_counter()
    (outcome,) = check_all(await run_outcomes(request, model, [item], body.keywords))
    content: TryResponse = {
        "model": model.name,
        "kind": model.kind,
        "duration_ms": round((time.perf_counter() - began_s) * 1e3, 2),
        "result": outcome.value,
    }
    return json_response(content)


def _file(name: str) -> Response:
    if name not in FILES:
        raise Problem(Kind.NOT_FOUND, f"/page/{name:.100}: no such file of the page")
    return FileResponse(FOLDER / name, media_type=FILES[name], headers=HEADERS)

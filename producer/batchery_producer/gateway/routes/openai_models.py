"""OpenAI's `/v1/models`: the models of the settings."""

from typing import Any

from fastapi import APIRouter, Request

from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem

router = APIRouter(tags=["openai"])

OWNER = "batchery"


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models, in the order of the settings."""
    models = request.app.state.gateway.models
    return {"object": "list", "data": [_described(model) for model in models]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One model, by its name or an alias."""
    models = request.app.state.gateway.models
    for model in models:
        if name == model.name or name in model.settings.aliases:
            return _described(model)
    there = ", ".join(model.name for model in models) or "none"
    raise Problem(
        Kind.NOT_FOUND,
        f"model {name!r:.100}: no such model; there are: {there}",
        code="model_not_found",
        param="model",
    )


def _described(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        # Nothing says when it was made.
        "created": 0,
        "owned_by": OWNER,
        "kind": model.kind,
    }

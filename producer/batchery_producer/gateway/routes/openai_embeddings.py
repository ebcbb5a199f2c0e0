"""OpenAI's `/v1/embeddings`, which is TEI's as well."""

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from batchery_producer.files.openai_batch import ALIAS_IDS, has_ids
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.models.vectors import numbers
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.fields import Inputs
from batchery_producer.gateway.routes.shared import (
    embed_items,
    json_response,
    read_items,
    resolve_model,
)

router = APIRouter(tags=["openai"], route_class=JsonRoute)


class EmbeddingsRequest(RequestBody):
    """What OpenAI's clients send; other fields are ignored, as there."""

    input: Inputs
    model: Annotated[str | None, Field(description="The first embedding model if missing.")] = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    user: str | None = None


class EmbeddingObject(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: Usage


@router.post("/v1/embeddings", response_model=EmbeddingsResponse)
async def embeddings(request: Request, wanted: EmbeddingsRequest) -> Response:
    """One vector for each input."""
    model = resolve_model(request, wanted.model, ("embedding",))
    if has_ids(wanted.input) and not model.is_own_name(wanted.model):
        raise Problem(Kind.INVALID, ALIAS_IDS.format(wanted.model), param="input")
    items = read_items(request, "input", wanted.input)
    results = await embed_items(request, model, items, {}, wanted.dimensions)
    tokens = sum(result["tokens"] for result in results)
    as_text = wanted.encoding_format == "base64"
    content = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": result["vector"] if as_text else numbers(result["vector"]),
            }
            for index, result in enumerate(results)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return json_response(content)

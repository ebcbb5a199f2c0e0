"""OpenAI's `/v1/embeddings`, which is TEI's as well."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.vectors import numbers

router = APIRouter(tags=["openai"])

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class EmbeddingsRequest(BaseModel):
    """What OpenAI's clients send; other fields are ignored, as there."""

    model_config = ConfigDict(strict=True)

    input: Annotated[
        str | TokenIds | list[str] | list[TokenIds],
        Field(description="A text, token ids of the model's own tokenizer, or a list of either."),
    ]
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
    gateway = request.app.state.gateway
    model = gateway.models.find(wanted.model, ("embedding",))
    items = items_of(wanted.input)
    request.state.caller.check(len(items), chars_of(items))
    gateway.health.check()
    keywords: dict[str, Any] = {"encoding": "base64"}
    if wanted.dimensions is not None:
        keywords["dimensions"] = wanted.dimensions
    results = await gateway.inference.values(request, model, items, keywords)
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
    return Response(
        orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json"
    )


def items_of(given: str | Sequence[Any]) -> list[Any]:
    """The items of a request: one, or a list.

    Raises:
        Problem: There is none.
    """
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise Problem(Kind.EMPTY, "input: an empty list; send a text at least", param="input")
    return list(given)


def chars_of(items: Sequence[Any]) -> int:
    """Characters of all items; of token ids, as many as there are."""
    return sum(map(len, items))

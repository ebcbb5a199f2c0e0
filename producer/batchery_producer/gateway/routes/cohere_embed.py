"""Cohere's `/v1/embed` and `/v2/embed`."""

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.models import numbers
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.cohere_rerank import ApiVersion, InputTokens
from batchery_producer.gateway.routes.embedding_options import (
    build_overflow_keywords,
    choose_prompt,
)
from batchery_producer.gateway.routes.fields import Unserved, expected
from batchery_producer.gateway.routes.shared import embed_items, read_items, resolve_model

router = APIRouter(tags=["embed"], route_class=JsonRoute)

#: Whether a text that is too long is cut, and where.
TRUNCATION: Mapping[str | None, tuple[bool | None, str | None]] = {
    None: (None, None),
    "NONE": (False, None),
    "START": (True, "left"),
    "END": (True, "right"),
}


class CohereEmbedRequest(RequestBody):
    """What Cohere's clients send; other fields are ignored."""

    model: Annotated[str | None, Field(description="The first embedding model if missing.")] = None
    texts: Annotated[list[str] | None, Field(examples=[["the cat", "a dog"]])] = None
    input_type: Annotated[
        Literal["search_document", "search_query", "classification", "clustering"] | None,
        Field(description="Puts the model's prompt for that in front."),
    ] = None
    embedding_types: Annotated[
        Annotated[list[Literal["float", "base64", "binary", "ubinary"]], Field(min_length=1)]
        | None,
        expected("a list of 'float', 'base64', 'binary' or 'ubinary'"),
    ] = None
    truncate: Literal["NONE", "START", "END"] | None = None
    images: Unserved = None


class TextPart(RequestBody):
    """A text of an input."""

    type: Literal["text"]
    text: str


class CohereInput(RequestBody):
    """An input of the second version: one text."""

    content: Annotated[list[TextPart], Field(min_length=1, max_length=1)]


class CohereEmbedV2Request(CohereEmbedRequest):
    """What the second version of Cohere's clients sends."""

    model: str
    inputs: Annotated[
        list[CohereInput] | None, expected("a list of inputs whose content is one text")
    ] = None
    output_dimension: Annotated[int | None, Field(ge=1)] = None
    max_tokens: Unserved = None


class EmbedMeta(BaseModel):
    """What the answer took."""

    api_version: ApiVersion
    billed_units: InputTokens
    tokens: InputTokens


class CohereEmbedResponse(BaseModel):
    """The vectors; by their types, unless the first version was asked for none."""

    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    id: str
    embeddings: list[list[float]] | dict[str, list[list[float] | str]]
    texts: list[str]
    meta: EmbedMeta


@router.post("/v1/embed", response_model=CohereEmbedResponse)
async def embed_v1(request: Request, body: CohereEmbedRequest) -> Response:
    """One vector for each text."""
    return await _embed(request, body, body.texts, "1")


@router.post("/v2/embed", response_model=CohereEmbedResponse)
async def embed_v2(request: Request, body: CohereEmbedV2Request) -> Response:
    """One vector for each text, in each of the wanted types."""
    texts = body.texts
    if body.inputs is not None:
        texts = (texts or []) + [each.content[0].text for each in body.inputs]
    return await _embed(request, body, texts, "2", body.output_dimension)


async def _embed(
    request: Request,
    body: CohereEmbedRequest,
    texts: list[str] | None,
    version: str,
    dimensions: int | None = None,
) -> Response:
    model = resolve_model(request, body.model, ("embedding",))
    if texts is None:
        raise Problem(Kind.EMPTY, "texts: is missing; send a text at least", param="texts")
    items = read_items(request, "texts", texts)
    keywords = build_overflow_keywords(model, *TRUNCATION[body.truncate])
    keywords |= await choose_prompt(request, model, "input_type", body.input_type)
    results = await embed_items(request, model, items, keywords, dimensions)
    vectors = [result["vector"] for result in results]
    types = body.embedding_types or ["float"]
    is_plain = version == "1" and body.embedding_types is None
    by_type = {name: [_in_type(name, vector) for vector in vectors] for name in types}
    tokens = {"input_tokens": sum(result["tokens"] for result in results)}
    return json_response(
        {
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
            "id": str(uuid.uuid4()),
            "embeddings": by_type["float"] if is_plain else by_type,
            "texts": texts,
            "meta": {"api_version": {"version": version}, "billed_units": tokens, "tokens": tokens},
        }
    )


def _in_type(name: str, vector: str) -> Any:
    """A vector in one of Cohere's types; of the binary ones, a bit says whether a number is > 0."""
    if name == "base64":
        return vector
    if name == "float":
        return numbers(vector)
    bits = np.packbits(numbers(vector) > 0)
    return bits if name == "ubinary" else (bits ^ 128).view(np.int8)

"""Cohere's `/v1/embed` and `/v2/embed`, `/v1/rerank` and `/v2/rerank`, which is Jina's, too."""

import math
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import best_first, json_response
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.inference import (
    build_keywords,
    choose_prompt,
    embed_items,
    read_items,
    run_items,
)
from batchery_producer.gateway.models import numbers
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.openai import Usage
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody, Unserved, expected

router = APIRouter(route_class=JsonRoute)

# Rerank


#: Documents of one search unit, as Cohere counts.
DOCUMENTS_PER_UNIT = 100

Document = str | dict[str, str]


class CohereRerankRequest(RequestBody):
    """What clients of Cohere and Jina send; other fields are ignored."""

    model: Annotated[str | None, Field(description="The first reranker if missing.")] = None
    query: Annotated[str, Field(examples=["what do cats do?"])]
    documents: Annotated[
        list[Document],
        expected("a list of texts, or of objects of texts"),
        Field(
            description="Texts, or objects with the field `text`.",
            examples=[["the cat sleeps", {"text": "the dog barks"}]],
        ),
    ]
    top_n: Annotated[int | None, Field(ge=1, description="Only so many, the best.")] = None
    return_documents: Annotated[
        bool | None, Field(description="Whether the answer has the documents, too.")
    ] = None
    rank_fields: Unserved = None


class RerankedDocument(TypedDict):
    """One document, and how well it fits."""

    index: Annotated[int, Field(ge=0, description="Its place in the request.")]
    relevance_score: float
    document: NotRequired[dict[str, str]]


#: What an answer took: `api_version`, `billed_units` and `tokens`, as Cohere tells it.
Meta = dict[str, dict[str, Any]]


class RerankResponse(TypedDict):
    """The documents, the best first: the fields of Cohere's answer, and of Jina's."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankedDocument]
    meta: Meta
    usage: Usage


@router.post("/v1/rerank", tags=["rerank"], response_model=RerankResponse)
@router.post("/v2/rerank", tags=["rerank"], response_model=RerankResponse)
async def rerank(request: Request, body: CohereRerankRequest) -> Response:
    """The documents by how well they fit the query, the best first."""
    served = get_gateway(request).models.find(body.model, ("rerank",))
    documents = read_items(request, "documents", body.documents)
    texts = [_find_text(index, document) for index, document in enumerate(documents)]
    items = [{"query": body.query, "text": text} for text in texts]
    found = await run_items(request, served, items, {})
    scores = [result["score"] for result in found]
    results: list[RerankedDocument] = [
        {"index": index, "relevance_score": scores[index]}
        for index in best_first(scores)[: body.top_n]
    ]
    if body.return_documents:
        for result in results:
            document = documents[result["index"]]
            result["document"] = {"text": document} if isinstance(document, str) else document
    tokens = sum(result["tokens"] for result in found)
    units = math.ceil(len(items) / DOCUMENTS_PER_UNIT)
    content: RerankResponse = {
        "id": str(uuid.uuid4()),
        "object": "list",
        "model": served.name,
        "results": results,
        "meta": {
            "api_version": {"version": find_version(request)},
            "billed_units": {"search_units": units},
            "tokens": {"input_tokens": tokens},
        },
        "usage": {"total_tokens": tokens, "prompt_tokens": tokens},
    }
    return json_response(content)


def find_version(request: Request) -> str:
    """The version of Cohere's API that a path names."""
    return request.url.path[len("/v")]


def _find_text(index: int, document: Document) -> str:
    """The text of a document; raises a `Problem` if it has none."""
    if isinstance(document, str):
        return document
    if "text" not in document:
        text = f"document {index}: has no field 'text'"
        raise Problem(Kind.INVALID, text, param="documents")
    return document["text"]


# Embed


#: Whether a text that is too long is cut, and where.
TRUNCATION: Mapping[str | None, tuple[bool | None, str | None]] = {
    None: (None, None),
    "NONE": (False, None),
    "START": (True, "left"),
    "END": (True, "right"),
}


class TextPart(RequestBody):
    """A text of an input."""

    type: Literal["text"]
    text: str


class CohereInput(RequestBody):
    """An input of the second version: one text."""

    content: Annotated[list[TextPart], Field(min_length=1, max_length=1)]


class CohereEmbedRequest(RequestBody):
    """What Cohere's clients send; other fields are ignored."""

    model: Annotated[str | None, Field(description="The first embedding model if missing.")] = None
    texts: Annotated[list[str] | None, Field(examples=[["the cat", "a dog"]])] = None
    inputs: Annotated[
        list[CohereInput] | None, expected("a list of inputs whose content is one text")
    ] = None
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
    output_dimension: Annotated[int | None, Field(ge=1)] = None
    images: Unserved = None
    max_tokens: Unserved = None


class CohereEmbedResponse(TypedDict):
    """The vectors; by their types, unless the first version was asked for none."""

    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    id: str
    embeddings: list[list[float]] | dict[str, list[list[float] | str]]
    texts: list[str]
    meta: Meta


@router.post("/v1/embed", tags=["embed"], response_model=CohereEmbedResponse)
@router.post("/v2/embed", tags=["embed"], response_model=CohereEmbedResponse)
async def embed(request: Request, body: CohereEmbedRequest) -> Response:
    """One vector for each text; version 2 has them by their types."""
    model = get_gateway(request).models.find(body.model, ("embedding",))
    texts = (body.texts or []) + [each.content[0].text for each in body.inputs or ()]
    items = read_items(request, "texts", texts)
    keywords = build_keywords(model, *TRUNCATION[body.truncate])
    keywords |= await choose_prompt(request, model, body.input_type)
    results = await embed_items(request, model, items, keywords, body.output_dimension)
    vectors = [result["vector"] for result in results]
    types = body.embedding_types or ["float"]
    version = find_version(request)
    is_plain = version == "1" and body.embedding_types is None
    by_type: dict[str, list[Any]] = {
        name: [_in_type(name, vector) for vector in vectors] for name in types
    }
    tokens = {"input_tokens": sum(result["tokens"] for result in results)}
    content: CohereEmbedResponse = {
        "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        "id": str(uuid.uuid4()),
        "embeddings": by_type["float"] if is_plain else by_type,
        "texts": texts,
        "meta": {"api_version": {"version": version}, "billed_units": tokens, "tokens": tokens},
    }
    return json_response(content)


def _in_type(name: str, vector: str) -> Any:
    """A vector in one of Cohere's types; of the binary ones, a bit says whether a number is > 0."""
    if name == "base64":
        return vector
    if name == "float":
        return numbers(vector)
    bits = np.packbits(numbers(vector) > 0)
    return bits if name == "ubinary" else (bits ^ 128).view(np.int8)

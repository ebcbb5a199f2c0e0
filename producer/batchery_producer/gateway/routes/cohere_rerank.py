"""Cohere's `/v1/rerank` and `/v2/rerank`; Jina's clients find theirs in the first."""

import math
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from batchery_producer.gateway.answers import best_first, json_response
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.fields import expected
from batchery_producer.gateway.routes.openai_embeddings import Usage
from batchery_producer.gateway.routes.shared import resolve_model, run_items

router = APIRouter(tags=["rerank"], route_class=JsonRoute)

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
            description="Texts, or objects with the field `text` or those of `rank_fields`.",
            examples=[["the cat sleeps", {"text": "the dog barks"}]],
        ),
    ]
    top_n: Annotated[int | None, Field(ge=1, description="Only so many, the best.")] = None
    return_documents: Annotated[
        bool | None, Field(description="Whether the answer has the documents, too.")
    ] = None
    rank_fields: Annotated[
        list[str] | None, Field(min_length=1, description="Fields of documents that count.")
    ] = None


class CohereRerankV2Request(CohereRerankRequest):
    """What the second version of Cohere's clients sends."""

    model: str


class RerankedDocument(BaseModel):
    """One document, and how well it fits."""

    index: Annotated[int, Field(ge=0, description="Its place in the request.")]
    relevance_score: float
    document: dict[str, str] | None = None


class ApiVersion(BaseModel):
    """Version of Cohere's API."""

    version: str


class BilledUnits(BaseModel):
    """What Cohere would bill."""

    search_units: int


class InputTokens(BaseModel):
    """Tokens that were read."""

    input_tokens: int


class CohereMeta(BaseModel):
    """What the answer took."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: InputTokens


class RerankResponse(BaseModel):
    """The documents, the best first: the fields of Cohere's answer, and of Jina's."""

    id: str
    object: str = "list"
    model: str
    results: list[RerankedDocument]
    meta: CohereMeta
    usage: Usage


@router.post("/v1/rerank", response_model=RerankResponse)
async def rerank_v1(request: Request, body: CohereRerankRequest) -> Response:
    """The documents by how well they fit the query, the best first."""
    return await reranked(request, body, "1")


@router.post("/v2/rerank", response_model=RerankResponse)
async def rerank_v2(request: Request, body: CohereRerankV2Request) -> Response:
    """The documents by how well they fit the query, the best first."""
    return await reranked(request, body, "2")


async def reranked(request: Request, body: CohereRerankRequest, api_version: str) -> Response:
    """Answers either version.

    Raises:
        Problem: There is no such model, a document has no text, or the model failed.
    """
    served = resolve_model(request, body.model, ("rerank",))
    if not body.documents:
        raise Problem(Kind.EMPTY, "documents: an empty list; send one at least", param="documents")
    request.state.caller.check(len(body.documents), 0)
    # A field counts once, so the texts are not longer than the documents.
    fields = list(dict.fromkeys(body.rank_fields or ["text"]))
    texts = [_text(index, document, fields) for index, document in enumerate(body.documents)]
    items = [{"query": body.query, "text": text} for text in texts]
    found = await run_items(request, served, items, {})
    scores = [result["score"] for result in found]
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]}
        for index in best_first(scores)[: body.top_n]
    ]
    if body.return_documents:
        for result in results:
            document = body.documents[result["index"]]
            result["document"] = {"text": document} if isinstance(document, str) else document
    tokens = sum(result["tokens"] for result in found)
    units = math.ceil(len(items) / DOCUMENTS_PER_UNIT)
    return json_response(
        {
            "id": str(uuid.uuid4()),
            "object": "list",
            "model": served.name,
            "results": results,
            "meta": {
                "api_version": {"version": api_version},
                "billed_units": {"search_units": units},
                "tokens": {"input_tokens": tokens},
            },
            "usage": {"total_tokens": tokens, "prompt_tokens": tokens},
        }
    )


def _text(index: int, document: Document, fields: list[str]) -> str:
    """The text of a document.

    Raises:
        Problem: It lacks a field.
    """
    if isinstance(document, str):
        return document
    missing = [field for field in fields if field not in document]
    if missing:
        raise Problem(
            Kind.INVALID,
            f"document {index}: has no field {missing[0]!r:.80}; name others in rank_fields",
            param="documents",
        )
    return "\n".join(document[field] for field in fields)

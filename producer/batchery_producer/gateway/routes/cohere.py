"""Cohere's `/v1/rerank` and `/v2/rerank`, which is Jina's, too."""

import math
import uuid
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import best_first, json_response
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.inference import read_items, run_items
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.openai import Usage
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody, Unserved, expected

router = APIRouter(route_class=JsonRoute)

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

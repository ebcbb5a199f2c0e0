"""`POST /` and `/info`: what clients of TEI expect of a server with one model."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Body, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response

from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.models import UNKNOWN, ModelInfo, build_info
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.routes.fields import ModelName
from batchery_producer.gateway.routes.pipelines import (
    TokenRequest,
    ZeroShotRequest,
    find_entities,
    zero_shot,
)
from batchery_producer.gateway.routes.shared import resolve_model
from batchery_producer.gateway.routes.tei_embeddings import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    SimilarityRequest,
    embed,
    embed_all,
    embed_sparse,
    similarity,
)
from batchery_producer.gateway.routes.tei_scores import (
    PipelineRequest,
    PredictRequest,
    RerankTextsRequest,
    pipeline,
    predict,
    rerank,
)

router = APIRouter(tags=["tei"], route_class=JsonRoute)


class Handler(NamedTuple):
    """What to do with a body.

    Attributes:
        form: Its model.
        run: The route that takes it.
    """

    form: type[BaseModel]
    run: Callable[[Request, Any, str | None], Awaitable[Response]]


WAYS: Mapping[str, Handler] = {
    "embedding": Handler(EmbedRequest, embed),
    "multi_vector_embedding": Handler(EmbedAllRequest, embed_all),
    "sparse_embedding": Handler(EmbedSparseRequest, embed_sparse),
    "classification": Handler(PredictRequest, predict),
    "rerank": Handler(RerankTextsRequest, rerank),
}

#: Kinds that TEI does not have.
PIPELINES: Mapping[str, Handler] = {
    "zero_shot": Handler(ZeroShotRequest, zero_shot),
    "token_classification": Handler(TokenRequest, find_entities),
}

#: Where the schema has what `POST /` takes.
BODIES = [
    {"$ref": f"#/components/schemas/{way.form.__name__}"}
    for way in (*WAYS.values(), Handler(SimilarityRequest, similarity))
]


class PoolingInfo(BaseModel):
    """How token vectors become one."""

    pooling: str


class LabelInfo(BaseModel):
    """The labels of a model."""

    id2label: dict[str, str]
    label2id: dict[str, Annotated[int, Field(ge=0)]]


class EmbeddingType(BaseModel):
    """A model of vectors."""

    embedding: PoolingInfo


class ClassifierType(BaseModel):
    """A model of labels."""

    classifier: LabelInfo


class RerankerType(BaseModel):
    """A model that compares."""

    reranker: LabelInfo


Count = Annotated[int, Field(ge=0)]


class ServerInfo(BaseModel):
    """A model and the limits of the server, as TEI tells them."""

    model_id: str
    model_sha: str | None
    model_dtype: Annotated[str, Field(description="`auto` where the device decides.")]
    served_model_name: str
    model_type: EmbeddingType | ClassifierType | RerankerType
    max_concurrent_requests: Count
    max_input_length: Annotated[int, Field(ge=0, description="Tokens; 0 if unknown here.")]
    max_batch_tokens: Annotated[int, Field(ge=0, description="0 where the device decides.")]
    max_batch_requests: Count | None
    max_client_batch_size: Count
    auto_truncate: bool
    tokenization_workers: Count
    version: str
    sha: str | None
    docker_label: str | None


@router.post(
    "/",
    response_model=None,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"anyOf": BODIES}}},
        }
    },
)
async def root(
    request: Request, body: Annotated[dict[str, Any], Body()], model: ModelName = None
) -> Response:
    """What the first model does, or the named one: `/embed`, `/predict`, `/rerank` and so on."""
    given = body.get("model")
    name = given if isinstance(given, str) and given else model
    served = resolve_model(request, name, None if name else {**WAYS, **PIPELINES})
    way = _way(served.kind, body)
    try:
        payload = way.form.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    return await way.run(request, payload, served.name)


def _way(kind: str, body: Mapping[str, Any]) -> Handler:
    """What to do with a body; its form tells what the kind leaves open."""
    if kind == "embedding" and isinstance(body.get("inputs"), dict):
        return Handler(SimilarityRequest, similarity)
    if kind == "classification" and "parameters" in body:
        return Handler(PipelineRequest, pipeline)
    return {**WAYS, **PIPELINES}[kind]


@router.get("/info", response_model=ServerInfo)
async def info(request: Request, model: ModelName = None) -> Response:
    """The first model, or the named one, and the limits of requests."""
    gateway = request.app.state.gateway
    served = resolve_model(request, model, None)
    try:
        known: ModelInfo = await gateway.model_facts.of(served)
    except Problem:
        # Only a worker has its files.
        known = UNKNOWN
    return json_response(build_info(served, known, gateway.settings, request.state.caller))

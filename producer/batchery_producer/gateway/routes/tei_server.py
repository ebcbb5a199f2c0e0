"""What clients of TEI expect of a server with one model: `POST /` and `/info`."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.responses import Response
from typing_extensions import TypedDict

from batchery.settings import Settings
from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import JsonRoute, ModelName
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.models import UNKNOWN, ModelInfo, ServedModel
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.routes.tei import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PipelineRequest,
    PredictRequest,
    RerankTextsRequest,
    SimilarityRequest,
    TokenRequest,
    ZeroShotRequest,
    embed,
    embed_all,
    embed_sparse,
    find_entities,
    pipeline,
    predict,
    rerank,
    similarity,
    zero_shot,
)
from batchery_producer.gateway.running import get_gateway

router = APIRouter(tags=["tei"], route_class=JsonRoute)

# `POST /` and `/info`


#: What to do with a body for a model of each kind: its form, and the route that takes it.
HANDLERS: dict[str, tuple[type[BaseModel], Callable[..., Awaitable[Response]]]] = {
    "embedding": (EmbedRequest, embed),
    "multi_vector_embedding": (EmbedAllRequest, embed_all),
    "sparse_embedding": (EmbedSparseRequest, embed_sparse),
    "classification": (PredictRequest, predict),
    "rerank": (RerankTextsRequest, rerank),
    # Kinds that TEI does not have.
    "zero_shot": (ZeroShotRequest, zero_shot),
    "token_classification": (TokenRequest, find_entities),
}

#: Forms that the schema has for `POST /`.
ROOT_FORMS: tuple[type[BaseModel], ...] = (
    *(EmbedRequest, EmbedAllRequest, EmbedSparseRequest),
    *(PredictRequest, RerankTextsRequest, SimilarityRequest),
)
BODIES = [{"$ref": f"#/components/schemas/{form.__name__}"} for form in ROOT_FORMS]

#: torch's names of number formats.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class PoolingInfo(TypedDict):
    """How token vectors become one."""

    pooling: str


class LabelInfo(TypedDict):
    """The labels of a model."""

    id2label: dict[str, str]
    label2id: dict[str, Annotated[int, Field(ge=0)]]


class EmbeddingType(TypedDict):
    """A model of vectors."""

    embedding: PoolingInfo


class ClassifierType(TypedDict):
    """A model of labels."""

    classifier: LabelInfo


class RerankerType(TypedDict):
    """A model that compares."""

    reranker: LabelInfo


Count = Annotated[int, Field(ge=0)]


class ServerInfo(TypedDict):
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
    served = get_gateway(request).models.find(name, HANDLERS)
    form, run = HANDLERS[served.kind]
    # The form of a body tells what the kind leaves open.
    if served.kind == "embedding" and isinstance(body.get("inputs"), dict):
        form, run = SimilarityRequest, similarity
    elif served.kind == "classification" and "parameters" in body:
        form, run = PipelineRequest, pipeline
    try:
        payload = form.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    return await run(request, payload, served.name)


def build_info(
    model: ServedModel, info: ModelInfo, settings: Settings, caller: Caller
) -> ServerInfo:
    """A model and the limits of requests, in TEI's words."""
    own = model.settings
    return {
        # Where its folder lies is nobody's business.
        "model_id": Path(own.model).name if Path(own.model).is_absolute() else own.model,
        "model_sha": own.revision,
        "model_dtype": DTYPES.get(own.dtype, own.dtype),
        "served_model_name": model.name,
        "model_type": _describe_type(model, info),
        "max_concurrent_requests": caller.max_concurrency,
        "max_input_length": own.max_length or info.max_tokens or 0,
        "max_batch_tokens": own.max_batch_tokens or settings.max_batch_tokens or 0,
        "max_batch_requests": own.max_batch_size or settings.max_batch_size,
        "max_client_batch_size": caller.max_items,
        "auto_truncate": own.overflow == "truncate",
        "tokenization_workers": settings.gateway.processes,
        "version": version("batchery"),
        "sha": None,
        "docker_label": None,
    }


def _describe_type(
    model: ServedModel, info: ModelInfo
) -> EmbeddingType | ClassifierType | RerankerType:
    if "embedding" in model.kind:
        pooling = {"embedding": model.settings.pooling, "sparse_embedding": "splade"}
        return {"embedding": {"pooling": pooling.get(model.kind, "none")}}
    labels: LabelInfo = {
        "id2label": {str(number): name for number, name in info.labels.items()},
        "label2id": {name: number for number, name in info.labels.items()},
    }
    return {"reranker": labels} if model.kind == "rerank" else {"classifier": labels}


@router.get("/info", response_model=ServerInfo)
async def info(request: Request, model: ModelName = None) -> Response:
    """The first model, or the named one, and the limits of requests."""
    gateway = get_gateway(request)
    served = gateway.models.find(model, HANDLERS)
    try:
        known: ModelInfo = await gateway.model_facts.of(served)
    except Problem:
        # Only a worker has its files.
        known = UNKNOWN
    return json_response(build_info(served, known, gateway.settings, request.state.caller))

"""What clients of TEI expect of a server with one model: `POST /`, `/info`, and tokens."""

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
from batchery_producer.gateway.answers import json_response, off_loop
from batchery_producer.gateway.bodies import JsonRoute, ModelName, TokenId
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.generation import KINDS as WRITERS
from batchery_producer.gateway.inference import check_growth, count_chars, read_items
from batchery_producer.gateway.models import (
    UNKNOWN,
    ModelInfo,
    ModelTokenizer,
    ServedModel,
    SimpleToken,
)
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.tei import (
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PipelineRequest,
    PredictRequest,
    RerankTextsRequest,
    SimilarityRequest,
    TeiRequest,
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
from batchery_producer.gateway.routes.tgi import GenerateRequest, generate_as_root
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import expected

router = APIRouter(tags=["tei"], route_class=JsonRoute)

# `POST /` and `/info`


#: What to do with a body for a model of each kind: its form, and the route that takes it.
HANDLERS: dict[str, tuple[type[BaseModel], Callable[..., Awaitable[Response]]]] = {
    "embedding": (EmbedRequest, embed),
    "multi_vector_embedding": (EmbedAllRequest, embed_all),
    "sparse_embedding": (EmbedSparseRequest, embed_sparse),
    "classification": (PredictRequest, predict),
    "rerank": (RerankTextsRequest, rerank),
    # Kinds that TEI does not have; the first of them is TGI's.
    "generation": (GenerateRequest, generate_as_root),
    "zero_shot": (ZeroShotRequest, zero_shot),
    "token_classification": (TokenRequest, find_entities),
}

#: Forms that the schema has for `POST /`.
ROOT_FORMS: tuple[type[BaseModel], ...] = (
    *(EmbedRequest, EmbedAllRequest, EmbedSparseRequest),
    *(PredictRequest, RerankTextsRequest, SimilarityRequest, GenerateRequest),
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
    served = get_gateway(request).models.find(name, None if name else HANDLERS)
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


#: What TEI tells of a server that TGI tells, too.
SHARED_INFO = (
    *("model_id", "model_sha", "model_dtype", "max_concurrent_requests", "max_client_batch_size"),
    *("version", "sha", "docker_label"),
)


def build_writer_info(known: ServerInfo) -> dict[str, Any]:
    """A model that writes, in TGI's words."""
    tokens = known["max_input_length"]
    found: dict[str, Any] = {name: dict(known)[name] for name in SHARED_INFO}
    found |= {"model_pipeline_tag": "text-generation", "router": "batchery", "max_best_of": 1}
    found |= {"max_stop_sequences": 16, "max_input_tokens": tokens, "max_total_tokens": tokens}
    return found


@router.get("/info", response_model=ServerInfo | dict[str, Any])
async def info(request: Request, model: ModelName = None) -> Response:
    """The first model, or the named one, and the limits of requests."""
    gateway = get_gateway(request)
    served = get_gateway(request).models.find(model, None)
    try:
        known: ModelInfo = await gateway.model_facts.of(served)
    except Problem:
        # Only a worker has its files.
        known = UNKNOWN
    found = build_info(served, known, gateway.settings, request.state.caller)
    return json_response(build_writer_info(found) if served.kind in WRITERS else found)


# Tokens, which need no worker


#: Work on more characters or tokens goes to a thread: it takes longer than to get there.
INLINE_CHARS = 2_000


class TokenizeRequest(TeiRequest):
    """Texts for `/tokenize`."""

    inputs: Annotated[
        str | list[str],
        expected("a text, or a list of texts"),
        Field(examples=["the cat", ["the cat", "a dog"]]),
    ]
    add_special_tokens: bool = True
    prompt_name: Annotated[
        str | None, Field(description="Name of a prompt to put in front of each text.")
    ] = None


class DecodeRequest(TeiRequest):
    """Token ids for `/decode`."""

    ids: Annotated[
        list[TokenId] | list[list[TokenId]],
        expected("a list of token ids, or a list of such"),
        Field(examples=[[101, 1996, 4937, 102]]),
    ]
    skip_special_tokens: bool = True


@router.post("/tokenize", response_model=list[list[SimpleToken]])
async def tokenize(request: Request, body: TokenizeRequest, model: ModelName = None) -> Response:
    """The tokens of each text, and where they stand."""
    served = get_gateway(request).models.find(body.model or model, None)
    texts = read_items(request, "inputs", body.inputs)
    chars = count_chars(texts)
    request.state.caller.check(len(texts), chars)
    _check_lengths(served, texts)
    tokenizer: ModelTokenizer = await get_gateway(request).tokenizers.of(served)
    prompt = tokenizer.prompt(body.prompt_name)
    chars += len(prompt) * len(texts)
    check_growth(chars)
    prompted = [prompt + text for text in texts]
    content = await off_loop(
        request.state.caller,
        lambda: tokenizer.tokens(prompted, special=body.add_special_tokens),
        is_long=chars > INLINE_CHARS,
    )
    return Response(content, media_type="application/json")


@router.post("/decode", response_model=list[str])
async def decode(request: Request, body: DecodeRequest, model: ModelName = None) -> Response:
    """The text of each list of token ids."""
    served = get_gateway(request).models.find(body.model or model, None)
    ids = read_items(request, "ids", body.ids)
    count = count_chars(ids)
    request.state.caller.check(len(ids), count)
    _check_lengths(served, ids)
    check_growth(count)
    tokenizer: ModelTokenizer = await get_gateway(request).tokenizers.of(served)
    content = await off_loop(
        request.state.caller,
        lambda: tokenizer.texts(ids, skip_special=body.skip_special_tokens),
        is_long=count > INLINE_CHARS,
    )
    return Response(content, media_type="application/json")


def _check_lengths(model: ServedModel, items: list[str] | list[list[int]]) -> None:
    """Holds texts to the model's limit, as its workers do.

    Raises:
        Problem: One is too long.
    """
    limit = model.settings.max_chars
    for index, item in enumerate(items):
        if len(item) > limit:
            raise Problem(
                Kind.INVALID, f"item {index}: its length {len(item)} is above max_chars = {limit}"
            )

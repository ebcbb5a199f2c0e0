"""OpenAI's routes: embeddings, which are TEI's as well, models, files and batches."""

from itertools import chain
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import json_list, off_loop
from batchery_producer.gateway.batches.files import (
    FILE_ID,
    FileObject,
    get_owner,
)
from batchery_producer.gateway.batches.store import BATCH_ID, BatchObject, Metadata, ObjectPage
from batchery_producer.gateway.bodies import JsonRoute, MediaInputs, open_form
from batchery_producer.gateway.inference import (
    PROMPTS,
    build_keywords,
    check_ids,
    embed_items,
    read_items,
)
from batchery_producer.gateway.media import MEDIA, find_media, make_item
from batchery_producer.gateway.models import Numbers, ServedModel, numbers
from batchery_producer.gateway.problems import validate
from batchery_producer.gateway.routes.tei import INLINE_NUMBERS
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody, Unserved

router = APIRouter(tags=["openai"], route_class=JsonRoute)

#: For routes without JSON, whose bodies and answers may take long.
plain_router = APIRouter(tags=["openai"])


def also_named(name: str, other: str) -> FieldInfo:
    """What a field is called by OpenAI, or here, and by another vendor."""
    found: FieldInfo = Field(validation_alias=AliasChoices(name, other))
    return found


EMBEDDINGS_URL = "/v1/embeddings"


class EmbeddingsRequest(RequestBody):
    """What clients of OpenAI, Jina, infinity, Voyage, Mistral and vLLM send.

    Fields that change vectors are honoured or refused, others are ignored.
    """

    input: MediaInputs
    modality: Annotated[
        Literal["text", "image", "audio"],
        Field(description="What strings of `input` are: texts, or URLs and data URLs."),
    ] = "text"
    model: Annotated[str | None, Field(description="The first embedding model if missing.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, also_named("encoding_format", "embedding_type")
    ] = None
    dimensions: Annotated[int | None, Field(ge=1), also_named("dimensions", "output_dimension")] = (
        None
    )
    output_dtype: Literal["float"] | None = None
    input_type: Annotated[
        str | None,
        also_named("input_type", "task"),
        # It goes with each job of a request.
        Field(
            max_length=200,
            description="Puts the model's prompt for that in front, such as `query`.",
        ),
    ] = None
    truncate: Annotated[
        bool | None,
        also_named("truncate", "truncation"),
        Field(description="Cut texts that are too long; the model's setting if missing."),
    ] = None
    normalize: Annotated[
        bool | None,
        also_named("normalize", "normalized"),
        Field(description="Scale vectors to length 1; the model's setting if missing."),
    ] = None
    late_chunking: Unserved = None
    return_multivector: Unserved = None
    truncate_prompt_tokens: Unserved = None


class EmbeddingObject(TypedDict):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: Numbers | str


class Usage(TypedDict):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(TypedDict):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


@router.post(EMBEDDINGS_URL, response_model=EmbeddingsResponse)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """One vector for each input."""
    given = read_items(request, "input", body.input)
    media = find_media(given, body.modality)
    kinds = [f"{each}_embedding" for each in media] or ["embedding"]
    # Models of pictures may have texts in their space, too.
    more = [] if media or body.model is None else [f"{each}_embedding" for each in MEDIA]
    model = get_gateway(request).models.find(body.model, kinds + more)
    check_ids(model, body.model, "input", body.input)
    items = [make_item(model, each, body.modality) for each in given]
    as_text = body.encoding_format == "base64"
    keywords = build_keywords(model, body.truncate, normalize=body.normalize)
    if body.input_type is not None:
        keywords["prompt"] = PROMPTS.get(body.input_type, body.input_type)
    results = await embed_items(request, model, items, keywords, body.dimensions)
    vectors = [result["vector"] for result in results]
    data = (
        {"object": "embedding", "index": index, "embedding": each if as_text else numbers(each)}
        for index, each in enumerate(vectors)
    )
    tokens = sum(result["tokens"] for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = orjson.dumps({"model": model.name, "usage": usage})
    # A number of 4 bytes is 16/3 characters of base64.
    is_long = not as_text and sum(map(len, vectors)) * 3 // 16 > INLINE_NUMBERS
    content = await off_loop(
        request.state.caller,
        lambda: b'{"object":"list","data":%b,%b' % (json_list(data), rest[1:]),
        is_long=is_long,
    )
    return Response(content, media_type="application/json")


# Models


OWNER = "batchery"


@plain_router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All names of all models, their aliases too, in the order of the settings."""
    models = get_gateway(request).models
    names = [(name, each) for each in models for name in (each.name, *each.settings.aliases)]
    return {"object": "list", "data": [_describe_model(*pair) for pair in names]}


@plain_router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One model, by its name or an alias."""
    return _describe_model(name, get_gateway(request).models.find(name))


def _describe_model(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        # Nothing says when it was made.
        "created": 0,
        "owned_by": OWNER,
        "root": model.name,
        "kind": model.kind,
    }


# Files


FILES_URL = "/v1/files"


class FileDeleted(BaseModel):
    """A file that was removed."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Upload(BaseModel):
    """A file of requests, as a form has it."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    file: Annotated[UploadFile, WithJsonSchema({"type": "string", "format": "binary"})]
    purpose: Literal["batch"]


UPLOAD_SCHEMA = {"multipart/form-data": {"schema": Upload.model_json_schema()}}


@plain_router.post(
    FILES_URL,
    openapi_extra={"requestBody": {"required": True, "content": UPLOAD_SCHEMA}},
)
async def upload_file(request: Request) -> FileObject:
    """Keeps a file of requests, for a batch."""
    gateway = get_gateway(request)
    async with open_form(request) as form:
        upload = validate(Upload, dict(form))
        name, size = upload.file.filename or "", upload.file.size or 0
        return await run_in_threadpool(
            gateway.files.upload, request.state.caller, name, upload.file.file, size
        )


@plain_router.get(FILES_URL)
def list_files(
    request: Request,
    after: Annotated[str | None, Query(pattern=f"^{FILE_ID}$")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> ObjectPage[FileObject]:
    """The caller's files, the newest first."""
    found, has_more = get_gateway(request).files.page(
        get_owner(request.state.caller),
        after,
        limit,
        newest_first=order == "desc",
        purpose=purpose,
    )
    return ObjectPage[FileObject].of(found, has_more=has_more)


@plain_router.get("/v1/files/{file_id}")
def get_file(request: Request, file_id: str) -> FileObject:
    """A file, without its content."""
    return get_gateway(request).files.get(get_owner(request.state.caller), file_id)


@plain_router.get("/v1/files/{file_id}/content", response_class=Response)
def get_content(request: Request, file_id: str) -> Response:
    """The content of a file."""
    files, owner = get_gateway(request).files, get_owner(request.state.caller)
    found = files.get(owner, file_id)
    content = files.read(owner, found)
    first = next(content, b"")  # What is wrong with it has a status of its own.
    # A browser must not take what a caller sent for a page of ours.
    headers = {"Content-Length": str(found.bytes), "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(
        chain([first], content), media_type="application/octet-stream", headers=headers
    )


@plain_router.delete("/v1/files/{file_id}")
def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Removes a file."""
    files, owner = get_gateway(request).files, get_owner(request.state.caller)
    files.get(owner, file_id)
    files.remove(owner, file_id)
    return FileDeleted(id=file_id)


# Batches


class CreateBatchRequest(RequestBody):
    """What OpenAI's clients send; other fields are ignored, as there."""

    input_file_id: str
    endpoint: Literal["/v1/embeddings", "/v1/chat/completions", "/v1/completions"]
    completion_window: Annotated[
        str,
        Field(pattern=r"^[1-9][0-9]{0,2}h$", description="Its time: 24h, or up to 999h."),
    ]
    metadata: Metadata | None = None
    output_expires_after: Unserved = None


@router.post("/v1/batches")
def create_batch(request: Request, body: CreateBatchRequest) -> BatchObject:
    """Begins a batch: its file is read, then its requests run."""
    gateway = get_gateway(request)
    return gateway.batches.create(
        request.state.caller,
        body.input_file_id,
        int(body.completion_window[:-1]) * 3600,
        # A batch has time.
        max(each.level for each in gateway.settings.classes.values()),
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )


@router.get("/v1/batches")
def list_batches(
    request: Request,
    after: Annotated[str | None, Query(pattern=f"^{BATCH_ID}$")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ObjectPage[BatchObject]:
    """The caller's batches, the newest first."""
    owner = get_owner(request.state.caller)
    found, has_more = get_gateway(request).batches.page(owner, after, limit)
    return ObjectPage[BatchObject].of(found, has_more=has_more)


@router.get("/v1/batches/{batch_id}")
def get_batch(request: Request, batch_id: str) -> BatchObject:
    """A batch, as it is now."""
    return get_gateway(request).batches.get(get_owner(request.state.caller), batch_id)


@router.post("/v1/batches/{batch_id}/cancel", responses={409: {"description": "It is too late."}})
def cancel_batch(request: Request, batch_id: str) -> BatchObject:
    """Ends a batch; what is done by then is kept."""
    return get_gateway(request).batches.cancel(get_owner(request.state.caller), batch_id)

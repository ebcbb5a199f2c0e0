"""OpenAI's `/v1/files`: what batches read, and what they have written."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.responses import Response, StreamingResponse

from batchery_producer.gateway.batches.files import (
    CHUNK_BYTES,
    FILE_ID,
    INPUT_PURPOSE,
    ExpiresAfter,
    FileObject,
    get_owner,
)
from batchery_producer.gateway.batches.store import ObjectPage
from batchery_producer.gateway.problems import Kind, Problem

router = APIRouter(tags=["openai"])

#: Fields of an upload, more than it needs.
MAX_FIELDS = 10

UPLOAD_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [INPUT_PURPOSE]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


class FileDeleted(BaseModel):
    """A file that was removed."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class UploadFields(BaseModel):
    """What an upload has beside its file."""

    model_config = ConfigDict(extra="ignore")

    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


@router.post("/v1/files", openapi_extra=UPLOAD_SCHEMA)
async def upload_file(request: Request) -> FileObject:
    """Keeps a file of requests, for a batch."""
    gateway = request.app.state.gateway
    check_origin(request, gateway.settings.gateway.cors_origins)
    # Not by FastAPI, which would hide why the guard refuses the rest of a body.
    async with request.form(max_files=1, max_fields=MAX_FIELDS) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise Problem(
                Kind.INVALID, "file: missing; send multipart/form-data with a file", param="file"
            )
        fields = _fields(form)
        expires_s = fields.expires_after.seconds if fields.expires_after else None
        made: FileObject = await gateway.files.upload(
            request.state.caller, file.filename or "", _chunks(file), file.size or 0, expires_s
        )
    return made


@router.get("/v1/files")
async def list_files(
    request: Request,
    after: Annotated[str | None, Query(pattern=f"^{FILE_ID}$")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> ObjectPage[FileObject]:
    """The caller's files, the newest first."""
    page = partial(
        request.app.state.gateway.files.page,
        get_owner(request.state.caller),
        after,
        limit,
        newest_first=order == "desc",
        purpose=purpose,
    )
    found, has_more = await run_in_threadpool(page)
    return ObjectPage[FileObject].of(found, has_more=has_more)


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> FileObject:
    """A file, without its content."""
    files = request.app.state.gateway.files
    owner = get_owner(request.state.caller)
    found: FileObject = await run_in_threadpool(files.get, owner, file_id)
    return found


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def get_content(request: Request, file_id: str) -> Response:
    """The content of a file."""
    files, owner = request.app.state.gateway.files, get_owner(request.state.caller)
    found = await run_in_threadpool(files.get, owner, file_id)
    file = await run_in_threadpool(files.open, owner, file_id)
    # A browser must not take what a caller sent for a page of ours.
    headers = {"Content-Length": str(found.bytes), "X-Content-Type-Options": "nosniff"}
    return StreamingResponse(_parts(file), media_type="application/octet-stream", headers=headers)


@router.delete(
    "/v1/files/{file_id}",
    responses={409: {"description": "A batch still reads it."}},
)
async def delete_file(request: Request, file_id: str) -> FileDeleted:
    """Removes a file."""
    batches = request.app.state.gateway.batches
    await run_in_threadpool(batches.delete_file, get_owner(request.state.caller), file_id)
    return FileDeleted(id=file_id)


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Keeps web pages out that send a form: a browser does not ask us first, as for JSON.

    Raises:
        Problem: It comes from a page of another origin, which is not allowed to call.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise Problem(
            Kind.FORBIDDEN,
            f"pages of {origin!r:.100} may not send files; see the setting gateway.cors_origins",
        )


def _fields(form: Mapping[str, Any]) -> UploadFields:
    given = {
        name: form[f"expires_after[{name}]"]
        for name in ("anchor", "seconds")
        if f"expires_after[{name}]" in form
    }
    try:
        return UploadFields.model_validate(
            {"purpose": form.get("purpose"), "expires_after": given or None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Problem(Kind.INVALID, f"{where}: {first['msg']}", param=where) from None


async def _chunks(file: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk


def _parts(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while part := file.read(CHUNK_BYTES):
            yield part

"""Pictures and sound in requests: what a caller may name, and uploads on their way to a worker.

Callers send what they have, or URLs, of which workers fetch those that their settings allow. They
name neither files of a worker nor what others have put into Redis.
"""

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request

from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.running import get_gateway
from batchery_producer.media import put_media, remove_media

#: Fields of an item that is no text.
MEDIA = ("image", "audio")

#: Maximum bytes of an upload that travels with its message; others go by reference.
INLINE_BYTES = 65_536


def find_media(given: Sequence[Any], modality: str) -> list[str]:
    """Which media inputs of embeddings have, but for texts.

    Args:
        given: Texts, token ids, or objects with one field.
        modality: What strings are.
    """
    fields = {next(iter(each)) if isinstance(each, Mapping) else modality for each in given}
    return [each for each in MEDIA if each in fields]


def make_item(model: ServedModel, given: Any, modality: str) -> Any:
    """The item of an input of embeddings; token ids, which models of media refuse, as they are."""
    if isinstance(given, list):
        return given
    ((field, value),) = given.items() if isinstance(given, Mapping) else [(modality, given)]
    if field == "text":
        return value if model.kind == "embedding" else {"text": value}
    return {field: read_medium(value)}


def read_medium(given: Any) -> Any:
    """The item of a picture or a sound: a URL and a data URL as they are, all else as base64."""
    if isinstance(given, Mapping):
        return {
            field: read_medium(each) if field in MEDIA else each for field, each in given.items()
        }
    is_place = isinstance(given, str) and (given[:5].lower() == "data:" or "://" in given[:32])
    return given if is_place or not isinstance(given, str) else {"base64": given}


class Loan:
    """An upload that is in Redis for as long as its request has no answer."""

    def __init__(self, request: Request) -> None:
        self._gateway, self._caller = get_gateway(request), request.state.caller
        self._reference = ""

    async def lend(self, upload: UploadFile, expires_s: float) -> Any:
        """The item of an upload.

        Args:
            upload: Its file is read on a thread, one of each caller at a time.
            expires_s: When Redis forgets it at the latest, in seconds from now.

        Raises:
            Problem: It is larger than `media.max_bytes`.
            BatcheryError: As `put_media`.
        """
        size, maximum = upload.size or 0, self._gateway.settings.media.max_bytes
        if size > maximum:
            text = f"file: has {size} bytes, more than media.max_bytes = {maximum}"
            raise Problem(Kind.TOO_LARGE, text, param="file")
        if size <= INLINE_BYTES:
            return {"base64": base64.b64encode(await upload.read()).decode()}

        def put() -> str:
            return put_media(self._gateway.app, upload.file.read(), expires_s=expires_s)

        async with self._caller.long_work:
            self._reference = await asyncio.to_thread(put)
        return self._reference

    def end(self) -> None:
        """Removes it from Redis soon, by a thread; if Redis is away, it expires."""
        if self._reference:
            loop, app = asyncio.get_running_loop(), self._gateway.app
            loop.run_in_executor(None, remove_media, app, self._reference)

"""Brings the bytes of items here, within limits of size and time.

Whoever sends an item may be hostile, and so may be the server that it names: a path must lead to a
file below a root, a URL to an address that was checked, whatever redirects and links say.
"""

import asyncio
import errno
import os
import ssl
import stat
from contextlib import closing
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import redis

from batchery.addresses import NotPublic, send_checked
from batchery.errors import InvalidItem
from batchery.media_settings import MediaSettings
from batchery.transport.payloads import Payloads
from batchery_worker.media.items import (
    Content,
    FilePath,
    Payload,
    StoreUrl,
    Text,
    WebUrl,
    check_size,
    check_url,
    too_large,
)

#: Maximum number of redirects that are followed.
MAX_REDIRECTS = 5

#: How much of a store's file is read at a time, in bytes.
CHUNK_BYTES = 1 << 20


def fetch(
    content: Content, medium: str, settings: MediaSettings, payloads: Payloads | None
) -> bytes | str:
    """The bytes of an item, or its text.

    Args:
        content: What the item says.
        medium: Name of its field, for errors.
        settings: Where it may come from, how large it may be, and how long it may take.
        payloads: Where clients have put bytes; None where there is no Redis.

    Raises:
        InvalidItem: It cannot be had; one line says why.
    """
    if isinstance(content, bytes):
        return content
    if isinstance(content, Text):
        return content.text
    if isinstance(content, FilePath):
        data = read_file(content.path, medium, settings)
    elif isinstance(content, Payload):
        data = _read_payload(content.id, medium, settings, payloads)
    elif isinstance(content, StoreUrl):
        data = _read_store(content.url, medium, settings)
    else:
        data = _download(content, medium, settings)
    return check_size(data, medium, settings.max_bytes)


def read_file(path: str, medium: str, settings: MediaSettings) -> bytes:
    """Reads a file below one of the roots; links must not lead out of them.

    Args:
        path: Absolute, or relative to a root.
        medium: As of `fetch`.
        settings: As of `fetch`.

    Raises:
        InvalidItem: It is no such file, or too large.
    """
    if not settings.roots:
        raise InvalidItem(f"{medium}: paths are not allowed; see the setting media.roots")
    for root in settings.roots:
        try:
            folder = Path(root).expanduser().resolve(strict=True)
            found = (folder / path).resolve(strict=True)
        except (OSError, RuntimeError):
            continue
        if not found.is_relative_to(folder):
            continue
        try:
            # Looked at once it is open: it could have become a link, or a pipe that nobody writes.
            with open(found, "rb", opener=_open) as file:
                return file.read(settings.max_bytes + 1)
        except OSError as error:
            raise InvalidItem(f"{medium}: {path!r:.200}: {error.strerror}") from None
    raise InvalidItem(f"{medium}: {path!r:.200}: there is no such file below media.roots")


def _open(path: str, flags: int) -> int:
    """Opens a file, and nothing else."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no file")
    return descriptor


def _read_payload(
    payload_id: str, medium: str, settings: MediaSettings, payloads: Payloads | None
) -> bytes:
    if payloads is None:
        raise InvalidItem(f"{medium}: batchery:{payload_id} needs a Redis, and this app has none")
    try:
        data = payloads.read(payload_id, settings.max_bytes)
    except redis.RedisError as error:
        raise InvalidItem(f"{medium}: batchery:{payload_id}: {error}") from None
    if data is None:
        raise InvalidItem(
            f"{medium}: batchery:{payload_id} is not in Redis; it has expired, or never was there"
        )
    return data


def _read_store(url: str, medium: str, settings: MediaSettings) -> bytes:
    """Reads a file of a store; its library has limits of its own for a server that is silent."""
    import fsspec

    until_s, parts, left = monotonic() + settings.timeout_s, list[bytes](), settings.max_bytes + 1
    try:
        with closing(fsspec.open(url, "rb").open()) as file:
            while left > 0 and (part := file.read(min(left, CHUNK_BYTES))):
                parts.append(part)
                left -= len(part)
                if monotonic() > until_s:
                    raise TimeoutError
    except TimeoutError:
        raise _too_slow(url, medium, settings) from None
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
        raise InvalidItem(f"{medium}: {_name(url)}: {describe(error)}") from None
    return b"".join(parts)


def _download(content: WebUrl, medium: str, settings: MediaSettings) -> bytes:
    import httpx2

    try:
        return asyncio.run(_get(content.url, medium, settings))
    except TimeoutError:
        raise _too_slow(content.url, medium, settings) from None
    except NotPublic as error:
        text = f"{error}; see the setting media.hosts"
        raise InvalidItem(f"{medium}: {_name(content.url)}: {text}") from None
    except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise InvalidItem(f"{medium}: {_name(content.url)}: {describe(error)}") from None


async def _get(url: str, medium: str, settings: MediaSettings) -> bytes:
    """Downloads a file; each redirect is checked as the URL of an item is."""
    import httpx2

    # No proxy of the environment: it would connect to whatever address it finds.
    client = httpx2.AsyncClient(verify=_trust(), trust_env=False)
    async with asyncio.timeout(settings.timeout_s), client:
        for _ in range(MAX_REDIRECTS + 1):
            target = httpx2.URL(url).copy_with(fragment=None)
            sending = send_checked(
                *(client, "GET", target, settings.hosts),
                # What is compressed may grow to anything.
                headers={"User-Agent": "batchery", "Accept-Encoding": "identity"},
                timeout_s=settings.timeout_s,
            )
            async with sending as answer:
                if answer.is_redirect:
                    url = str(target.join(answer.headers["Location"]))
                    check_url(url, medium, settings.hosts)
                    continue
                if answer.status_code != 200:
                    raise InvalidItem(f"{medium}: {_name(url)}: answered {answer.status_code}")
                return await _read_body(answer, medium, settings.max_bytes)
    raise InvalidItem(f"{medium}: {_name(url)}: has more than {MAX_REDIRECTS} redirects")


async def _read_body(answer: Any, medium: str, max_bytes: int) -> bytes:
    body = bytearray()
    if int(answer.headers.get("Content-Length") or 0) > max_bytes:
        raise too_large(medium, max_bytes)
    # Not decoded: a server may compress although nobody has asked for that.
    async for part in answer.aiter_raw():
        body += part
        if len(body) > max_bytes:
            raise too_large(medium, max_bytes)
    return bytes(body)


@cache
def _trust() -> ssl.SSLContext:
    """Which certificates are trusted; to read them takes longer than a small download."""
    return ssl.create_default_context()


def _too_slow(url: str, medium: str, settings: MediaSettings) -> InvalidItem:
    limit_s = settings.timeout_s
    return InvalidItem(f"{medium}: {_name(url)}: took more than media.timeout_s = {limit_s:g}")


def _name(url: str) -> str:
    """A URL for errors, which stand in logs: without a query, which may be as good as a key."""
    return repr(url.partition("?")[0][:200])


def describe(error: Exception) -> str:
    """An error on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__

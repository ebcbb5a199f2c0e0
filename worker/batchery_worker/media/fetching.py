"""Brings the bytes of items here, within limits of size and time.

Whoever sends an item may be hostile, and so may be the server that it names: a path must lead to a
file below a root, a URL to an address that was checked, whatever redirects and links say.
"""

import asyncio
import errno
import os
import ssl
import stat
from functools import cache
from pathlib import Path
from time import monotonic

from batchery.addresses import NotPublic, send_checked
from batchery.errors import InvalidItem
from batchery.media_settings import MediaSettings
from batchery.transport.payloads import PREFIX, Payloads
from batchery_worker.media.items import Content, Text, check_size, check_url, show_url, too_large

#: Maximum number of redirects that are followed.
MAX_REDIRECTS = 5

#: How much of a store's file is read at a time, in bytes.
CHUNK_BYTES = 1 << 20


def fetch(content: Content, settings: MediaSettings, payloads: Payloads | None) -> bytes | str:
    """The bytes of an item, or its text.

    Args:
        content: What the item says.
        settings: Where it may come from, how large it may be, and how long it may take.
        payloads: Where clients have put bytes; None where there is no Redis.

    Raises:
        InvalidItem: It cannot be had; one line says why.
    """
    if isinstance(content, bytes):
        return content
    if isinstance(content, Text):
        return content.text
    kind, name = content
    try:
        if kind == "file":
            data = _read_file(name, settings)
        elif kind == "payload":
            data = _read_payload(name, settings, payloads)
        elif kind == "store":
            data = _read_store(name, settings)
        else:
            data = asyncio.run(_download(name, settings))
    except InvalidItem:
        raise
    except TimeoutError:
        raise InvalidItem(f"took more than media.timeout_s = {settings.timeout_s:g}") from None
    except NotPublic as error:
        raise InvalidItem(f"{error}; see the setting media.hosts") from None
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
        raise InvalidItem(f"{show_url(name)}: {describe(error)}") from None
    return check_size(data, settings.max_bytes)


def _read_file(path: str, settings: MediaSettings) -> bytes:
    """Reads a file below one of the roots; links must not lead out of them.

    Args:
        path: Absolute, or relative to a root.
        settings: As of `fetch`.
    """
    if not settings.roots:
        raise InvalidItem("paths are not allowed; see the setting media.roots")
    for root in settings.roots:
        try:
            folder = Path(root).expanduser().resolve(strict=True)
            found = (folder / path).resolve(strict=True)
        except (OSError, RuntimeError):
            continue
        if found.is_relative_to(folder):
            with open(found, "rb", opener=_open_file) as file:
                return file.read(settings.max_bytes + 1)
    raise InvalidItem(f"{path!r:.200}: there is no such file below media.roots")


def _open_file(path: str, flags: int) -> int:
    """Opens a file, which could have become a link by now, or a pipe that nobody writes."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no file")
    return descriptor


def _read_payload(payload_id: str, settings: MediaSettings, payloads: Payloads | None) -> bytes:
    if payloads is None:
        raise InvalidItem(f"{PREFIX}{payload_id} needs a Redis, and this app has none")
    data = payloads.read(payload_id, settings.max_bytes)
    if data is None:
        raise InvalidItem(f"{PREFIX}{payload_id} is not in Redis; it may have expired")
    return data


def _read_store(url: str, settings: MediaSettings) -> bytes:
    """Reads a file of a store; its library has limits of its own for a server that is silent."""
    import fsspec

    until_s, data = monotonic() + settings.timeout_s, bytearray()
    with fsspec.open(url, "rb") as file:
        while len(data) <= settings.max_bytes and (part := file.read(CHUNK_BYTES)):
            data += part
            if monotonic() > until_s:
                raise TimeoutError
    return bytes(data)


async def _download(url: str, settings: MediaSettings) -> bytes:
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
                    check_url(url, settings.hosts)
                    continue
                if answer.status_code != 200:
                    raise InvalidItem(f"{show_url(url)}: answered {answer.status_code}")
                if int(answer.headers.get("Content-Length") or 0) > settings.max_bytes:
                    raise too_large(settings.max_bytes)
                body = bytearray()
                # Not decoded: a server may compress although nobody has asked for that.
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > settings.max_bytes:
                        break
                return bytes(body)
    raise InvalidItem(f"{show_url(url)}: has more than {MAX_REDIRECTS} redirects")


@cache
def _trust() -> ssl.SSLContext:
    """Which certificates are trusted; to read them takes longer than a small download."""
    return ssl.create_default_context()


def describe(error: Exception) -> str:
    """An error on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
    return text or type(error).__name__

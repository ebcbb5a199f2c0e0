"""What an item of a picture or sound model is, and where it may come from. Nothing is read here.

An item is one of:

- bytes, or `{"base64": "..."}` for clients whose JSON has no bytes;
- a text: a data URL with base64; a URL, `https://...`, `http://...` or one that fsspec reads, such
  as `s3://bucket/key`; `batchery:ID`, bytes that a client has put into Redis; else the path of a
  file;
- a dictionary with one field that says what it is: `{"image": X}` or `{"audio": X}`, with X as
  above, or `{"text": "..."}` for models that know texts, too.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from batchery.addresses import is_named
from batchery.errors import InvalidItem
from batchery.media_settings import MediaSettings
from batchery.transport.payloads import PREFIX, is_payload_id

#: Maximum length of a path or a URL, in characters.
MAX_PLACE_CHARS = 8_192

#: Schemes of URLs that lead to files of this machine, or to other URLs; paths have `roots`.
LOCAL_SCHEMES = ("file", "local", "memory")

#: Fields of an item that say what it is.
MEDIA = ("image", "audio")


class Text(NamedTuple):
    """A text, for models that have texts and pictures, or sound, in one space."""

    text: str


class FilePath(NamedTuple):
    """A file of this machine."""

    path: str


class Payload(NamedTuple):
    """Bytes that a client has put into Redis, by their id."""

    id: str


class WebUrl(NamedTuple):
    """A URL of `http` or `https`, whose host is allowed."""

    url: str


class StoreUrl(NamedTuple):
    """A URL of a store that fsspec reads, which is allowed."""

    url: str


#: What an item says: bytes, a text, or where its bytes are.
Content = bytes | Text | FilePath | Payload | WebUrl | StoreUrl


def parse_item(item: Any, fields: Sequence[str], settings: MediaSettings) -> Content:
    """Finds out what an item is.

    Args:
        item: Anything.
        fields: What the model takes, its own medium first: `image` or `audio`, and perhaps `text`.
        settings: Hosts that are allowed, and the maximum size.

    Raises:
        InvalidItem: It is none of what the model takes, too large, or of a host that is not
            allowed.
    """
    medium = fields[0]
    if isinstance(item, dict) and "base64" not in item:
        if len(item) != 1 or (field := next(iter(item))) not in fields:
            given = ", ".join(map(repr, item)) or "nothing"
            raise InvalidItem(f"item: must have one of {', '.join(fields)}, not {given:.80}")
        if field == "text":
            if not isinstance(item[field], str) or not item[field]:
                raise InvalidItem("text: must be a string, and not empty")
            return Text(item[field])
        item = item[field]
    if isinstance(item, dict):
        if item.keys() != {"base64"} or not isinstance(item["base64"], str):
            raise InvalidItem(f'{medium}: must be {{"base64": "..."}} with no other field')
        return _decode(item["base64"], medium, settings.max_bytes)
    if isinstance(item, bytes):
        return check_size(item, medium, settings.max_bytes)
    if not isinstance(item, str):
        raise InvalidItem(
            f"{medium}: must be bytes, base64, a URL or a path, not {type(item).__name__}"
        )
    return _parse_text(item, medium, settings)


def _parse_text(text: str, medium: str, settings: MediaSettings) -> Content:
    if text[:5].lower() == "data:":
        head, _, body = text.partition(",")
        if not head.endswith(";base64"):
            raise InvalidItem(f"{medium}: a data URL must have base64, as data:TYPE;base64,...")
        return _decode(body, medium, settings.max_bytes)
    if not text or len(text) > MAX_PLACE_CHARS or not text.isprintable():
        raise InvalidItem(
            f"{medium}: a path or URL has 1 to {MAX_PLACE_CHARS} characters that can be printed"
        )
    if text.startswith(PREFIX):
        if not is_payload_id(payload := text.removeprefix(PREFIX)):
            raise InvalidItem(f"{medium}: {text!r:.100} is no reference to bytes in Redis")
        return Payload(payload)
    return check_url(text, medium, settings.hosts) if "://" in text else FilePath(text)


def check_url(url: str, medium: str, hosts: Sequence[str]) -> WebUrl | StoreUrl:
    """Checks that a URL may be fetched; a redirect leads to another one, which is checked, too.

    Args:
        url: It has a scheme and `://`.
        medium: Name of the field, for the error.
        hosts: The setting of that name.

    Raises:
        InvalidItem: It is no URL of these hosts.
    """
    try:
        parts = urlsplit(url)
        # Of the URL itself: the port is read when it is asked for.
        host, user, _ = parts.hostname or "", parts.username, parts.port
    except ValueError as error:
        raise InvalidItem(f"{medium}: {url.partition('?')[0]!r:.100} is no URL: {error}") from None
    if not url.isascii() or " " in url or "\\" in url:
        raise InvalidItem(f"{medium}: {url!r:.100} has characters that must be written as %XX")
    if parts.scheme in LOCAL_SCHEMES or "::" in url.partition("?")[0].partition("//")[0]:
        raise InvalidItem(
            f"{medium}: {url!r:.100} is no URL of a host; give the path of a file below media.roots"
        )
    if parts.scheme in ("http", "https"):
        if user is not None:
            raise InvalidItem(f"{medium}: the URL must not have a user or a password")
        if not host or not is_named(host, hosts):
            raise InvalidItem(
                f"{medium}: host {host!r:.100} is not allowed; see the setting media.hosts"
            )
        return WebUrl(url)
    store = f"{parts.scheme}://{parts.netloc}"
    if store not in hosts or "::" in url:
        raise InvalidItem(f"{medium}: {store!r:.100} is not allowed; see the setting media.hosts")
    return StoreUrl(url)


def _decode(text: str, medium: str, max_bytes: int) -> bytes:
    """The bytes of base64, of which no more are made than are allowed."""
    if len(text) // 4 * 3 > max_bytes + 2:
        raise too_large(medium, max_bytes)
    try:
        return check_size(a2b_base64(text, strict_mode=True), medium, max_bytes)
    except (Base64Error, ValueError) as error:
        if isinstance(error, InvalidItem):
            raise
        raise InvalidItem(f"{medium}: is not base64: {error}") from None


def check_size(data: bytes, medium: str, max_bytes: int) -> bytes:
    """Returns bytes that are not too many, and not none.

    Raises:
        InvalidItem: They are.
    """
    if not data:
        raise InvalidItem(f"{medium}: is empty")
    if len(data) > max_bytes:
        raise too_large(medium, max_bytes)
    return data


def too_large(medium: str, max_bytes: int) -> InvalidItem:
    """The error of an item that has too many bytes."""
    return InvalidItem(f"{medium}: has more than media.max_bytes = {max_bytes}")

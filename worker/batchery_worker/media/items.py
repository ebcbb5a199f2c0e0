"""What an item of a picture or sound model is, and where it may come from. Nothing is read here.

An item is one of:

- bytes, or `{"base64": "..."}` for clients whose JSON has no bytes;
- a text: a data URL with base64; a URL, `https://...`, `http://...` or one that fsspec reads, such
  as `s3://bucket/key`; `batchery:ID`, bytes that a client has put into Redis; else the path of a
  file;
- a dictionary with one field that says what it is: `{"image": X}` or `{"audio": X}`, with X as
  above, or `{"text": "..."}` for models that know texts, too.

Errors do not name the item's field: whoever knows it puts it in front.
"""

from binascii import a2b_base64
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from batchery.addresses import is_named
from batchery.errors import InvalidItem
from batchery.media_settings import MediaSettings
from batchery.transport.payloads import PREFIX, is_payload_id

#: Maximum length of a path or a URL, in characters.
MAX_PLACE_CHARS = 8_192

#: Schemes of URLs that lead to files of this machine; paths have `roots`.
LOCAL_SCHEMES = ("file", "local", "memory")


class Text(NamedTuple):
    """A text, for models that have texts and pictures, or sound, in one space."""

    text: str


class Place(NamedTuple):
    """Where the bytes of an item are."""

    #: A file of this machine; what a client has put into Redis, by its id; or a URL, of http and
    #: https, or of a store that fsspec reads. URLs are allowed ones.
    kind: Literal["file", "payload", "web", "store"]
    name: str


#: What an item says: bytes, a text, or where its bytes are.
Content = bytes | Text | Place


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
    if isinstance(item, dict) and item.keys() != {"base64"}:
        if len(item) != 1 or (field := next(iter(item))) not in fields:
            given = ", ".join(map(repr, item)) or "nothing"
            raise InvalidItem(f"must have one of the fields {', '.join(fields)}, not {given:.80}")
        item = item[field]
        if field == "text" and isinstance(item, str) and item:
            return Text(item)
    if isinstance(item, dict) and item.keys() == {"base64"}:
        return _decode(item["base64"], settings.max_bytes)
    if isinstance(item, bytes):
        return check_size(item, settings.max_bytes)
    if not isinstance(item, str) or not item:
        kind = type(item).__name__
        raise InvalidItem(f"must be bytes, base64, a URL or a path, not an empty text, or {kind}")
    return _parse_text(item, settings)


def _parse_text(item: str, settings: MediaSettings) -> Content:
    if item[:5].lower() == "data:":
        head, _, body = item.partition(",")
        if not head.endswith(";base64"):
            raise InvalidItem("a data URL must have base64, as data:TYPE;base64,...")
        return _decode(body, settings.max_bytes)
    if len(item) > MAX_PLACE_CHARS or not item.isprintable():
        raise InvalidItem(f"a path or URL has at most {MAX_PLACE_CHARS} characters, all printable")
    if not item.startswith(PREFIX):
        return check_url(item, settings.hosts) if "://" in item else Place("file", item)
    if not is_payload_id(payload := item.removeprefix(PREFIX)):
        raise InvalidItem(f"{item!r:.100} is no reference to bytes in Redis")
    return Place("payload", payload)


def check_url(url: str, hosts: Sequence[str]) -> Place:
    """Checks that a URL may be fetched; a redirect leads to another one, which is checked, too.

    Args:
        url: It has a scheme and `://`.
        hosts: The setting of that name.

    Raises:
        InvalidItem: It is no URL of these hosts.
    """
    try:
        parts = urlsplit(url)
        # To read the port is what finds one that is none.
        host, user, _ = parts.hostname or "", parts.username, parts.port
    except ValueError as error:
        raise InvalidItem(f"{show_url(url)} is no URL: {error}") from None
    if not url.isascii() or " " in url or "\\" in url:
        raise InvalidItem(f"{show_url(url)} has characters that must be written as %XX")
    if parts.scheme in LOCAL_SCHEMES:
        raise InvalidItem(f"{show_url(url)} is no URL of a host; give a path below media.roots")
    if user is not None:
        raise InvalidItem("the URL must not have a user or a password")
    if parts.scheme in ("http", "https"):
        if host and is_named(host, hosts):
            return Place("web", url)
        raise InvalidItem(f"host {host!r:.100} is not allowed; see the setting media.hosts")
    store = f"{parts.scheme}://{parts.netloc}"
    # Two colons would lead on to another file system.
    if store in hosts and "::" not in url:
        return Place("store", url)
    raise InvalidItem(f"{store!r:.100} is not allowed; see the setting media.hosts")


def show_url(url: str) -> str:
    """A URL for errors, which stand in logs: without a query, which may be as good as a key."""
    return repr(url.partition("?")[0][:200])


def _decode(text: Any, max_bytes: int) -> bytes:
    """The bytes of base64, of which no more are made than are allowed."""
    if isinstance(text, str) and len(text) // 4 * 3 > max_bytes + 2:
        raise too_large(max_bytes)
    try:
        data = a2b_base64(text, strict_mode=True)
    except (ValueError, TypeError) as error:
        raise InvalidItem(f"is not base64: {error}") from None
    return check_size(data, max_bytes)


def check_size(data: bytes, max_bytes: int) -> bytes:
    """Returns bytes that are not too many, and not none.

    Raises:
        InvalidItem: They are.
    """
    if not data:
        raise InvalidItem("is empty")
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data


def too_large(max_bytes: int) -> InvalidItem:
    """The error of an item that has too many bytes."""
    return InvalidItem(f"has more than media.max_bytes = {max_bytes}")

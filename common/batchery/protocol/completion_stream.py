"""Completion streams: a stream in the result backend tells a producer which of its jobs are done.

The message header `batchery: {"v": 1, "reply": "<name>"}` asks for it. Batchery's workers write to
it in the same step that stores the results. Other workers do not, so a producer must also look for
results itself.

With `keep_s` in the same header, the stored result expires after so many seconds, if not sooner by
the app's settings: nobody but this producer fetches it, and not later than that.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchery.protocol.multi_item import HEADER, VERSION

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Maximum of `keep_s`: Redis refuses numbers that are much larger.
MAX_KEEP_S = 2**31

#: Field of an entry of the stream: a JSON list of task ids.
FIELD = b"ids"


def read_stream_name(header: Any) -> str | None:
    """The name of the completion stream that a job asks for.

    Args:
        header: The value of the `batchery` header, or None.

    Returns:
        None if the job asks for none, or the name is malformed: it becomes part of a Redis key.
    """
    if not isinstance(header, Mapping) or header.get("v") != VERSION:
        return None
    name = header.get("reply")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def read_keep_s(header: Any) -> int | None:
    """How long the result of a job is to be kept, in seconds.

    Args:
        header: The value of the `batchery` header, or None.

    Returns:
        None if the job does not say it, or not well: then as long as the app keeps results.
    """
    keep_s = header.get("keep_s") if isinstance(header, Mapping) else None
    if not isinstance(keep_s, int) or isinstance(keep_s, bool) or not 0 < keep_s <= MAX_KEEP_S:
        return None
    return keep_s


def expires_s(app_s: float | None, keep_s: int | None) -> int:
    """In how many seconds a result expires, 0 for never.

    Args:
        app_s: As the app's settings say; 0 or None for never.
        keep_s: As the job says.
    """
    return min(int(app_s or MAX_KEEP_S), keep_s) if keep_s else int(app_s or 0)


@contextmanager
def expiring_as_asked(backend: Any, request: Any) -> Iterator[None]:
    """Has a Redis backend of this thread store as a job says, within the block.

    Args:
        backend: Celery's backend.
        request: Celery's request of the job, or None.
    """
    keep_s = read_keep_s(getattr(request, HEADER, None))
    if keep_s is None or not hasattr(backend, "failure_expires"):
        yield
        return
    own = backend.expires, backend.failure_expires
    backend.expires, backend.failure_expires = (expires_s(app_s, keep_s) for app_s in own)
    try:
        yield
    finally:
        backend.expires, backend.failure_expires = own


def stream_key(backend: Any, name: str) -> bytes:
    """The key of a completion stream in a Redis backend, with the prefix that results have."""
    return backend_prefix(backend) + b"batchery:reply:" + name.encode()


def backend_prefix(backend: Any) -> bytes:
    """The prefix of a Redis backend's keys, and so of our keys next to them; usually empty."""
    prefix: bytes = backend.get_key_for_task("-").removesuffix(b"celery-task-meta--")
    return prefix


def read_ids(entry: Mapping[bytes, bytes]) -> list[str]:
    """The task ids in an entry of the stream."""
    ids: list[str] = json.loads(entry[FIELD])
    return ids

"""Completion streams: a stream in the result backend tells a producer which of its jobs are done.

The message header `batchery: {"v": 1, "reply": "<name>"}` asks for it. Batchery's workers write to
it in the same step that stores the results. Other workers do not, so a producer must also look for
results itself.

With `keep_s` in the same header, the stored result expires after so many seconds, if not sooner by
the app's settings: nobody but this producer fetches it, and not later than that.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from batchery.protocol.headers import HEADER, MAX_KEEP_S, read_keep_s

#: Field of an entry of the stream: a JSON list of task ids.
FIELD = b"ids"


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

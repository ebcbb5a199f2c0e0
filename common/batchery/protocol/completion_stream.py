"""Completion streams: a stream in the result backend tells a producer which of its jobs are done.

The message header `batchery: {"v": 1, "reply": "<name>"}` asks for it. Batchery's workers write to
it in the same step that stores the results. Other workers do not, so a producer must also look for
results itself.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from batchery.protocol.multi_item import VERSION

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Field of an entry of the stream: a JSON list of task ids.
FIELD = b"ids"


def stream_name_of(header: Any) -> str | None:
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


def stream_key(backend: Any, name: str) -> bytes:
    """The key of a completion stream, with the prefix that results have.

    Args:
        backend: Celery's result backend for Redis.
        name: A name from `stream_name_of`.
    """
    return backend_prefix(backend) + b"batchery:reply:" + name.encode()


def backend_prefix(backend: Any) -> bytes:
    """The prefix of all result keys, and so of our keys next to them; usually empty.

    Args:
        backend: Celery's result backend for Redis.
    """
    prefix: bytes = backend.get_key_for_task("-").removesuffix(b"celery-task-meta--")
    return prefix


def ids_of(entry: Mapping[bytes, bytes]) -> list[str]:
    """The task ids in an entry of the stream."""
    ids: list[str] = json.loads(entry[FIELD])
    return ids

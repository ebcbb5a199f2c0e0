"""The headers that callers add to messages: stock workers ignore them, stock clients send none.

- `batchery_deadline`: until when the job should be answered, in Unix seconds. A worker compares it
  with its own clock, so the clocks of both machines must agree.
- `batchery_tenant`: for whom the job runs; without it, for one more tenant, the empty name.
- `batchery_sent_at`: when it was sent, in Unix seconds. A worker takes a job only when it has room:
  under overload, that is much later.
- `batchery`: an object, with `v` = 1. `n` and `values` are those of multi-item jobs, `reply` and
  `keep_s` those of completion streams.
"""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from batchery.errors import BatchArgumentError, InvalidItem

DEADLINE, TENANT, SENT_AT = "batchery_deadline", "batchery_tenant", "batchery_sent_at"

#: The header with an object, and its version.
HEADER = "batchery"
VERSION = 1

#: Calls within so much time have the same deadline, so that they can be sent together, in seconds.
GRAIN_S = 0.01

#: Maximum length of a tenant's name; workers remember it for each tenant that has jobs.
MAX_TENANT_CHARS = 200

#: Digits after the point of a time of sending: milliseconds.
DIGITS = 3

#: Age beyond which a time of sending is not believed, in seconds: no job waits for a week, and one
#: absurd time would stretch a recording by years.
MAX_AGE_S = 7 * 86_400

#: Names of completion streams, which become parts of Redis keys.
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Maximum of `keep_s`: Redis refuses numbers that are much larger.
MAX_KEEP_S = 2**31


def read_deadline(message: Mapping[str, Any]) -> float:
    """The deadline of a message, by its headers, in Unix seconds; infinity for none.

    Raises:
        InvalidItem: The header is no time.
    """
    found = message.get(DEADLINE)
    if found is None:
        return math.inf
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise InvalidItem(f"header {DEADLINE} is {found!r:.80}; expected a time in Unix seconds")
    return float(found)


def deadline_header(deadline_s: float | None) -> dict[str, float]:
    """The header for a deadline from now on.

    Args:
        deadline_s: Seconds from now; None for no deadline.

    Raises:
        BatchArgumentError: It is in the past, or no number.
    """
    if deadline_s is None:
        return {}
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s < math.inf:
        raise BatchArgumentError(
            f"deadline_s = {deadline_s!r}: expected a number of seconds from now, above 0"
        )
    return {DEADLINE: round((time.time() + deadline_s) / GRAIN_S) * GRAIN_S}


def read_tenant(message: Mapping[str, Any]) -> str:
    """The tenant of a message, by its headers.

    Raises:
        InvalidItem: The header is no name.
    """
    name = message.get(TENANT)
    if name is None:
        return ""
    if not isinstance(name, str) or len(name) > MAX_TENANT_CHARS:
        text = f"expected a name of at most {MAX_TENANT_CHARS} characters"
        raise InvalidItem(f"header {TENANT} is {name!r:.80}; {text}")
    return name


def with_tenant(options: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Options of `apply_async` whose headers name a tenant; the same ones for None.

    Raises:
        InvalidItem: It is no name.
    """
    if tenant is None:
        return dict(options)
    headers = {**(options.get("headers") or {}), TENANT: tenant}
    read_tenant(headers)
    return {**options, "headers": headers}


def sent_now() -> dict[str, float]:
    """The header of a message that is sent now."""
    return {SENT_AT: round(time.time(), DIGITS)}


def read_sent_at(message: Mapping[str, Any], now_s: float) -> float:
    """When a message was sent, by its headers, in Unix seconds.

    Args:
        message: The headers.
        now_s: The time. It is the answer where the header is missing, no time, or too old. It is
            also the latest answer, as clocks may disagree.
    """
    found = message.get(SENT_AT)
    if isinstance(found, int | float) and found >= now_s - MAX_AGE_S:
        return float(min(found, now_s))
    return now_s


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
    return name if isinstance(name, str) and _STREAM.fullmatch(name) else None


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

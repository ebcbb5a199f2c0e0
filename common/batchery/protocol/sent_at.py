"""Times of sending: when a job was sent, as its caller's clock says.

The message header `batchery_sent_at: 1790000000.123` is a time in Unix seconds. Celery has none of
its own, and a worker takes a job only when it has room: under overload, that is much later. Stock
clients do not send the header, and stock workers ignore it.
"""

import time
from collections.abc import Mapping
from typing import Any

HEADER = "batchery_sent_at"

#: Digits after the point: milliseconds.
DIGITS = 3

#: Age beyond which a time of sending is not believed, in seconds: no job waits for a week, and one
#: absurd time would stretch a recording by years.
MAX_AGE_S = 7 * 86_400


def sent_now() -> dict[str, float]:
    """The header of a message that is sent now."""
    return {HEADER: round(time.time(), DIGITS)}


def read_sent_at(message: Mapping[str, Any], now_s: float) -> float:
    """When a message was sent, by its headers, in Unix seconds.

    Args:
        message: The headers.
        now_s: The time. It is the answer where the header is missing, no time, or too old. It is
            also the latest answer, as clocks may disagree.
    """
    found = message.get(HEADER)
    if isinstance(found, int | float) and found >= now_s - MAX_AGE_S:
        return float(min(found, now_s))
    return now_s

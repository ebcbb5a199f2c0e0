"""Deadlines: until when a job should be answered, as its caller says.

The message header `batchery_deadline: 1790000000.5` is a time in Unix seconds. A worker converts it
by its own clock, so the clocks of both machines must agree. Stock workers ignore the header.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

from batchery.errors import BatchArgumentError, InvalidItem

HEADER = "batchery_deadline"

#: Calls within so much time have the same deadline, so that they can be sent together, in seconds.
GRAIN_S = 0.01


def read_deadline(message: Mapping[str, Any]) -> float:
    """The deadline of a message, by its headers, in Unix seconds; infinity for none.

    Raises:
        InvalidItem: The header is no time.
    """
    found = message.get(HEADER)
    if found is None:
        return math.inf
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise InvalidItem(f"header {HEADER} is {found!r:.80}; expected a time in Unix seconds")
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
    return {HEADER: round((time.time() + deadline_s) / GRAIN_S) * GRAIN_S}

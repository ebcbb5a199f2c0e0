"""What can be handed to a device: tried while it is still one job and not yet a batch.

JSON reads lists that are nested more deeply than pickle can write, and what cannot be pickled on
the event loop would end the worker, and the next one that is given the message.
"""

import pickle
from collections.abc import Iterable
from typing import Any

#: Types that can always be pickled: for the common job, a text, nothing is tried.
FLAT = {str, bytes, int, float, bool, type(None)}

#: Levels of nesting that the trial adds: more than the message to the device adds.
MARGIN = 20


def check_portable(values: Iterable[Any]) -> None:
    """Tries whether values can be pickled.

    Raises:
        Exception: Whatever pickle, or the values' own code, raises where they cannot.
    """
    wrapped: Any = list(values)
    if set(map(type, wrapped)) <= FLAT:
        return
    for _ in range(MARGIN):
        wrapped = [wrapped]
    pickle.dumps(wrapped, protocol=pickle.HIGHEST_PROTOCOL)


def is_portable(values: Iterable[Any]) -> bool:
    """Whether values can be pickled."""
    try:
        check_portable(values)
    except Exception:  # noqa: BLE001 - the values' own code may raise anything
        return False
    return True

"""Which models make room in the memory of a device for one that is not there: pure.

The one that was used least recently, as measured in times that it takes to load it; before it those
for which no job waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

#: A load counts for so many seconds at least, so that nothing is divided by 0.
MIN_LOAD_S = 1e-3


class HeldModel(NamedTuple):
    """A model in the memory of a device."""

    name: str
    held_bytes: int
    #: How long it takes to have it there again.
    reload_s: float
    #: For how long no batch has used it.
    idle_s: float
    #: Whether jobs wait for it.
    is_wanted: bool = False


def choose_victims(models: Sequence[HeldModel], wanted_bytes: int) -> list[str] | None:
    """The models that make room.

    Returns:
        Their names; None if all of them together hold less.
    """
    left, chosen = wanted_bytes, []
    for each in sorted(models, key=_regret):
        if left <= 0:
            break
        chosen.append(each)
        left -= each.held_bytes
    if left > 0:
        return None
    # A large one that came later may make enough room without those before it.
    for each in reversed(chosen):
        if left + each.held_bytes <= 0:
            chosen.remove(each)
            left += each.held_bytes
    return [each.name for each in chosen]


def _regret(model: HeldModel) -> tuple[bool, float]:
    """How much it would be missed; the least goes first."""
    return model.is_wanted, -model.idle_s / max(model.reload_s, MIN_LOAD_S)

"""Forward passes that are begun before their turn, so that the device never waits for the host."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from batchery.model import Model


def max_lookahead(model: Model) -> int:
    """How many forward passes may be begun before the results of the one in turn are awaited.

    Only models whose `forward` returns before the device has computed have `passes_ahead`, as the
    built-in ones.
    """
    return int(getattr(model, "passes_ahead", 0))


class Begun(NamedTuple):
    """A pass that the device computes."""

    items: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Any


class Early:
    """The forward passes of a model, of which as many may be begun early as it allows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        #: In the order of their turns.
        self._begun: deque[Begun] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more pass may be begun."""
        return len(self._begun) < max_lookahead(self._model)

    def begin(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Begins the pass that is likely next, or next but one, if it was not begun.

        Whatever goes wrong is left for its turn: there the pass runs again, alone, and fails as any
        other does.

        Raises:
            SoftTimeLimitExceeded: The limit of the batch in turn was reached meanwhile.
        """
        if not self.has_room or any(_is(each, items, keywords) for each in self._begun):
            return
        try:
            outputs = self._model.forward(items, **keywords)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - the code of any model
            return
        self._begun.append(Begun(items, keywords, outputs))

    def forward(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The outputs of a pass: of the one that was begun, if it was this one."""
        while self._begun:
            # Outputs of another pass, for which the plan has changed, take memory.
            begun = self._begun.popleft()
            if _is(begun, items, keywords):
                return begun.outputs
            del begun
        return self._model.forward(items, **keywords)


def _is(begun: Begun, items: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a pass that was begun is this one."""
    if len(begun.items) != len(items) or begun.keywords != keywords:
        return False
    return all(one is other for one, other in zip(begun.items, items, strict=True))

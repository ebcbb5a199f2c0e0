"""A forward pass that is begun before its turn, so that the device never waits for the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from batchery.model import Model


class Begun(NamedTuple):
    """A pass that the device computes."""

    items: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Any


class Early:
    """The forward passes of a model, of which one may be begun early: at most one at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._begun: Begun | None = None

    def begin(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Begins the pass that is likely next, if the model's passes return early.

        Whatever goes wrong is left for its turn: there the pass runs again, alone, and fails as any
        other does.

        Raises:
            SoftTimeLimitExceeded: The limit of the batch in turn was reached meanwhile.
        """
        if not self._model.returns_early or self._begun is not None:
            return
        try:
            self._begun = Begun(items, keywords, self._model.forward(items, **keywords))
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - the code of any model
            self._begun = None

    def forward(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The outputs of a pass: of the one that was begun, if it was this one."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.keywords == keywords and _same(begun.items, items):
            return begun.outputs
        # Outputs of another pass, for which the plan has changed, take memory.
        del begun
        return self._model.forward(items, **keywords)


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))

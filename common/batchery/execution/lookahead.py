"""Forward passes that are started before their turn, so that no device waits for the host."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from batchery.model import Model


def max_lookahead(model: Model) -> int:
    """How many forward passes may be started before the results of the current one are awaited.

    It is more than 0 only for models whose `forward` returns before the device has computed. The
    built-in models say so by `passes_ahead`.
    """
    return int(getattr(model, "passes_ahead", 0))


class StartedPass(NamedTuple):
    """A pass that the device computes."""

    items: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Any


class Lookahead:
    """Runs the forward passes of a model, and starts as many in advance as the model allows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        #: In the order of their turns.
        self._started: deque[StartedPass] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more pass may be started."""
        return len(self._started) < max_lookahead(self._model)

    def is_idle(self, outputs: Any) -> bool:
        """Whether the device has computed these outputs, or will have in a moment.

        Models that know say so by `has_computed`.
        """
        has_computed = getattr(self._model, "has_computed", None)
        return has_computed is not None and has_computed(outputs)

    def start(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Starts a pass that is likely to come soon, unless it has started.

        Errors are left for its turn: there the pass runs again, and fails as any other pass does.

        Raises:
            SoftTimeLimitExceeded: The limit of the current batch was reached meanwhile.
        """
        if not self.has_room or any(_is_same(each, items, keywords) for each in self._started):
            return
        try:
            outputs = self._model.forward(items, **keywords)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - the code of any model
            return
        self._started.append(StartedPass(items, keywords, outputs))

    def forward(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The outputs of a pass, which may have started."""
        while self._started:
            # The plan may have changed since. Outputs of passes that are no longer wanted are
            # dropped, because they take memory.
            started = self._started.popleft()
            if _is_same(started, items, keywords):
                return started.outputs
            del started
        return self._model.forward(items, **keywords)


def _is_same(started: StartedPass, items: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a started pass is over these very items."""
    if len(started.items) != len(items) or started.keywords != keywords:
        return False
    return all(one is other for one, other in zip(started.items, items, strict=True))

"""Lookahead: forward passes start before their turn, so the device never waits for the host."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from batchery.model import Model


class StartedPass(NamedTuple):
    """A forward pass that was started and whose outputs nobody has taken yet."""

    items: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Any


class Early:
    """Starts forward passes of a model before their turn, at most as many as the model allows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        #: In the order of their turns.
        self._started: deque[StartedPass] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more pass may be started."""
        return len(self._started) < self._model.passes_ahead

    def begin(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Starts a pass that is likely to come soon, unless it was started already.

        An error is dropped here: in its turn the pass runs again, and fails like any other.

        Raises:
            SoftTimeLimitExceeded: The running batch reached its limit meanwhile.
        """
        if not self.has_room or any(_is(each, items, keywords) for each in self._started):
            return
        try:
            outputs = self._model.forward(items, **keywords)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - the code of any model
            return
        self._started.append(StartedPass(items, keywords, outputs))

    def forward(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The outputs of a pass: those of a pass that was started, if it is the same one."""
        while self._started:
            # The plan has changed if another pass was started. Its outputs take memory: drop them.
            started = self._started.popleft()
            if _is(started, items, keywords):
                return started.outputs
            del started
        return self._model.forward(items, **keywords)


def _is(started: StartedPass, items: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a pass that was started has these very items and these keywords."""
    if len(started.items) != len(items) or started.keywords != keywords:
        return False
    return all(one is other for one, other in zip(started.items, items, strict=True))

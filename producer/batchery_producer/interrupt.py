"""Ctrl-C and `kill`: the first asks for a clean end, the second ends at once."""

import signal
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While entered, notes SIGINT and SIGTERM; call it to hear whether one came. Main thread only.

    The handler only sets a flag: it may run in the middle of anything, locks included.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Mapping[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self._asked

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, *_: object) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

"""Keeps what is wrong all the time from filling a log."""

import time
from collections.abc import Callable

#: Time between two lines of a log that say the same, in seconds.
LINE_PAUSE_S = 60.0


class LogPace:
    """Says which lines of a log are due: each text at once, then once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s: dict[str, float] = {}

    def is_due(self, text: str) -> bool:
        """Whether a text is to be logged now; then it counts as logged."""
        now_s = self._clock()
        for each, next_s in list(self._next_s.items()):
            if next_s <= now_s:
                self._next_s.pop(each, None)
        if text in self._next_s:
            return False
        self._next_s[text] = now_s + LINE_PAUSE_S
        return True

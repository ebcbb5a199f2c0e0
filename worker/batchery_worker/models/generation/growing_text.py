"""A text that grows by tokens: what of it can be shown, and where it stops."""

from collections.abc import Callable, Sequence

#: Tokens that wait for the rest of a character, at most: it has four bytes, but a token may end one
#: and begin another. With more, the model writes bytes that are none.
MAX_WAITING_TOKENS = 12

#: What decoders write for bytes that are no whole character.
REPLACEMENT = "\ufffd"


class GrowingText:
    """The text of tokens that come one by one.

    Nothing that was released changes later: the first bytes of a character wait for the others, and
    what may be the beginning of a stop string waits until it is none.

    Attributes:
        text: What was released.
        has_stopped: Whether a stop string has come; then `text` ends before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self.text = ""
        self.has_stopped = False
        self._held = ""
        # Tokens are decoded together with the ones before them, on which their spaces depend.
        self._window: list[int] = []
        self._window_text = ""
        self._new = 0

    def add(self, token: int) -> str:
        """Takes the next token; returns what can be released."""
        self._window.append(token)
        self._new += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._new < MAX_WAITING_TOKENS:
            return ""
        if text == self._window_text:
            # A special token has no text, and waits for none. Of many, those in the middle are the
            # ones on which nothing depends.
            self._new = 0
            del self._window[MAX_WAITING_TOKENS:-MAX_WAITING_TOKENS]
        if len(text) <= len(self._window_text):
            return ""
        added = text[len(self._window_text) :]
        del self._window[: -self._new]
        self._window_text, self._new = self._decode(self._window), 0
        return self._release(added)

    def finish(self) -> str:
        """Releases what was held back, as no token comes any more."""
        if self.has_stopped:
            return ""
        rest = self._decode(self._window)[len(self._window_text) :] if self._new else ""
        released = self._release(rest) + self._held
        if self.has_stopped:
            return released
        self.text += self._held
        self._held = ""
        return released

    def _release(self, added: str) -> str:
        held = self._held + added
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            released, self._held = held[: min(found)], ""
        else:
            cut = len(held) - max((_overlap(held, stop) for stop in self._stops), default=0)
            released, self._held = held[:cut], held[cut:]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)

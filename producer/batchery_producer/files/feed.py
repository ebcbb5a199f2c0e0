"""A thread that reads ahead, so that a slow input delays neither results nor Ctrl-C."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

#: How long the reader waits for space in its queue at a time, in seconds; it notices `close` that
#: late.
HANDOVER_S = 0.2


class _End(NamedTuple):
    error: BaseException | None


class Feed(Generic[T]):
    """Iterates on a thread of its own, up to a fixed number of entries ahead.

    Attributes:
        exhausted: Whether all entries were taken, and neither entries nor an error will follow.
    """

    def __init__(self, entries: Iterable[T], ahead: int) -> None:
        """Starts to read; up to `ahead` entries, at least 1, wait to be taken."""
        self.exhausted = False
        self._queue: queue.Queue[T | _End] = queue.Queue(ahead)
        self._error: BaseException | None = None
        self._closed = False
        # A daemon, because a thread that waits for a pipe cannot be woken.
        threading.Thread(
            target=self._read, args=(entries,), name="batchery-feed", daemon=True
        ).start()

    def take(self, maximum: int, wait_s: float = 0) -> list[T]:
        """Takes the entries that are there.

        Args:
            maximum: Maximum number of entries to return, at least 1.
            wait_s: How long to wait for the first one, in seconds.

        Returns:
            The entries, which may be none: see `exhausted`.

        Raises:
            Exception: The error of the iteration, once all entries before it were taken.
        """
        taken: list[T] = []
        while len(taken) < maximum and not self.exhausted and self._error is None:
            try:
                entry = self._queue.get(wait_s > 0 and not taken, wait_s or None)
            except queue.Empty:
                break
            if isinstance(entry, _End):
                self._error, self.exhausted = entry.error, entry.error is None
            else:
                taken.append(entry)
        if self._error is not None and not taken:
            raise self._error
        return taken

    def close(self) -> None:
        """Lets the thread end; entries that were read ahead are lost."""
        self._closed = True

    def _read(self, entries: Iterable[T]) -> None:
        error: BaseException | None = None
        try:
            for entry in entries:
                if not self._hand_over(entry):
                    break
            if isinstance(entries, Generator):
                # Closed here, because what the generator has open belongs to this thread.
                entries.close()
        except BaseException as raised:  # noqa: BLE001 (raised again where it is taken)
            error = raised
        self._hand_over(_End(error))

    def _hand_over(self, entry: T | _End) -> bool:
        while not self._closed:
            try:
                self._queue.put(entry, timeout=HANDOVER_S)
            except queue.Full:
                continue
            return True
        return False

"""Reading ahead, so that a slow input delays neither results nor Ctrl-C."""

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

#: How long the reader waits for space in its queue at a time, in seconds; it notices `close` that
#: late.
HANDOVER_S = 0.2


class Feed(Generic[T]):
    """Iterates on a thread of its own, up to a fixed number of entries ahead."""

    def __init__(self, entries: Iterable[T], ahead: int) -> None:
        """Starts to read.

        Args:
            entries: Iterated over once, on the thread.
            ahead: Maximum number of entries that wait to be taken, at least 1.
        """
        self._queue: queue.Queue[T] = queue.Queue(ahead)
        self._closed = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
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
        entries: list[T] = []
        try:
            entries.append(
                self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get(False)
            )
            while len(entries) < maximum:
                entries.append(self._queue.get(block=False))
        except queue.Empty:
            if self._error is not None and not entries and self._drained:
                raise self._error from None
        return entries

    @property
    def exhausted(self) -> bool:
        """Whether all entries were taken, and neither entries nor an error will follow."""
        return self._drained and self._error is None

    @property
    def _drained(self) -> bool:
        return self._ended.is_set() and self._queue.empty()

    def close(self) -> None:
        """Lets the thread end; entries that were read ahead are lost."""
        self._closed = True

    def _read(self, entries: Iterable[T]) -> None:
        try:
            for entry in entries:
                if not self._hand_over(entry):
                    break
            if isinstance(entries, Generator):
                # Closed here, because what the generator has open belongs to this thread.
                entries.close()
        except BaseException as error:  # noqa: BLE001 (raised again where it is taken)
            self._error = error
        finally:
            self._ended.set()

    def _hand_over(self, entry: T) -> bool:
        while not self._closed:
            try:
                self._queue.put(entry, timeout=HANDOVER_S)
            except queue.Full:
                continue
            return True
        return False

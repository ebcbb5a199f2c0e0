"""Reading ahead, so that a slow input delays neither results nor Ctrl-C."""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Generic, TypeVar

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.records import Broken, Record

T = TypeVar("T")

#: How long the reader waits for space in its queue at a time, in seconds; it notices `close` that
#: late.
HANDOVER_S = 0.2

#: Number of rows of which one must have the fields that the caller names: in JSON lines, a field
#: may be missing here and there. If the first of them cannot be read, half must be readable.
FIRST_ROWS = 100


class Feed(Generic[T]):
    """Iterates on a thread of its own, up to a fixed number of entries ahead."""

    def __init__(self, entries: Iterable[T], ahead: int) -> None:
        """Starts to read; up to `ahead` entries, at least 1, wait to be taken."""
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


def begin_reading(dataset: Dataset, stop: Callable[[], bool]) -> Iterator[Record | Broken] | None:
    """Reads the first rows, so that a wrong field, format or encoding is noticed early.

    Returns:
        All rows, with those that were read; None if `stop` returned True.

    Raises:
        DatasetError: The input is unusable, or none of the first rows has the fields, or most of
            them cannot be read.
    """
    rows, first = iter(dataset), list[Record | Broken]()
    with closing(Feed(_until_usable(rows), FIRST_ROWS)) as feed:
        while not feed.exhausted:
            if stop():
                return None
            first += feed.take(FIRST_ROWS, HANDOVER_S)
    row = first[-1] if first else None
    is_usable = any(isinstance(each, Record) for each in first)
    if isinstance(row, Broken) and row.lacks_field and not is_usable:
        raise DatasetError(
            f"{dataset.line_name(row.source, row.line)}: {row.reason};"
            f" so far no row of {len(first)} has it: name another with --field or --id-field"
        )
    broken = [each for each in first if isinstance(each, Broken) and not each.lacks_field]
    if len(broken) > len(first) / 2 and not dataset.is_openai:
        raise DatasetError(
            f"{dataset.line_name(broken[0].source, broken[0].line)}: {broken[0].reason}; of the"
            f" first {len(first)} rows, {len(broken)} cannot be read:"
            " check --format, --encoding and --delimiter"
        )
    return chain(first, rows)


def _until_usable(rows: Iterator[Record | Broken]) -> Iterator[Record | Broken]:
    is_unreadable = False
    for row in islice(rows, FIRST_ROWS):
        yield row
        is_unreadable |= isinstance(row, Broken) and not row.lacks_field
        if isinstance(row, Record) and not is_unreadable:
            return

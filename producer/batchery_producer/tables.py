"""Rows of Parquet and Arrow files: read some at a time, as mappings of column to value."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from batchery.errors import DatasetError
from batchery_producer.extras import extra
from batchery_producer.rows import Rows

#: Rows that are turned into Python's objects at a time.
BATCH_ROWS = 1024

#: First bytes of an Arrow file; a stream has others.
ARROW_MAGIC = b"ARROW1"


class TableRows(Rows):
    """Rows of a table; the first one has the number 1."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads what the file says of itself.

        Raises:
            DatasetError: It is no such file, or its library is not installed.
        """
        super().__init__()
        self._arrow = extra("pyarrow")
        self._share = 0.0
        self._rows: Iterator[Mapping[str, Any]] = iter(())
        self._ended = False
        try:
            self._batches = self._open(file)
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise DatasetError(f"cannot be read: {_first_line(error)}") from None

    @abstractmethod
    def _open(self, file: BinaryIO) -> Iterator[tuple[Any, float]]:
        """Record batches, and which part of the file has been read with each, 0 to 1."""

    def end(self) -> None:
        """As `Rows.end`."""
        self._ended = True

    def read_bytes(self, size_bytes: int) -> int:
        """As far as rows tell it."""
        return round(self._share * size_bytes)

    def __next__(self) -> Mapping[str, Any]:
        """The next row, as column name to value.

        Raises:
            OSError: The file is damaged.
        """
        if self._ended:
            raise StopIteration
        self.number += 1
        while (row := next(self._rows, None)) is None:
            batch, self._share = self._next_batch()
            self._rows = iter(batch.to_pylist())
        return row

    def _next_batch(self) -> tuple[Any, float]:
        try:
            return next(self._batches)
        except self._arrow.ArrowException as error:
            raise OSError(_first_line(error)) from None


class ParquetRows(TableRows):
    """Rows of a Parquet file."""

    def _open(self, file: BinaryIO) -> Iterator[tuple[Any, float]]:
        table = extra("pyarrow.parquet").ParquetFile(file)
        total = max(table.metadata.num_rows, 1)
        # A generator of its own: what is above is to be found wrong at once.
        return _counted(table.iter_batches(BATCH_ROWS), lambda rows: rows / total)


class ArrowRows(TableRows):
    """Rows of an Arrow file, or of an Arrow stream."""

    def _open(self, file: BinaryIO) -> Iterator[tuple[Any, float]]:
        ipc = extra("pyarrow.ipc")
        if file.peek(len(ARROW_MAGIC)).startswith(ARROW_MAGIC):  # type: ignore[attr-defined]
            table = ipc.open_file(file)
            count = table.num_record_batches
            batches = (table.get_batch(number) for number in range(count))
            return _sliced(batches, count)
        return _sliced(ipc.open_stream(file), 0)


def _counted(batches: Any, share: Callable[[int], float]) -> Iterator[tuple[Any, float]]:
    rows = 0
    for batch in batches:
        rows += batch.num_rows
        yield batch, share(rows)


def _sliced(batches: Any, count: int) -> Iterator[tuple[Any, float]]:
    """Batches of the file may hold any number of rows."""
    for number, batch in enumerate(batches, 1):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS), number / count if count else 0.0


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


TABLES: Mapping[str, type[TableRows]] = {"parquet": ParquetRows, "arrow": ArrowRows}

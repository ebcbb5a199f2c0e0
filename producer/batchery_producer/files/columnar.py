"""Parquet and Arrow files: rows are read and written some at a time, as column -> value."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, BinaryIO

from batchery.errors import DatasetError
from batchery_producer.files.extras import extra
from batchery_producer.files.rows import Rows

#: Number of rows that are converted to Python objects at a time.
READ_ROWS = 1024

#: First bytes of an Arrow file; an Arrow stream has others.
ARROW_MAGIC = b"ARROW1"

Entries = Callable[[], Iterable[Mapping[str, Any]]]

#: Number of rows in memory at a time, and in a row group.
WRITE_ROWS = 4096


class TableRows(Rows):
    """Rows of a table, numbered from 1."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads the file's schema.

        Raises:
            DatasetError: The file has another form, or its library is not installed.
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
        """Record batches, each with the part of the file that is read after it, 0 to 1."""

    def end(self) -> None:
        """As `Rows.end`."""
        self._ended = True

    def read_bytes(self, size_bytes: int) -> int:
        """Estimates by rows how many bytes were read."""
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
        # A generator of its own, so that the lines above fail at once and not with the first row.
        return _counted(table.iter_batches(READ_ROWS), lambda rows: rows / total)


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
    """Slices batches, which may hold any number of rows."""
    for number, batch in enumerate(batches, 1):
        for start in range(0, batch.num_rows, READ_ROWS):
            yield batch.slice(start, READ_ROWS), number / count if count else 0.0


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


TABLES: Mapping[str, type[TableRows]] = {"parquet": ParquetRows, "arrow": ArrowRows}


def write_parquet(entries: Entries, file: BinaryIO) -> None:
    """Writes a Parquet file."""
    _write(entries, lambda schema: extra("pyarrow.parquet").ParquetWriter(file, schema))


def write_arrow(entries: Entries, file: BinaryIO) -> None:
    """Writes an Arrow file."""
    _write(entries, lambda schema: extra("pyarrow.ipc").new_file(file, schema))


def _write(entries: Entries, create: Callable[[Any], Any]) -> None:
    arrow = extra("pyarrow")
    schema = _schema(entries())
    with create(schema) as writer:
        for batch in _batches(entries()):
            columns = [_column(field, batch) for field in schema]
            writer.write_batch(arrow.record_batch(columns, schema=schema))


def _schema(entries: Iterable[Mapping[str, Any]]) -> Any:
    """A schema whose types fit all values of their column; if none does, it is JSON text."""
    arrow = extra("pyarrow")
    fields: dict[str, Any] = {name: arrow.field(name, arrow.null()) for name in ("id", "line")}
    for batch in _batches(entries):
        for name in batch[0]:
            found = _field(name, batch)
            fields[name] = _joined(fields.get(name, found), found)
    order = [name for name in ("id", "file", "line", "result") if name in fields]
    return arrow.schema([fields[name] for name in order])


def _field(name: str, batch: Sequence[Mapping[str, Any]]) -> Any:
    arrow = extra("pyarrow")
    try:
        type_ = arrow.array([entry[name] for entry in batch]).type
        # An object without a single field cannot be written to a Parquet file.
        type_ = arrow.string() if "struct<>" in str(type_) else type_
    except (arrow.ArrowException, OverflowError, ValueError, TypeError):
        type_ = arrow.string()
    return arrow.field(name, type_)


def _joined(one: Any, other: Any) -> Any:
    arrow = extra("pyarrow")
    schemas = [arrow.schema([one]), arrow.schema([other])]
    try:
        return arrow.unify_schemas(schemas, promote_options="permissive").field(0)
    except (arrow.ArrowException, ValueError, TypeError):
        return arrow.field(one.name, arrow.string())


def _column(field: Any, batch: Sequence[Mapping[str, Any]]) -> Any:
    arrow = extra("pyarrow")
    values = [entry[field.name] for entry in batch]
    if field.type == arrow.string():
        values = [_text(value) for value in values]
    return arrow.array(values, type=field.type)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _batches(entries: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    rest = iter(entries)
    while batch := list(islice(rest, WRITE_ROWS)):
        yield batch

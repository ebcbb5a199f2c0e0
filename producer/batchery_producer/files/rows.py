"""Rows of files, format by format: JSON lines, CSV, plain text, Parquet and Arrow.

A row that cannot be read raises `InvalidLine`, and the next row can still be read. Generators
cannot do that, as they end with their first exception; so these are iterators. Parquet and Arrow
files are read and written some rows at a time, as column -> value.
"""

import csv
import json
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from celery.utils.functional import chunks

from batchery.errors import DatasetError
from batchery_producer.files.source import extra

#: Maximum length of a line in bytes (CSV: of a field in characters). A longer line fails alone, so
#: that a file without line ends does not fill the memory.
MAX_LINE_BYTES = 16 * 1024 * 1024

#: Delimiters of CSV that are recognised; the first is the usual one.
DELIMITERS = ",;\t|"

#: Part of a CSV's first rows that have as many columns as a header with an unusual delimiter.
ENOUGH_ROWS = 0.9

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

#: Number of rows that are converted to Python objects at a time.
READ_ROWS = 1024

#: First bytes of an Arrow file; an Arrow stream has others.
ARROW_MAGIC = b"ARROW1"

Entries = Callable[[], Iterable[Mapping[str, Any]]]

#: Number of rows in memory at a time, and in a row group.
WRITE_ROWS = 4096


class InvalidLine(ValueError):
    """A row cannot be used; the text says why."""


class Lines(Iterator[bytes]):
    """The lines of a byte stream, with their line ends.

    Attributes:
        number: Of the last line, from 1.
        read_bytes: Up to the end of the last line.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._ended = False
        self.number = 0
        self.read_bytes = 0

    def end(self) -> None:
        """Stops reading, after an error that ends the file."""
        self._ended = True

    def __next__(self) -> bytes:
        """The next line.

        Raises:
            InvalidLine: It is longer than `MAX_LINE_BYTES`.
        """
        line = b"" if self._ended else self._read()
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = self._read()
            raise InvalidLine(f"longer than {MAX_LINE_BYTES} bytes")
        return line.removeprefix(BYTE_ORDER_MARK) if self.number == 1 else line

    def _read(self) -> bytes:
        line = self._stream.readline(MAX_LINE_BYTES + 1)
        self.read_bytes += len(line)
        return line


class Rows(Iterator[Any], ABC):
    """The rows of an input; blank lines are skipped.

    Attributes:
        number: Line at which the last row began, from 1.
    """

    def __init__(self) -> None:
        self.number = 0

    @abstractmethod
    def end(self) -> None:
        """Stops reading, after an error that ends the file."""

    @abstractmethod
    def __next__(self) -> Mapping[str, Any] | str:
        """The next row.

        Raises:
            InvalidLine: This row cannot be read; the next one may be.
        """


class LineRows(Rows):
    """Rows of a format that consists of lines."""

    #: Between the columns, where lines have them.
    delimiter = ","

    #: What to do about a line that is not UTF-8.
    encoding_hint = "name its encoding, such as --encoding latin-1"

    def __init__(self, lines: Lines, encoding: str = "utf-8", delimiter: str | None = None) -> None:
        super().__init__()
        self._lines = lines
        self._encoding = encoding
        self.delimiter = delimiter or self.delimiter

    def end(self) -> None:
        """As `Rows.end`."""
        self._lines.end()

    def _next_line(self) -> str:
        """The next line that is not blank, without its line end."""
        while True:
            self.number = self._lines.number + 1
            try:
                text = next(self._lines).decode(self._encoding)
            except UnicodeDecodeError as error:
                raise self._not_encoded(f": {error.reason} at byte {error.start}") from None
            if text.strip():
                return text.rstrip("\r\n")

    def _not_encoded(self, why: str = "") -> InvalidLine:
        is_default = self._encoding == "utf-8"
        hint = f"; {self.encoding_hint}" if is_default else ""
        return InvalidLine(f"not {self._encoding.upper()}{why}{hint}")


class TextRows(LineRows):
    """Each line is an item."""

    def __next__(self) -> str:
        """The next line as it is, without its line end."""
        return self._next_line()


class JsonRows(LineRows):
    """Each line is a JSON object, or a string, which is the item."""

    def __next__(self) -> Mapping[str, Any] | str:
        """The next object or string."""
        text = self._next_line()
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidLine(f"not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError as error:
            raise InvalidLine(f"not JSON that can be read: {error}") from None
        except ValueError:
            # Python's own text names a function that only a program can call.
            raise InvalidLine(
                "not JSON that can be read: a number has more than"
                f" {sys.get_int_max_str_digits()} digits; send it as a string"
            ) from None
        if not isinstance(row, dict | str):
            hint = "; jq -c '.[]' makes lines of a list" if isinstance(row, list) else ""
            raise InvalidLine(
                f"a JSON {type(row).__name__}; expected an object with a field, or a string{hint}"
            )
        return row


class CsvRows(LineRows):
    """Comma-separated values, RFC 4180; the first row names the columns."""

    def __init__(self, lines: Lines, encoding: str = "utf-8", delimiter: str | None = None) -> None:
        super().__init__(lines, encoding, delimiter)
        # The default, 128 KiB, is less than a long document. The setting is the process's.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        self._reader = csv.reader(_Decoded(lines, encoding), delimiter=self.delimiter, strict=True)
        self._columns: list[str] | None = None

    def __next__(self) -> Mapping[str, Any]:
        """The next row, as column name to text."""
        if self._columns is None:
            self._columns = self._header()
        values = self._values()
        if len(values) != len(self._columns):
            raise InvalidLine(f"{len(values)} columns; the header has {len(self._columns)}")
        return dict(zip(self._columns, values, strict=True))

    def _header(self) -> list[str]:
        try:
            columns = [name.strip() for name in self._values()]
        except InvalidLine as error:
            raise DatasetError(f"the CSV header in line {self.number}: {error}") from None
        if len(set(columns)) < len(columns):
            raise DatasetError(
                f"the CSV header names a column twice: {', '.join(columns)}; rename one of them"
            )
        return columns

    def _values(self) -> list[str]:
        values: list[str] = []
        while not values:
            self.number = self._lines.number + 1
            try:
                values = next(self._reader)
            except csv.Error as error:
                is_old = str(error).startswith("new-line character")
                why = "old Mac line ends; make them line feeds: tr '\\r' '\\n'" if is_old else error
                raise InvalidLine(f"not CSV: {why}") from None
            except UnicodeDecodeError:
                raise self._not_encoded() from None
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            raise self._not_encoded() from None
        return values


class TsvRows(CsvRows):
    """Tab-separated values."""

    delimiter = "\t"


class _Decoded(Iterator[str]):
    """Lines as text; wrongly encoded bytes become surrogates, which their row then reports."""

    def __init__(self, lines: Lines, encoding: str) -> None:
        self._lines = lines
        self._encoding = encoding

    def __next__(self) -> str:
        return next(self._lines).decode(self._encoding, "surrogateescape")


def find_delimiter(sample: bytes, encoding: str) -> str:
    """Finds the delimiter of a CSV: it divides the header, and the rows as the header.

    A text is full of commas and semicolons, so rows alone say nothing.

    Raises:
        DatasetError: It is unclear.
    """
    lines = sample.removeprefix(BYTE_ORDER_MARK).decode(encoding, "replace").split("\n")
    lines = lines[:-1] if len(lines) > 2 else lines  # The last one may be incomplete.
    widths: dict[str, list[int]] = {}
    for each in DELIMITERS:
        with suppress(csv.Error):
            widths[each] = [len(row) for row in csv.reader(lines, delimiter=each) if row]
    dividing = [each for each, found in widths.items() if found and found[0] > 1]
    if not dividing:
        return DELIMITERS[0]
    best = max(dividing, key=lambda each: widths[each].count(widths[each][0]))
    columns, *rows = widths[best]
    enough = sum(width >= columns for width in rows)
    if DELIMITERS[0] in dividing or enough >= ENOUGH_ROWS * len(rows):
        return best
    if not enough:
        return DELIMITERS[0]  # One column, whose name has such a character.
    raise DatasetError(
        f"the delimiter is unclear: {best!r} is in the header, and in {enough} of the first"
        f" {len(rows)} rows; name it with --delimiter"
    )


LINE_FORMATS: Mapping[str, type[LineRows]] = {
    "jsonl": JsonRows,
    "csv": CsvRows,
    "tsv": TsvRows,
    "text": TextRows,
    "openai": JsonRows,
}


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
        # pyarrow may believe that a file has two gigabytes of metadata.
        except (self._arrow.ArrowException, OSError, ValueError, MemoryError) as error:
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
            self._rows = iter(self._next_rows())
        return row

    def _next_rows(self) -> Sequence[Mapping[str, Any]]:
        try:
            batch, self._share = next(self._batches)
            # pyarrow believes the offsets in a file, and would read beyond its end.
            batch.validate(full=True)
            rows: list[Mapping[str, Any]] = batch.to_pylist()
        # UnicodeDecodeError for names of columns, which nobody validates.
        except (self._arrow.ArrowException, UnicodeDecodeError, MemoryError) as error:
            raise OSError(_first_line(error)) from None
        except (ValueError, OverflowError, LookupError):
            return self._without_times(batch)
        return rows

    def _without_times(self, batch: Any) -> Sequence[Mapping[str, Any]]:
        """Rows with times that Python lacks, such as nanoseconds, as texts or numbers.

        A column that Python cannot have at all is left out.
        """
        columns: dict[str, Sequence[Any]] = {}
        errors = (self._arrow.ArrowException, ValueError, OverflowError, LookupError)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for type_ in (column.type, self._arrow.string(), self._arrow.int64()):
                with suppress(*errors):
                    columns[name] = column.cast(type_).to_pylist()
                    break
        return [
            {name: values[number] for name, values in columns.items()}
            for number in range(batch.num_rows)
        ]


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
    schema = _schema(entries)
    with create(schema) as writer:
        for batch in chunks(iter(entries()), WRITE_ROWS):
            columns = [_column(field, batch) for field in schema]
            writer.write_batch(arrow.record_batch(columns, schema=schema))


def _schema(entries: Entries) -> Any:
    """A schema whose types fit all values of their column; if none does, it is JSON text."""
    arrow = extra("pyarrow")
    fields: dict[str, Any] = {name: arrow.field(name, arrow.null()) for name in ("id", "line")}
    types = defaultdict[str, set[Any]](set)
    for batch in chunks(iter(entries()), WRITE_ROWS):
        for name in batch[0]:
            found = _field(name, batch)
            fields[name] = _joined(fields.get(name, found), found)
            types[name].add(found.type)
    mixed = [name for name, some in types.items() if len(some) > 1]
    # Integers of one part may be too large to stand beside the floats of another.
    for batch in chunks(iter(entries()), WRITE_ROWS) if mixed else ():
        for name in mixed:
            try:
                _column(fields[name], batch)
            except (arrow.ArrowException, OverflowError, ValueError, TypeError):
                fields[name] = arrow.field(name, arrow.string())
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
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()

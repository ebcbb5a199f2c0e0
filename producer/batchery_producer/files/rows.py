"""Rows of files, format by format: JSON lines, CSV, plain text, Parquet and Arrow.

A row that cannot be read raises `InvalidLine`, and the next row can still be read. Generators
cannot do that, as they end with their first exception; so these are iterators.
"""

import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from typing import Any, BinaryIO

from batchery.errors import DatasetError
from batchery_producer.files.source import extra

#: Maximum length of a line in bytes (CSV: of a field in characters). A longer line fails alone, so
#: that a file without line ends does not fill the memory.
MAX_LINE_BYTES = 16 * 1024 * 1024

#: Delimiters of CSV that are recognised; the first is the usual one.
DELIMITERS = ",;\t|"

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

#: Number of rows that are converted to Python objects at a time.
READ_ROWS = 1024

#: First bytes of an Arrow file; an Arrow stream has others.
ARROW_MAGIC = b"ARROW1"


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
        self.number = 0
        self.read_bytes = 0

    def __next__(self) -> bytes:
        """The next line.

        Raises:
            InvalidLine: It is longer than `MAX_LINE_BYTES`.
        """
        line = self._read()
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


class TextRows(Iterator[Any]):
    """Each line is a row, as it is; blank lines are skipped.

    Attributes:
        number: Line at which the last row began, from 1.
    """

    #: What to do about a line that is not UTF-8.
    encoding_hint = "name its encoding, such as --encoding latin-1"

    def __init__(self, lines: Lines, encoding: str = "utf-8") -> None:
        self.number = 0
        self._lines = lines
        self._encoding = encoding

    def __next__(self) -> Any:
        """The next row.

        Raises:
            InvalidLine: This row cannot be read; the next one may be.
        """
        return self._next_line()

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
        hint = f"; {self.encoding_hint}" if self._encoding == "utf-8" else ""
        return InvalidLine(f"not {self._encoding.upper()}{why}{hint}")


class JsonRows(TextRows):
    """Each line is a JSON object, or a string, which is the item."""

    def __next__(self) -> Mapping[str, Any] | str:
        """The next object or string; raises as `TextRows`."""
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


class CsvRows(TextRows):
    """Values with a delimiter between them, RFC 4180; the first row names the columns."""

    def __init__(self, lines: Lines, encoding: str = "utf-8", delimiter: str = ",") -> None:
        super().__init__(lines, encoding)
        # The default, 128 KiB, is less than a long document. The setting is the process's.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        # Wrongly encoded bytes become surrogates, which their row then reports.
        decoded = map(lambda line: line.decode(encoding, "surrogateescape"), lines)  # noqa: C417
        self._reader = csv.reader(decoded, delimiter=delimiter, strict=True)
        self._columns: list[str] | None = None

    def __next__(self) -> Mapping[str, Any]:
        """The next row, as column name to text; raises as `TextRows`."""
        if self._columns is None:
            self._columns = self._read_header()
        values = self._next_values()
        if len(values) != len(self._columns):
            raise InvalidLine(f"{len(values)} columns; the header has {len(self._columns)}")
        return dict(zip(self._columns, values, strict=True))

    def _read_header(self) -> list[str]:
        try:
            columns = [name.strip() for name in self._next_values()]
        except InvalidLine as error:
            raise DatasetError(f"the CSV header in line {self.number}: {error}") from None
        if len(set(columns)) < len(columns):
            raise DatasetError(
                f"the CSV header names a column twice: {', '.join(columns)}; rename one of them"
            )
        return columns

    def _next_values(self) -> list[str]:
        values: list[str] = []
        try:
            while not values:
                self.number = self._lines.number + 1
                values = next(self._reader)
            "".join(values).encode()
        except csv.Error as error:
            is_old = str(error).startswith("new-line character")
            why = "old Mac line ends; make them line feeds: tr '\\r' '\\n'" if is_old else error
            raise InvalidLine(f"not CSV: {why}") from None
        except UnicodeError:
            raise self._not_encoded() from None
        return values


def find_delimiter(sample: bytes, encoding: str) -> str:
    """Finds the delimiter of a CSV: the one that divides the header into the most columns."""
    header = sample.removeprefix(BYTE_ORDER_MARK).decode(encoding, "replace").splitlines()[:1]
    return max(DELIMITERS, key=lambda each: len(next(csv.reader(header, delimiter=each), ())))


class TableRows(Iterator[Mapping[str, Any]]):
    """Rows of a Parquet file, an Arrow file or an Arrow stream, as column name to value.

    Attributes:
        number: Of the last row, from 1.
    """

    def __init__(self, file: BufferedReader, format_: str) -> None:
        """Reads the file's schema.

        Raises:
            DatasetError: The file has another form, or pyarrow is not installed.
        """
        arrow = extra("pyarrow")
        self.number = 0
        try:
            self._rows = _read_rows(_open_table(file, format_))
        # pyarrow may believe that a file has two gigabytes of metadata.
        except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise DatasetError(f"cannot be read: {_first_line(error)}") from None

    def __next__(self) -> Mapping[str, Any]:
        """The next row.

        Raises:
            EOFError: The file is damaged.
        """
        self.number += 1
        return next(self._rows)


def _open_table(file: BufferedReader, format_: str) -> Any:
    """Record batches of a table."""
    if format_ == "parquet":
        table: Any = extra("pyarrow.parquet").ParquetFile(file)
        return iter(table.iter_batches(READ_ROWS))
    ipc = extra("pyarrow.ipc")
    if not file.peek(len(ARROW_MAGIC)).startswith(ARROW_MAGIC):
        return ipc.open_stream(file)
    table = ipc.open_file(file)
    return map(table.get_batch, range(table.num_record_batches))


def _read_rows(batches: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    arrow = extra("pyarrow")
    try:
        for batch in (part for whole in batches for part in _slice(whole)):
            # pyarrow believes the offsets in a file, and would read beyond its end.
            batch.validate(full=True)
            try:
                rows = batch.to_pylist()
            except (ValueError, OverflowError, LookupError):
                rows = _convert_odd_times(batch)
            yield from rows
    # UnicodeDecodeError for names of columns, which nobody validates.
    except (arrow.ArrowException, UnicodeDecodeError, MemoryError) as error:
        raise EOFError(_first_line(error)) from None


def _slice(batch: Any) -> Iterator[Any]:
    """Parts of a batch, which may hold any number of rows."""
    return (batch.slice(start, READ_ROWS) for start in range(0, batch.num_rows, READ_ROWS))


def _convert_odd_times(batch: Any) -> Sequence[Mapping[str, Any]]:
    """Rows with times that Python lacks, such as nanoseconds, as texts or numbers.

    A column that Python cannot have at all is left out.
    """
    arrow: Any = extra("pyarrow")
    columns: dict[str, Any] = {}
    errors = (arrow.ArrowException, ValueError, OverflowError, LookupError)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for type_ in (column.type, arrow.string(), arrow.int64()):
            with suppress(*errors):
                columns[name] = column.cast(type_).to_pylist()
                break
    return [{name: columns[name][n] for name in columns} for n in range(batch.num_rows)]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

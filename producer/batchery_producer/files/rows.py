"""Rows of an input, format by format: JSON lines, CSV, plain text.

A row that cannot be read raises `InvalidLine`, and the next row can still be read. Generators
cannot do that, as they end with their first exception; so these are iterators.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from batchery.errors import DatasetError

#: Maximum length of a line in bytes (CSV: of a field in characters). A longer line fails alone, so
#: that a file without line ends does not fill the memory.
MAX_LINE_BYTES = 16 * 1024 * 1024

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def end(self) -> None:
        """As `Rows.end`."""
        self._lines.end()

    def _next_line(self) -> str:
        """The next line that is not blank, without its line end."""
        while True:
            self.number = self._lines.number + 1
            try:
                text = next(self._lines).decode()
            except UnicodeDecodeError as error:
                raise InvalidLine(f"not UTF-8: {error.reason} at byte {error.start}") from None
            if text.strip():
                return text.rstrip("\r\n")


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
        except (RecursionError, ValueError) as error:
            raise InvalidLine(f"not JSON that can be read: {error}") from None
        if not isinstance(row, dict | str):
            raise InvalidLine(
                f"a JSON {type(row).__name__}; expected an object with a field, or a string"
            )
        return row


class CsvRows(LineRows):
    """Comma-separated values, RFC 4180; the first row names the columns."""

    delimiter = ","

    def __init__(self, lines: Lines) -> None:
        super().__init__(lines)
        # The default, 128 KiB, is less than a long document. The setting is the process's.
        csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
        self._reader = csv.reader(_Decoded(lines), delimiter=self.delimiter, strict=True)
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
                raise InvalidLine(f"not CSV: {error}") from None
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            raise InvalidLine("not UTF-8") from None
        return values


class TsvRows(CsvRows):
    """Tab-separated values."""

    delimiter = "\t"


class _Decoded(Iterator[str]):
    """Lines as text; bytes that are not UTF-8 become surrogates, which their row then reports."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def __next__(self) -> str:
        return next(self._lines).decode(errors="surrogateescape")


LINE_FORMATS: Mapping[str, type[LineRows]] = {
    "jsonl": JsonRows,
    "csv": CsvRows,
    "tsv": TsvRows,
    "text": TextRows,
    "openai": JsonRows,
}

"""Rows of an input, format by format: JSON lines, CSV, plain text.

A row that cannot be read raises `InvalidLine`, and the next row can still be read. Generators
cannot do that, as they end with their first exception; so these are iterators.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from batchery.errors import DatasetError

#: Maximum length of a line in bytes (CSV: of a field in characters). A longer line fails alone, so
#: that a file without line ends does not fill the memory.
MAX_LINE_BYTES = 16 * 1024 * 1024

#: Delimiters of CSV that are recognised; the first is the usual one.
DELIMITERS = ",;\t|"

#: Part of a CSV's first rows that have as many columns as a header with an unusual delimiter.
ENOUGH_ROWS = 0.9

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

    #: Between the columns, where lines have them.
    delimiter = ","

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
        hint = "; name its encoding, such as --encoding latin-1" if is_default else ""
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
        except (RecursionError, ValueError) as error:
            raise InvalidLine(f"not JSON that can be read: {error}") from None
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
                raise InvalidLine(f"not CSV: {error}") from None
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

    Args:
        sample: The file's first bytes, with the header.
        encoding: Of the file.

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

"""Rows of files, format by format: JSON lines, CSV, plain text, Parquet and Arrow.

Each reader yields the line (of a table: the number) of a row, and the row. What is wrong with a row
takes its place, as an `InvalidLine`. A file that is damaged raises what its library does.
"""

import csv
import json
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

NOT_UTF_8 = "not UTF-8, into which iconv converts other encodings"

#: Number of rows that are converted to Python objects at a time, and their bytes, if several.
READ_ROWS = 1024
READ_BYTES = 64 << 20

#: First bytes of an Arrow file; an Arrow stream has others.
ARROW_MAGIC = b"ARROW1"


class InvalidLine(ValueError):
    """A row cannot be used; the text says why."""


def split_lines(stream: BinaryIO) -> Iterator[bytes | InvalidLine]:
    """The lines of a byte stream, with their line ends; one that is too long fails alone."""
    mark = BYTE_ORDER_MARK
    while line := stream.readline(MAX_LINE_BYTES + 1):
        if len(line) <= MAX_LINE_BYTES:
            yield line.removeprefix(mark)
        else:
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES + 1)
            yield InvalidLine(f"longer than {MAX_LINE_BYTES} bytes")
        mark = b""


def read_text(lines: Iterable[bytes | InvalidLine]) -> Iterator[tuple[int, str | InvalidLine]]:
    """Each line is a row, without its line end; blank lines are none."""
    for number, line in enumerate(lines, 1):
        if isinstance(line, InvalidLine):
            yield number, line
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield number, InvalidLine(f"{NOT_UTF_8}: {error.reason} at byte {error.start}")
        else:
            if text.strip():
                yield number, text.rstrip("\r\n")


def read_json(
    lines: Iterable[bytes | InvalidLine],
) -> Iterator[tuple[int, Mapping[str, Any] | str | InvalidLine]]:
    """Each line is a JSON object, or a string, which is the item."""
    for number, text in read_text(lines):
        yield number, text if isinstance(text, InvalidLine) else _parse(text)


def _parse(text: str) -> Mapping[str, Any] | str | InvalidLine:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return InvalidLine(f"not JSON: {error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:  # Too deep, or a number with too many digits.
        return InvalidLine(f"not JSON that can be read: {str(error).partition(';')[0]}")
    if isinstance(row, dict | str):
        return row
    hint = "; jq -c '.[]' makes lines of a list" if isinstance(row, list) else ""
    kind = type(row).__name__
    return InvalidLine(f"a JSON {kind}; expected an object with a field, or a string{hint}")


def read_csv(
    lines: Iterable[bytes | InvalidLine], delimiter: str = ","
) -> Iterator[tuple[int, Mapping[str, str] | InvalidLine]]:
    """Values with a delimiter between them, RFC 4180; the first row names the columns.

    Raises:
        DatasetError: The header cannot be read, or names a column twice.
    """
    count = 0

    def decode(line: bytes | InvalidLine) -> str:
        nonlocal count
        count += 1
        if isinstance(line, InvalidLine):
            raise line
        # Wrongly encoded bytes become surrogates, which their row then reports.
        return line.decode(errors="surrogateescape")

    # The default, 128 KiB, is less than a long document. The setting is the process's.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_LINE_BYTES))
    # A map goes on after an error; a generator would not.
    reader = csv.reader(map(decode, lines), delimiter=delimiter, strict=True)
    columns, number = list[str](), 1
    while True:
        try:
            if (values := next(reader, None)) is None:
                return
            "".join(values).encode()
            if values and not columns:
                columns = _read_header(values)
            elif len(values) == len(columns):
                yield number, dict(zip(columns, values, strict=True))
            elif values:
                wrong = f"{len(values)} columns; the header has {len(columns)}"
                yield number, InvalidLine(wrong)
        except (InvalidLine, UnicodeError, csv.Error) as error:
            invalid = _explain_csv(error)
            if not columns:
                raise DatasetError(f"the CSV header in line {number}: {invalid}") from None
            yield number, invalid
        number = count + 1


def _read_header(values: Sequence[str]) -> list[str]:
    columns = [name.strip() for name in values]
    if len(set(columns)) < len(columns):
        raise DatasetError(f"the CSV header names a column twice: {', '.join(columns)}")
    return columns


def _explain_csv(error: Exception) -> InvalidLine:
    if isinstance(error, InvalidLine):
        return error
    if isinstance(error, UnicodeError):
        return InvalidLine(NOT_UTF_8)
    is_old = str(error).startswith("new-line character")
    why = "old Mac line ends; make them line feeds: tr '\\r' '\\n'" if is_old else error
    return InvalidLine(f"not CSV: {why}")


def find_delimiter(sample: bytes) -> str:
    """Finds the delimiter of a CSV: the one that divides the header into the most columns."""
    header = sample.removeprefix(BYTE_ORDER_MARK).decode(errors="replace").splitlines()[:1]
    return max(DELIMITERS, key=lambda each: len(next(csv.reader(header, delimiter=each), ())))


def read_table(file: BufferedReader, format_: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a Parquet file, an Arrow file or an Arrow stream, as column name to value.

    Raises:
        DatasetError: pyarrow is not installed.
    """
    number = 0
    for batch in _open_table(file, format_):
        fitting = READ_BYTES * batch.num_rows // max(batch.nbytes, 1)
        count = max(min(fitting, READ_ROWS), 1)
        for start in range(0, batch.num_rows, count):
            part = batch.slice(start, count)
            # pyarrow believes the offsets in a file, and would read beyond its end.
            part.validate(full=True)
            for row in _convert(part):
                number += 1
                yield number, row


def _open_table(file: BufferedReader, format_: str) -> Iterable[Any]:
    """Record batches of a table, which may hold any number of rows."""
    if format_ == "parquet":
        batches: Iterable[Any] = extra("pyarrow.parquet").ParquetFile(file).iter_batches(READ_ROWS)
        return batches
    ipc = extra("pyarrow.ipc")
    if not file.peek(len(ARROW_MAGIC)).startswith(ARROW_MAGIC):
        stream: Iterable[Any] = ipc.open_stream(file)
        return stream
    table = ipc.open_file(file)
    return map(table.get_batch, range(table.num_record_batches))


def _convert(batch: Any) -> Sequence[Mapping[str, Any]]:
    """Rows of a batch; times that Python lacks, such as nanoseconds, are texts or numbers.

    A column that Python cannot have at all is left out.
    """
    arrow: Any = extra("pyarrow")
    errors = (arrow.ArrowException, ValueError, OverflowError, LookupError)
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for type_ in (None, arrow.string(), arrow.int64()):
            with suppress(*errors):
                # pyarrow may crash where a part of a column is cast to its own type.
                columns[name] = (column.cast(type_) if type_ else column).to_pylist()
                break
    return [{name: columns[name][n] for name in columns} for n in range(batch.num_rows)]

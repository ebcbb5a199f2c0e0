"""Datasets: a file or standard input, read as records of which each becomes one job."""

import gzip
import os
import zlib
from collections.abc import Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, cast

from batchery.errors import DatasetError
from batchery_producer.records import Broken, Picker, Record, SeenIds
from batchery_producer.rows import EXTENSIONS, FORMATS, InvalidLine, Lines, Rows

#: Names standard input, and standard output.
STANDARD_STREAM = "-"

GZIP_MAGIC = b"\x1f\x8b"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class Dataset:
    """Records of a file or of standard input; iterate over it once.

    Iterating reads as it goes and holds one row at a time. Input that is gzip is recognised by its
    first bytes, whatever it is called.

    Attributes:
        name: For messages.
        path: Where it is; `-` for standard input.
        is_stdin: Whether it is standard input.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        format: str | None = None,  # noqa: A002 (what every tool calls it)
        field: str | None = None,
        id_field: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Checks that the input can be read, but reads nothing yet.

        Args:
            path: A file, or `-` for standard input.
            format: `jsonl`, `csv`, `tsv` or `text`; by default as the name ends, and JSON lines
                for standard input.
            field: Holds the item: a key (`meta.title` looks inside `meta`) or a column. By default
                `text`, or the only field that is a string.
            id_field: Holds the caller's id; by default `id` or `custom_id` if the first row has
                one, otherwise the line number is the id.
            limit: Read only so many rows.

        Raises:
            DatasetError: There is no such file, it cannot be read, or its format is unknown.
        """
        self.is_stdin = str(path) == STANDARD_STREAM
        self.path = Path(path)
        self.name = "standard input" if self.is_stdin else str(path)
        self._size_bytes = None if self.is_stdin else _size_of(self.path)
        self._read_bytes = self._read_rows = 0
        self._complete = False
        self._rows_class = FORMATS[_format_of(str(path), format)]
        self._field = field
        self._id_field = id_field
        self._limit = limit

    @property
    def total(self) -> int | None:
        """Rows in all: an estimate by bytes until all are read, None where there is no telling."""
        if self._complete:
            return self._read_rows
        if self._size_bytes is None or not self._read_bytes:
            return self._limit
        estimate = max(self._read_rows, self._read_rows * self._size_bytes // self._read_bytes)
        return estimate if self._limit is None else min(estimate, self._limit)

    def __iter__(self) -> Iterator[Record | Broken]:
        """Yields what every row became, in order.

        Raises:
            DatasetError: The input is empty, or not what it was said to be.
        """
        try:
            with self._open() as raw, SeenIds() as seen:
                records = self._records(raw, Picker(self._field, self._id_field, seen))
                yield from islice(records, self._limit)
        except OSError as error:
            raise DatasetError(f"{self.name}: cannot be read: {error}") from None
        self._complete = True
        if not self._read_rows:
            raise DatasetError(f"{self.name}: empty; there is nothing to submit")

    def _open(self) -> BufferedReader:
        # A stream of our own: a thread that still waits in sys.stdin's would crash the exit.
        return open(0 if self.is_stdin else self.path, "rb", closefd=not self.is_stdin)

    def _records(self, raw: BufferedReader, picker: Picker) -> Iterator[Record | Broken]:
        first = raw.peek(2)[:2]
        if first in UTF16_MARKS:
            raise DatasetError(f"{self.name}: UTF-16; convert it to UTF-8, with iconv for example")
        packed = first == GZIP_MAGIC
        lines = Lines(cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw)
        rows = self._rows_class(lines)
        while (record := self._next(rows, picker)) is not None:
            self._read_rows += 1
            self._read_bytes = raw.tell() if packed and self._size_bytes else lines.read_bytes
            yield record

    def _next(self, rows: Rows, picker: Picker) -> Record | Broken | None:
        try:
            return picker.pick(rows.number, row) if (row := next(rows, None)) is not None else None
        except DatasetError as error:
            raise DatasetError(f"{self.name}: {error}") from None
        except InvalidLine as error:
            return Broken(rows.number, rows.number, str(error))
        except (OSError, EOFError, zlib.error) as error:
            if rows.number <= 1:
                raise DatasetError(f"{self.name}: cannot be read: {error}") from None
            rows.end()
            return Broken(rows.number, rows.number, f"cannot be read from here on: {error}")


def _format_of(name: str, given: str | None) -> str:
    if given is not None:
        if given not in FORMATS:
            raise DatasetError(f"format {given!r}: unknown; there are {', '.join(FORMATS)}")
        return given
    if name == STANDARD_STREAM:
        return "jsonl"
    extension = Path(name.lower().removesuffix(".gz")).suffix
    if extension not in EXTENSIONS:
        raise DatasetError(
            f"{name}: {extension or 'no extension'} tells no format;"
            f" say which with --format: {', '.join(FORMATS)}"
        )
    return EXTENSIONS[extension]


def _size_of(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    if path.is_dir():
        raise DatasetError(f"{path}: a directory; name one file")
    if not os.access(path, os.R_OK):
        raise DatasetError(f"{path}: cannot be read: Permission denied")
    if not S_ISREG(status.st_mode):
        return None
    if status.st_size == 0:
        raise DatasetError(f"{path}: empty; there is nothing to submit")
    return status.st_size

"""Files of JSON lines: each line is written whole, and writing can resume after a crash."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

from batchery.errors import DatasetError
from batchery_producer.files.compression import compression_of_name, members
from batchery_producer.files.rows import MAX_LINE_BYTES

#: Lines in memory are written when they take this much, even without a flush, in bytes.
BUFFER_BYTES = 4 * 1024 * 1024


class TooLong(ValueError):
    """A line is longer than the maximum that can be read again; it was not added."""


class JsonLines:
    """A file of JSON lines; gzip or zstd if its name says so.

    Whole lines are written by `flush`, or when many have gathered. A compressed file gets a whole
    member each time, so the file of a killed process can be read to its last line.
    """

    def __init__(self, path: Path | None) -> None:
        """Prepares the file; `open` or the first `flush` with lines creates it.

        Args:
            path: Where to write; an existing file is overwritten. None is standard output.
        """
        self.path = path
        self.name = "standard output" if path is None else str(path)
        self._compression = None if path is None else compression_of_name(path)
        if self._compression is not None:
            self._compression.decompressor()  # Fails at once if its library is missing.
        self._file: FileIO | None = None
        self._is_regular = False
        self._lines = bytearray()

    def open(self) -> None:
        """Creates the file, or empties it.

        Raises:
            DatasetError: It cannot be written, or another process writes it.
        """
        with _naming_errors(self.name):
            self._open()
            self._cut(0)

    def resume(self) -> Iterator[Mapping[str, Any]]:
        """Yields the entries of the file; then truncates an incomplete end and appends after it.

        Raises:
            DatasetError: The file cannot be read or written, has another form, or another process
                writes it.
        """
        if self.path is None or not self.path.exists():
            return
        with _naming_errors(self.name):
            self._open()
        end = 0
        for entry, end in read_lines(self.path):  # noqa: B007 (the last one is used)
            yield entry
        with _naming_errors(self.name):
            self._cut(end)

    def _open(self) -> None:
        # Unbuffered, so that `close` does not retry what a full disk refused.
        # Append mode, so that writing after a truncation leaves no hole.
        name = 1 if self.path is None else os.fspath(self.path)
        self._file = FileIO(name, "ab", closefd=self.path is not None)
        is_file = S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._is_regular = is_file and self.path is not None
        if self._is_regular:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise BlockingIOError(0, "another process is writing it") from None

    def _cut(self, size_bytes: int) -> None:
        if self._is_regular and self._file is not None:
            self._file.truncate(size_bytes)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Adds a line, which the next `flush` writes at the latest; raises the same errors.

        Raises:
            TooLong: The line could not be read again.
        """
        line = encoded(entry)
        if len(line) >= MAX_LINE_BYTES:
            raise TooLong(f"{len(line):,} bytes as JSON; the maximum is {MAX_LINE_BYTES:,}")
        self._lines += line + b"\n"
        if len(self._lines) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands the added lines to the operating system.

        Raises:
            DatasetError: They cannot be written; the disk is full, for example. Lines of earlier
                flushes are whole, and the file has nothing of these.
        """
        if not self._lines:
            return
        if self._file is None:
            self.open()
        assert self._file is not None
        with _naming_errors(self.name):
            before = self._checked_size(self._file)
            try:
                self._write(self._file, self._compressed(self._lines))
            except OSError:
                if self._is_regular:
                    self._file.truncate(before)
                raise
        self._lines.clear()

    def _compressed(self, data: bytearray) -> bytes | bytearray:
        return self._compression.compress(data) if self._compression else data

    def _write(self, file: FileIO, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def _checked_size(self, file: FileIO) -> int:
        status = os.fstat(file.fileno())
        if self._is_regular and not status.st_nlink:
            # The system would accept the data and drop it when this process ends.
            raise FileNotFoundError(0, "the file was removed")
        return status.st_size

    def close(self) -> None:
        """Closes the file; lines that were not flushed are lost."""
        if self._file is not None:
            with suppress(OSError):  # `flush` has already said what was wrong.
                self._file.close()


def encoded(entry: Mapping[str, Any]) -> bytes:
    """An entry as JSON, without a line end."""
    try:
        # An id from a table may be of a type that JSON lacks, such as a date.
        return json.dumps(entry, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:  # JSON can spell a lone surrogate, UTF-8 cannot.
        return json.dumps(entry, default=str).encode()


def read_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Reads a file that `JsonLines` wrote, up to an incomplete end.

    Yields:
        Each entry, and the offset in the file at which its line (if compressed: its member) ends.

    Raises:
        DatasetError: It cannot be read, or a line before the last is no JSON object.
    """
    compression, number, broken = compression_of_name(path), 0, 0
    with _naming_errors(str(path), "read"), open(path, "rb") as file:
        lines = _ends(file) if compression is None else _ends_compressed(members(file, compression))
        for line, end in lines:
            number += 1
            entry = _entry(line)
            if broken:
                raise DatasetError(
                    f"{path}, line {broken}: not a line that was written by `batchery submit`;"
                    " name another output, or use --overwrite"
                )
            if entry is None:
                broken = number  # Tolerated at the end, where a power failure may tear a line.
            else:
                yield entry, end


def _entry(line: bytes) -> Mapping[str, Any] | None:
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _ends(file: Any) -> Iterator[tuple[bytes, int]]:
    end = 0
    for line in file:
        end += len(line)
        yield line, end


def _ends_compressed(parts: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    for data, end in parts:
        for line in data.splitlines(keepends=True):
            yield line, end


@contextmanager
def _naming_errors(name: str, what: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DatasetError(f"{name}: cannot be {what}: {error.strerror}") from None

"""JSON lines on disk: written whole, and taken up again after a crash."""

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
from batchery_producer.files.compression import members, packing_of_name
from batchery_producer.files.rows import MAX_LINE_BYTES

#: Lines in memory that are written without being asked for, in bytes.
BUFFER_BYTES = 4 * 1024 * 1024


class TooLong(ValueError):
    """A line would be longer than what can be read again; it was not added."""


class JsonLines:
    """A file of JSON lines; gzip or zstd if its name says so.

    Whole lines are written by `flush`, or when many have gathered. A packed file gets a whole
    member each time: what a killed process leaves behind can be read to its last line.
    """

    def __init__(self, path: Path | None) -> None:
        """Prepares the file; `open` or the first `flush` with lines creates it.

        Args:
            path: Where to write, over what is there; standard output if None.
        """
        self.path = path
        self.name = "standard output" if path is None else str(path)
        self._packing = None if path is None else packing_of_name(path)
        if self._packing is not None:
            self._packing.unpacker()  # Its library may be missing: better now than later.
        self._file: FileIO | None = None
        self._is_regular = False
        self._lines = bytearray()

    def open(self) -> None:
        """Creates the file, or empties it.

        Raises:
            DatasetError: It cannot be written, or another process writes it.
        """
        with _said(self.name):
            self._open()
            self._cut(0)

    def resume(self) -> Iterator[Mapping[str, Any]]:
        """Yields what the file says; then cuts off a torn end, and goes on behind it.

        Raises:
            DatasetError: It cannot be read or written, is not of this form, or another process
                writes it.
        """
        if self.path is None or not self.path.exists():
            return
        with _said(self.name):
            self._open()
        end = 0
        for entry, end in read_lines(self.path):  # noqa: B007 (the last one is used)
            yield entry
        with _said(self.name):
            self._cut(end)

    def _open(self) -> None:
        # Unbuffered: what a full disk has not taken must not be tried again by `close`.
        # Appended: what is cut off leaves no hole.
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
        """Adds a line, to be written by the next `flush` at the latest; raises as that does.

        Raises:
            TooLong: Nobody could read it again.
        """
        try:
            # An id may be of a type that only tables have: a date, for instance.
            line = json.dumps(entry, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:  # Half a surrogate pair: JSON can name it, UTF-8 cannot.
            line = json.dumps(entry, default=str).encode()
        if len(line) >= MAX_LINE_BYTES:
            raise TooLong(f"{len(line):,} bytes as JSON; at most {MAX_LINE_BYTES:,} fit in a line")
        self._lines += line + b"\n"
        if len(self._lines) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was added, through to the operating system.

        Raises:
            DatasetError: It cannot be written; the disk is full, for example. What was added before
                is whole, and nothing of the rest is in the file.
        """
        if not self._lines:
            return
        if self._file is None:
            self.open()
        assert self._file is not None
        with _said(self.name):
            before = self._checked_size(self._file)
            try:
                self._write(self._file, self._packed(self._lines))
            except OSError:
                if self._is_regular:
                    self._file.truncate(before)
                raise
        self._lines.clear()

    def _packed(self, data: bytearray) -> bytes | bytearray:
        return self._packing.pack(data) if self._packing else data

    def _write(self, file: FileIO, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def _checked_size(self, file: FileIO) -> int:
        status = os.fstat(file.fileno())
        if self._is_regular and not status.st_nlink:
            # The system would take it, and drop it when we end.
            raise FileNotFoundError(0, "somebody has removed it")
        return status.st_size

    def close(self) -> None:
        """Closes the file; lines that were not flushed are dropped."""
        if self._file is not None:
            with suppress(OSError):  # `flush` has already said what was wrong.
                self._file.close()


def read_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Reads what `JsonLines` has written, up to a torn end.

    Yields:
        Each entry, and where in the file the line ends; its member where the file is packed.

    Raises:
        DatasetError: It cannot be read, or a line in the middle is no JSON object.
    """
    packing, number, broken = packing_of_name(path), 0, 0
    with _said(str(path), "read"), open(path, "rb") as file:
        lines = _ends(file) if packing is None else _ends_packed(members(file, packing))
        for line, end in lines:
            number += 1
            entry = _entry(line)
            if broken:
                raise DatasetError(
                    f"{path}, line {broken}: not a line that was written by `batchery submit`;"
                    " name another output, or say --overwrite"
                )
            if entry is None:
                broken = number  # Tolerated at the end, where a machine may have lost its power.
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


def _ends_packed(parts: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    for data, end in parts:
        for line in data.splitlines(keepends=True):
            yield line, end


@contextmanager
def _said(name: str, what: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DatasetError(f"{name}: cannot be {what}: {error.strerror}") from None

"""Files of JSON lines: written so that the file of a killed process can be continued."""

import base64
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

from batchery.errors import DatasetError
from batchery_producer.files.rows import MAX_LINE_BYTES
from batchery_producer.files.source import naming_errors

#: Writes arrays; it is there where a worker or the gateway is installed, too.
orjson: Any = import_module("orjson") if find_spec("orjson") and find_spec("numpy") else None

#: Lines in memory are written when they take this much, even without a flush, in bytes.
BUFFER_BYTES = 4 * 1024 * 1024


class JsonLines:
    """A file of JSON lines. Whole lines are written by `flush`, or when many have gathered."""

    def __init__(self, path: Path | None) -> None:
        """Prepares the file; `open` or the first `flush` with lines creates it.

        Args:
            path: Where to write; an existing file is overwritten. None is standard output.
        """
        self.path = path
        self.name = "standard output" if path is None else str(path)
        self._file: FileIO | None = None
        self._is_regular = False
        self._lines = bytearray()

    def resume(self) -> Iterator[Mapping[str, Any]]:
        """Yields the entries of the file; then truncates an incomplete end and appends after it.

        Raises:
            DatasetError: As `open` does; or it has a line that was not written here.
        """
        if self.path is None or not self.path.exists():
            return
        self.open(is_resumed=True)
        end = 0
        for entry, end in read_lines(self.path):  # noqa: B007 (the last one is used)
            yield entry
        with naming_errors(self.name):
            os.truncate(self.path, end)

    def open(self, *, is_resumed: bool = False) -> None:
        """Creates the file, or empties it unless it is resumed.

        Raises:
            DatasetError: It cannot be written, or another process writes it.
        """
        with naming_errors(self.name):
            # Unbuffered, so that `close` does not retry what a full disk refused.
            # Append mode, so that writing after a truncation leaves no hole.
            self._file = FileIO(
                1 if self.path is None else os.fspath(self.path), "ab", self.path is not None
            )
            self._is_regular = bool(self.path) and S_ISREG(os.fstat(self._file.fileno()).st_mode)
            if not self._is_regular:
                return
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise BlockingIOError(0, "another process is writing it") from None
            except OSError:
                pass  # Some filesystems of clusters know no locks.
            if not is_resumed:
                self._file.truncate(0)

    def write(self, entry: Mapping[str, Any]) -> str:
        """Adds a line, which the next `flush` writes at the latest; raises the same errors.

        Returns:
            Why it was not added: it is longer than what can be read again; empty otherwise.
        """
        line = encoded(entry)
        if len(line) >= MAX_LINE_BYTES:
            return f"{len(line):,} bytes as JSON; the maximum is {MAX_LINE_BYTES:,}"
        self._lines += line + b"\n"
        if len(self._lines) >= BUFFER_BYTES:
            self.flush()
        return ""

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
        with naming_errors(self.name):
            status = os.fstat(self._file.fileno())
            if self._is_regular and not status.st_nlink:
                # The system would accept the data and drop it when this process ends.
                raise OSError(0, "the file was removed")
            rest = bytes(self._lines)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                if self._is_regular:
                    self._file.truncate(status.st_size)
                raise
        self._lines.clear()

    def close(self) -> None:
        """Closes the file; lines that were not flushed are lost."""
        if self._file is not None:
            with suppress(OSError):  # `flush` has already said what was wrong.
                self._file.close()


def encoded(entry: Mapping[str, Any]) -> bytes:
    """An entry as JSON, without a line end; what is no finite number is null."""
    result = entry.get("result")
    if isinstance(result, dict) and hasattr(result.get("vector"), "dtype"):
        with suppress(TypeError):  # A lone surrogate in an id, which it refuses.
            return bytes(orjson.dumps(entry, default=simplify, option=orjson.OPT_SERIALIZE_NUMPY))
    try:
        return _encode(entry).encode()
    except UnicodeEncodeError:  # JSON can escape a lone surrogate, UTF-8 cannot.
        return json.dumps(entry, default=simplify).encode()
    except ValueError:
        text = json.dumps(entry, default=simplify)
        return encoded(json.loads(text, parse_constant=lambda _: None))


def simplify(value: Any) -> Any:
    """A value of a type that JSON lacks: of an id from a table, or of a result."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    convert = getattr(value, "isoformat", getattr(value, "tolist", partial(str, value)))
    return convert()


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=simplify).encode


def read_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Reads a file that `JsonLines` wrote, up to an incomplete end.

    Yields:
        Each entry, and the offset in the file at which its line ends.

    Raises:
        DatasetError: It cannot be read, or a line before the last is no JSON object.
    """
    end = broken = 0
    with naming_errors(str(path), "read"), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            if broken:
                raise DatasetError(
                    f"{path}, line {broken}: not a line that was written by `batchery submit`;"
                    " name another output, or use --overwrite"
                )
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                entry = None
            if isinstance(entry, dict):
                yield entry, end
            else:
                broken = number  # Tolerated at the end, where a power failure may tear a line.

"""What a run leaves on disk, so that another process can finish it: lines, and a journal.

Each line of results is written whole. The output itself says which rows are done: each of its lines
names a line of the input. The journal adds what the output does not say: the input, the task, and
the ids of the jobs. An id follows from the run and the line. So another process finds the jobs that
the first one left in the queue, with a worker, or in the result backend.
"""

import base64
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any, Self

from batchery.errors import DatasetError
from batchery_producer.files.rows import MAX_LINE_BYTES
from batchery_producer.files.source import Source, compression_of_name, members

#: What is raised by reading a journal that is none.
ODD_JOURNAL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

#: Lines in memory are written when they take this much, even without a flush, in bytes.
BUFFER_BYTES = 4 * 1024 * 1024

#: Version of the file's form; other versions are refused.
VERSION = 1

#: Maximum number of files in a dataset and of lines in a file: task ids hold no larger numbers.
MAX_SOURCES = 1 << 24
MAX_LINES = 1 << 36


class TooLong(ValueError):
    """A line is longer than the maximum that can be read again; it was not added."""


class JsonLines:
    """A file of JSON lines; gzip or zstd if its name says so.

    Whole lines are written by `flush`, or when many have gathered. A compressed file gets a whole
    member each time, so the file of a killed process can be read to its last line.
    """

    def __init__(self, path: Path | None, *, is_private: bool = False) -> None:
        """Prepares the file; `open` or the first `flush` with lines creates it.

        Args:
            path: Where to write; an existing file is overwritten. None is standard output.
            is_private: Whether only the user may read it.
        """
        self._mode = 0o600 if is_private else 0o666
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

    def resume(self, *, is_ours: bool = True) -> Iterator[Mapping[str, Any]]:
        """Yields the entries of the file; then truncates an incomplete end and appends after it.

        Args:
            is_ours: Whether a run wrote the file; all else is left as it is.

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
        if is_ours:
            with _naming_errors(self.name):
                self._cut(end)

    def _open(self) -> None:
        # Unbuffered, so that `close` does not retry what a full disk refused.
        # Append mode, so that writing after a truncation leaves no hole.
        name = 1 if self.path is None else os.fspath(self.path)
        create = partial(os.open, mode=self._mode)
        self._file = FileIO(name, "ab", self.path is not None, create)
        is_file = S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._is_regular = is_file and self.path is not None
        if self._is_regular:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise BlockingIOError(0, "another process is writing it") from None
            except OSError:
                pass  # Some filesystems of clusters know no locks.

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
    """An entry as JSON, without a line end; what is no finite number is null."""
    try:
        text = json.dumps(entry, ensure_ascii=False, allow_nan=False, default=simplify)
        return text.encode()
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


def read_lines(path: Path, *, has_ends: bool = True) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Reads a file that `JsonLines` wrote, up to an incomplete end.

    Args:
        path: Of the file.
        has_ends: Whether a last line without a line end is incomplete; an editor may leave one.

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
            entry = _entry(line) if line.endswith(b"\n") or not has_ends else None
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
        entry = json.loads(line)
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


@dataclass(frozen=True, slots=True)
class Journal:
    """Identity of a run.

    Attributes:
        run: Random, 16 hexadecimal digits.
        task: Name of the task.
        settings: Other things that the results depend on: fields, keywords.
        files: Names of the input's files.
        fingerprints: Of the input's files.
        window: Maximum number of jobs that were ever in flight.
    """

    run: str
    task: str
    settings: Mapping[str, Any]
    files: Sequence[str]
    fingerprints: Sequence[str]
    window: int

    @classmethod
    def of(
        cls, sources: Sequence[Source], task: str, settings: Mapping[str, Any], window: int
    ) -> Self:
        """Begins a run.

        Raises:
            DatasetError: The input cannot be read, or has too many files.
        """
        if len(sources) > MAX_SOURCES:
            raise DatasetError(f"{len(sources):,} files; the maximum is {MAX_SOURCES:,}")
        names = [each.name for each in sources]
        prints = [each.fingerprint() for each in sources if each.size_bytes is not None]
        # As they are read again: JSON makes lists of tuples, and texts of times.
        stored = json.loads(encoded(settings))
        return cls(secrets.token_hex(8), task, stored, names, prints, window)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Reads the journal that another process wrote; None if there is none.

        Raises:
            DatasetError: The file cannot be read, or is of another version.
        """
        try:
            stored = json.loads(path.read_bytes())
            if stored.pop("v") != VERSION:
                raise ValueError("of another version of Batchery")
            return cls(**stored)
        except FileNotFoundError:
            return None
        except (OSError, *ODD_JOURNAL) as error:
            raise DatasetError(f"{path}: cannot be used to resume: {error}") from None

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            DatasetError: The file cannot be written.
        """
        new = path.with_name(f"{path.name}.new")
        try:
            new.write_text(json.dumps({"v": VERSION, **asdict(self)}) + "\n")
            os.replace(new, path)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            raise DatasetError(f"{path}: cannot be written: {error.strerror}") from None

    def continued_by(self, now: "Journal") -> "Journal":
        """The same run, resumed by another process, which was asked for the run `now`.

        Raises:
            DatasetError: Task, input or settings differ.
        """
        if now.task != self.task:
            raise DatasetError(_changed("task", self.task, now.task))
        for name, value in self.settings.items():
            if now.settings.get(name) != value:
                raise DatasetError(_changed(name, value, now.settings.get(name)))
        if len(now.files) != len(self.files):
            new = next((name for name in now.files if name not in self.files), "")
            what = f"number of files ({new} is new)" if new else "number of files"
            raise DatasetError(_changed(what, len(self.files), len(now.files)))
        changed = [
            name
            for name, before, after in zip(
                now.files, self.fingerprints, now.fingerprints, strict=True
            )
            if before != after
        ]
        if changed:
            raise DatasetError(
                f"{changed[0]}: has changed since the run began, so results would belong to"
                " other rows; --overwrite computes all of them anew"
            )
        return replace(self, window=max(self.window, now.window))

    def task_id(self, source: int, line: int) -> str:
        """Id of a line's job: a UUID of version 8 whose last digits are source and line."""
        run, place = self.run, f"{source:06x}"
        return (
            f"{run[:8]}-{run[8:12]}-8{place[:3]}-{'89ab'[int(run[12], 16) & 3]}{run[13:16]}"
            f"-{place[3:]}{line:09x}"
        )

    @property
    def pattern(self) -> "re.Pattern[bytes]":
        """Matches the ids of the run's jobs in messages and results."""
        first, second, _, fourth, _ = self.task_id(0, 0).split("-")
        return re.compile(f"{first}-{second}-8[0-9a-f]{{3}}-{fourth}-[0-9a-f]{{12}}".encode())


def _changed(what: str, before: Any, now: Any) -> str:
    return (
        f"{what}: {now!r} now, {before!r} when the run began; use the same again to resume,"
        " or --overwrite to begin anew"
    )


class FinishedLines:
    """Lines of the input that are finished, in one bit each.

    Attributes:
        succeeded: How many of them have a result.
        failed: How many of them have failed.
    """

    def __init__(self, files: Sequence[str]) -> None:
        """Starts with none.

        Args:
            files: Names of the input's files; if there are several, each output entry names one.
        """
        self.succeeded = self.failed = 0
        self._numbers = {name: number for number, name in enumerate(files)}
        self._bits = [bytearray() for _ in files]

    def __len__(self) -> int:
        return self.succeeded + self.failed

    def __contains__(self, place: tuple[int, int]) -> bool:
        source, line = place
        bits = self._bits[source]
        return line >> 3 < len(bits) and bool(bits[line >> 3] & 1 << (line & 7))

    def locate(self, entry: Mapping[str, Any]) -> tuple[int, int]:
        """The file, counted from 0, and the line that an entry belongs to; raises as `note`."""
        line = entry.get("line")
        source = self._numbers.get(entry["file"]) if "file" in entry else 0
        if source is None or type(line) is not int or not 0 <= line < MAX_LINES:
            raise DatasetError(f"id {entry.get('id')!r}: not a line that this run wrote")
        return source, line

    def note(self, entry: Mapping[str, Any]) -> bool:
        """Notes an entry of the output or the failures; True if it is the first of its row.

        Raises:
            DatasetError: The entry belongs to no line of the input.
        """
        source, line = self.locate(entry)
        if (source, line) in self:
            return False
        bits = self._bits[source]
        if line >> 3 >= len(bits):
            bits.extend(bytes((line >> 3) + 1 - len(bits)))
        bits[line >> 3] |= 1 << (line & 7)
        if "result" in entry:
            self.succeeded += 1
        else:
            self.failed += 1
        return True

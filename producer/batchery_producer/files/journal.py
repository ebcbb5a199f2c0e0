"""What identifies a run, so that another process can finish it.

The output itself says which rows are done: each of its lines names a row of the input. The journal
adds what the output does not say: the input, the task, and the ids of the jobs. An id follows from
the run and the row. So another process finds the jobs that the first one left in the queue, with a
worker, or in the result backend.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from batchery.errors import DatasetError
from batchery_producer.files.json_lines import encoded
from batchery_producer.files.source import Source, naming_errors

#: What is raised by reading a journal that is none.
ODD_JOURNAL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

#: Version of the file's form; other versions are refused.
VERSION = 3

#: Maximum number of files in a dataset and of rows in a file: task ids hold no larger numbers.
MAX_SOURCES = 1 << 24
MAX_ROWS = 1 << 36


@dataclass(frozen=True, slots=True)
class Journal:
    """Identity of a run.

    Attributes:
        run: Random, 16 hexadecimal digits.
        settings: What the results depend on: task, keywords, fields.
        files: Names of the input's files.
        versions: Of the input's files: texts that change with them.
    """

    run: str
    settings: Mapping[str, Any]
    files: Sequence[str]
    versions: Sequence[str]

    @classmethod
    def of(cls, sources: Sequence[Source], settings: Mapping[str, Any]) -> Self:
        """Begins a run.

        Raises:
            DatasetError: The input has too many files.
        """
        if len(sources) > MAX_SOURCES:
            raise DatasetError(f"{len(sources):,} files; the maximum is {MAX_SOURCES:,}")
        names = [each.name for each in sources]
        versions = [each.version for each in sources if each.size_bytes is not None]
        # As they are read again: JSON makes lists of tuples, and texts of times.
        stored = json.loads(encoded(settings))
        return cls(secrets.token_hex(8), stored, names, versions)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the journal that another process wrote.

        Raises:
            DatasetError: The file cannot be read, or is of another version.
        """
        try:
            stored = json.loads(path.read_bytes())
            if stored.pop("v") != VERSION:
                raise ValueError("of another version of Batchery")
            return cls(**stored)
        except (OSError, *ODD_JOURNAL) as error:
            raise DatasetError(f"{path}: cannot be used to resume: {error}") from None

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all.

        Raises:
            DatasetError: The file cannot be written.
        """
        new = path.with_name(f"{path.name}.new")
        try:
            with naming_errors(str(path)):
                new.write_text(json.dumps({"v": VERSION, **asdict(self)}) + "\n")
                os.replace(new, path)
        finally:
            with suppress(OSError):
                new.unlink()

    def check(self, now: "Journal") -> None:
        """Checks that another process, which was asked for the run `now`, can go on with this one.

        Raises:
            DatasetError: Input or settings differ.
        """
        files = ("number of files", len(self.files), len(now.files))
        given = [(name, value, now.settings.get(name)) for name, value in self.settings.items()]
        for name, before, after in (*given, files):
            if before != after:
                raise DatasetError(
                    f"{name}: {after!r} now, {before!r} when the run began; use the same again to"
                    " resume, or --overwrite to begin anew"
                )
        for file, before, after in zip(now.files, self.versions, now.versions, strict=True):
            if before != after:
                raise DatasetError(
                    f"{file}: has changed since the run began, so results would belong to other"
                    " rows; --overwrite computes all of them anew"
                )

    def task_id(self, source: int, row: int) -> str:
        """Id of a row's job: a UUID of version 8 whose last digits are source and row."""
        run, place = self.run, f"{source:06x}"
        return (
            f"{run[:8]}-{run[8:12]}-8{place[:3]}-{'89ab'[int(run[12], 16) & 3]}{run[13:16]}"
            f"-{place[3:]}{row:09x}"
        )

    @property
    def pattern(self) -> "re.Pattern[bytes]":
        """Matches the ids of the run's jobs in messages and results."""
        first, second, _, fourth, _ = self.task_id(0, 0).split("-")
        return re.compile(f"{first}-{second}-8[0-9a-f]{{3}}-{fourth}-[0-9a-f]{{12}}".encode())


class FinishedRows:
    """Rows of the input that are finished, in one bit each.

    Attributes:
        count: How many they are.
        failed: How many of them have failed.
    """

    def __init__(self, files: Sequence[str]) -> None:
        """Starts with none.

        Args:
            files: Names of the input's files; if there are several, each output entry names one.
        """
        self.count = self.failed = 0
        self._numbers = {name: number for number, name in enumerate(files)}
        self._bits = [bytearray() for _ in files]

    def __contains__(self, place: Any) -> bool:
        source, row = place
        bits = self._bits[source]
        return row >> 3 < len(bits) and bool(bits[row >> 3] & 1 << (row & 7))

    def note(self, entry: Mapping[str, Any], name: str | Path) -> tuple[int, int]:
        """Notes an entry of the output or the failures, whose name is for messages.

        Returns:
            The file, counted from 0, and the row that it belongs to.

        Raises:
            DatasetError: The entry belongs to no row of the input.
        """
        row = entry.get("row")
        source = self._numbers.get(entry["file"]) if "file" in entry else 0
        if source is None or type(row) is not int or not 0 <= row < MAX_ROWS:
            raise DatasetError(f"{name}: id {entry.get('id')!r}: is of another input")
        if (source, row) not in self:
            bits = self._bits[source]
            bits.extend(bytes(max((row >> 3) + 1 - len(bits), 0)))
            bits[row >> 3] |= 1 << (row & 7)
            self.count += 1
            self.failed += "error" in entry
        return source, row

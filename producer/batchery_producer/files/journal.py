"""The journal: identifies a run, in a file next to its output, until every row has a result.

The output itself says which rows are done: each of its lines names a line of the input. The journal
adds what the output does not say: the input, the task, and the ids of the jobs. An id follows from
the run and the line. So another process finds the jobs that the first one left in the queue, with a
worker, or in the result backend.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from batchery.errors import DatasetError
from batchery_producer.files.source import Source

#: Version of the file's form; other versions are refused.
VERSION = 1

#: Maximum number of files in a dataset and of lines in a file: task ids hold no larger numbers.
MAX_SOURCES = 1 << 24
MAX_LINES = 1 << 36


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
        return cls(secrets.token_hex(8), task, settings, names, prints, window)

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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
            raise DatasetError(_changed("number of files", len(self.files), len(now.files)))
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

    def note(self, entry: Mapping[str, Any]) -> bool:
        """Notes an entry of the output or the failures; True if it is the first of its row.

        Raises:
            DatasetError: The entry belongs to no line of the input.
        """
        line = entry.get("line")
        source = self._numbers.get(entry["file"]) if "file" in entry else 0
        if source is None or type(line) is not int or not 0 <= line < MAX_LINES:
            raise DatasetError(f"id {entry.get('id')!r}: not a line that this run wrote")
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

"""Selections: which rows of a dataset are submitted, where it is not all of them."""

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from batchery.errors import DatasetError
from batchery_producer.journal import Done
from batchery_producer.jsonlines import read_lines
from batchery_producer.records import Broken, Record, SeenIds

Row = Record | Broken

#: The same rows each time, so that a run can be resumed.
SEED = 0


def sampled(rows: Iterable[Row], numbers: Iterable[int]) -> Iterator[Row]:
    """The rows that have these numbers, from 0, which rise."""
    wanted = iter(numbers)
    next_number = next(wanted, None)
    for number, row in enumerate(rows):
        if next_number is None:
            return
        if number == next_number:
            next_number = next(wanted, None)
            yield row


def sample_of(rows: Iterable[Row], size: int) -> Sequence[int]:
    """Numbers of so many rows, from 0, each set of them as likely as another; in order."""
    chooser = random.Random(SEED)
    chosen = array("Q")
    for number, _ in enumerate(rows):
        if number < size:
            chosen.append(number)
        elif (place := chooser.randrange(number + 1)) < size:
            chosen[place] = number
    return array("Q", sorted(chosen))


class Failures:
    """The rows that a file of failures names; ours, or an error file of OpenAI's form."""

    def __init__(self, path: str | Path, names: Sequence[str]) -> None:
        """Checks that there is such a file.

        Args:
            path: Written by an earlier run of the same input.
            names: Of the input's files.

        Raises:
            DatasetError: There is none.
        """
        self.path = Path(path)
        self._names = names
        if not self.path.is_file():
            raise DatasetError(f"{path}: there is no such file of failures")

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Those of some rows that the file names.

        Raises:
            DatasetError: It is no file of failures, or of another input.
        """
        lines, count = Done(self._names), 0
        with SeenIds() as ids:
            for entry, _ in read_lines(self.path):
                count += 1
                self._note(entry, lines, ids)
            if not count:
                raise DatasetError(f"{self.path}: no failures; there is nothing to try again")
            for row in rows:
                if (row.source, row.line) in lines or ids.has(row.id):
                    yield row

    def _note(self, entry: Any, lines: Done, ids: SeenIds) -> None:
        if "custom_id" in entry:
            # A line that was no request has no id; it is one no better now.
            if entry["custom_id"] is not None:
                ids.first_place(entry["custom_id"], 0, 0)
            return
        if "error" not in entry:
            raise DatasetError(f"{self.path}: no file of failures, which has an error in each line")
        try:
            lines.note(entry)
        except DatasetError as error:
            raise DatasetError(f"{self.path}: {error}; is it of another input?") from None

"""Records: what a row of the input is to us, and which of its fields make it so."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from batchery.errors import DatasetError

#: Fields that hold the item or the caller's id, where none is named.
ITEM_FIELD = "text"
ID_FIELDS = ("id", "custom_id")

#: Stands for a field that is not there.
MISSING = object()


@dataclass(frozen=True, slots=True)
class Record:
    """What one job is made of.

    Attributes:
        line: Where it begins in the input, from 1.
        id: The caller's, of whatever type it was; or the line number, after the name of the file
            if there are several.
        item: The argument of the job.
        source: Number of the file that it is in, from 0.
        pack: How many items the item is a list of; 0 if it is one.
    """

    line: int
    id: Any
    item: Any
    source: int = 0
    pack: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that becomes no job.

    Attributes:
        line: Where it begins in the input, from 1.
        id: The caller's where it could be read, otherwise as a record has it.
        reason: What is wrong with it.
        source: Number of the file that it is in, from 0.
    """

    line: int
    id: Any
    reason: str
    source: int = 0


class SeenIds:
    """The ids met so far, in a temporary database on disk: memory stays as it is.

    To be used on one thread.
    """

    def __init__(self) -> None:
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.execute("PRAGMA journal_mode = OFF")
        self._base.execute(
            "CREATE TABLE seen (id TEXT PRIMARY KEY, source INTEGER, line INTEGER) WITHOUT ROWID"
        )
        self._base.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._base.close()

    def first_place(self, id_: Any, source: int, line: int) -> tuple[int, int]:
        """Remembers that a line has this id; returns the first one that had it, with its source."""
        key = json.dumps(id_, sort_keys=True, default=str)
        values = (key, source, line)
        if self._base.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", values).rowcount:
            return source, line
        found = self._base.execute("SELECT source, line FROM seen WHERE id = ?", (key,)).fetchone()
        return int(found[0]), int(found[1])

    def has(self, id_: Any) -> bool:
        """Whether it was remembered."""
        key = json.dumps(id_, sort_keys=True, default=str)
        return self._base.execute("SELECT 1 FROM seen WHERE id = ?", (key,)).fetchone() is not None


class Picker:
    """Picks item and id out of the rows of a source; the first settles which fields they are in."""

    def __init__(
        self,
        field: str | None,
        id_field: str | None,
        seen: SeenIds,
        source: int = 0,
        names: Sequence[str] = ("",),
    ) -> None:
        """Prepares for the first row.

        Args:
            field: Holds the item: a key, a path of keys with dots, or a column. By default `text`,
                or the only string.
            id_field: Holds the caller's id, and every row must have one. By default `id` or
                `custom_id` if the first row has it; rows without one have their line number.
            seen: Tells ids that were used before.
            source: Number of the source, from 0.
            names: Of all sources.
        """
        self._field = field
        self._id_field = id_field
        self._id_is_required = id_field is not None
        self._settled = False
        self._seen = seen
        self.source = source
        self._names = names

    def pick(self, line: int, row: Mapping[str, Any] | str) -> Record | Broken:
        """Makes a row into a record, or says why it is none.

        Raises:
            DatasetError: This is the first row, and nothing says which field is the item.
        """
        if isinstance(row, str):
            if self._field or self._id_is_required:
                return self.broken(line, "a bare string; it has no fields")
            return Record(line, self._own_id(line), row, self.source)
        self._settle(row)
        id_ = lookup(row, self._id_field) if self._id_field else MISSING
        if id_ is MISSING or id_ is None:
            if self._id_is_required:
                return self.broken(line, f"no id in field {self._id_field!r}; {_fields(row)}")
            id_ = self._own_id(line)
        elif used := self.used(id_, line):
            return Broken(line, id_, used, self.source)
        item = lookup(row, self._field or ITEM_FIELD)
        if item is MISSING:
            reason = f"no field {self._field!r}; {_fields(row)}"
            return Broken(line, id_, reason, self.source)
        return Record(line, id_, item, self.source)

    def broken(self, line: int, reason: str) -> Broken:
        """A line of which not even the id is known."""
        return Broken(line, self._own_id(line), reason, self.source)

    def _own_id(self, line: int) -> Any:
        return line if len(self._names) == 1 else f"{self._names[self.source]}:{line}"

    def used(self, id_: Any, line: int) -> str:
        """Says where the id was used before; where it was not, remembers it and says nothing."""
        place = self._seen.first_place(id_, self.source, line)
        if place == (self.source, line):
            return ""
        where = "" if place[0] == self.source else f"{self._names[place[0]]}, "
        return f"the id is already used in {where}line {place[1]}"

    def _settle(self, row: Mapping[str, Any]) -> None:
        if self._settled:
            return
        if self._id_field is None:
            self._id_field = next((name for name in ID_FIELDS if name in row), None)
        if self._field is None:
            self._field = choose_field(row, besides=self._id_field)
        self._settled = True


def choose_field(row: Mapping[str, Any], *, besides: str | None = None) -> str:
    """Says which field of a row is the item.

    Args:
        row: The first of the input.
        besides: The field that is the id, if any.

    Raises:
        DatasetError: There is no `text`, and not exactly one other string.
    """
    if ITEM_FIELD in row:
        return ITEM_FIELD
    texts = [name for name, value in row.items() if isinstance(value, str) and name != besides]
    if len(texts) == 1:
        return texts[0]
    raise DatasetError(
        f"no field {ITEM_FIELD!r} in the first row, and {len(texts) or 'no'} others that can be"
        f" the text; name one with --field: {_fields(row)}"
    )


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Finds a field by its name, or by a path with dots; answers with a marker if it is absent."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def _fields(row: Mapping[str, Any]) -> str:
    return f"fields: {', '.join(map(repr, row)) or 'none'}"

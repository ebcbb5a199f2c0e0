"""Records: what a row of the input is to us, and which of its fields make it so."""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from batchery.errors import DatasetError

#: Fields that hold the item or the caller's id, where none is named.
ITEM_FIELD = "text"
ID_FIELDS = ("id", "custom_id")

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Record:
    """What one job is made of.

    Attributes:
        line: Where it begins in the input, from 1.
        id: The caller's, of whatever type it was; or the line number.
        item: The argument of the job.
    """

    line: int
    id: Any
    item: Any


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that becomes no job.

    Attributes:
        line: Where it begins in the input, from 1.
        id: The caller's where it could be read, otherwise the line number.
        reason: What is wrong with it.
    """

    line: int
    id: Any
    reason: str


class SeenIds:
    """The ids met so far, in a temporary database on disk: memory stays as it is.

    To be used on one thread.
    """

    def __init__(self) -> None:
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.execute("PRAGMA journal_mode = OFF")
        self._base.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID")
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

    def first_line(self, id_: Any, line: int) -> int:
        """Remembers that a line has this id; returns the first line that had it."""
        key = json.dumps(id_, sort_keys=True)
        added = self._base.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, line))
        if added.rowcount:
            return line
        found = self._base.execute("SELECT line FROM seen WHERE id = ?", (key,)).fetchone()
        return int(found[0])


class Picker:
    """Picks item and id out of rows; the first row settles which fields they are in."""

    def __init__(self, field: str | None, id_field: str | None, seen: SeenIds) -> None:
        """Prepares for the first row.

        Args:
            field: Holds the item: a key, a path of keys with dots, or a column. By default `text`,
                or the only string.
            id_field: Holds the caller's id, and every row must have one. By default `id` or
                `custom_id` if the first row has it; rows without one have their line number.
            seen: Tells ids that were used before.
        """
        self._field = field
        self._id_field = id_field
        self._id_is_required = id_field is not None
        self._settled = False
        self._seen = seen

    def pick(self, line: int, row: Mapping[str, Any] | str) -> Record | Broken:
        """Makes a row into a record, or says why it is none.

        Raises:
            DatasetError: This is the first row, and nothing says which field is the item.
        """
        if isinstance(row, str):
            if self._field or self._id_is_required:
                return Broken(line, line, "a bare string; it has no fields")
            return Record(line, line, row)
        self._settle(row)
        id_ = lookup(row, self._id_field) if self._id_field else _MISSING
        if id_ is _MISSING or id_ is None:
            if self._id_is_required:
                return Broken(line, line, f"no id in field {self._id_field!r}; {_fields(row)}")
            id_ = line
        elif (first := self._seen.first_line(id_, line)) != line:
            return Broken(line, id_, f"the id is already used in line {first}")
        item = lookup(row, self._field or ITEM_FIELD)
        if item is _MISSING:
            return Broken(line, id_, f"no field {self._field!r}; {_fields(row)}")
        return Record(line, id_, item)

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
            return _MISSING
        value = value[name]
    return value


def _fields(row: Mapping[str, Any]) -> str:
    return f"fields: {', '.join(map(repr, row)) or 'none'}"

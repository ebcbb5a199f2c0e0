"""Records: rows of the input, reduced to an item and an id."""

import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from batchery.errors import DatasetError
from batchery_producer.files.journal import simplify

#: Default names of the fields that hold the item and the caller's id.
ITEM_FIELD = "text"
ID_FIELDS = ("id", "custom_id")

#: Marks a field that is absent.
MISSING = object()


@dataclass(frozen=True, slots=True)
class Record:
    """A row that becomes a job.

    Attributes:
        line: Line of the input at which the row begins, from 1.
        id: The caller's, of any type; or the line number, after the file's name if there are
            several files. None if other rows have ids and this one has not: a number might be
            another row's id.
        item: The argument of the job.
        source: Number of its file, from 0.
        item_count: Length of the list if the argument is a list of items; 0 if it is one item.
        form: How the caller wants the result, where each row may say so.
    """

    line: int
    id: Any
    item: Any
    source: int = 0
    item_count: int = 0
    form: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot become a job; `reason` says why.

    Its id is the caller's only if that could be read, and is no other row's. `lacks_field` says
    that it has not the field which the caller named. All else is as in a record.
    """

    line: int
    id: Any
    reason: str
    source: int = 0
    lacks_field: bool = False


class SeenIds:
    """The ids seen so far, in a temporary database on disk, so that memory does not grow.

    For use by one thread at a time. Each method raises `DatasetError` if the disk is full.
    """

    def __init__(self) -> None:
        self._base = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._execute("PRAGMA journal_mode = OFF")
        self._execute(
            "CREATE TABLE seen (id TEXT PRIMARY KEY, source INTEGER, line INTEGER) WITHOUT ROWID"
        )
        self._execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    def first_line(self, id_: Any, source: int, line: int) -> tuple[int, int]:
        """Remembers the id of a line; returns source and line that had this id first."""
        key = json.dumps(id_, sort_keys=True, default=simplify)
        inserted = self._execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", key, source, line)
        if inserted.rowcount:
            return source, line
        found = self._execute("SELECT source, line FROM seen WHERE id = ?", key).fetchone()
        return int(found[0]), int(found[1])

    def forget(self, id_: Any) -> bool:
        """Removes an id; returns whether it was remembered."""
        key = json.dumps(id_, sort_keys=True, default=simplify)
        return self._execute("DELETE FROM seen WHERE id = ?", key).rowcount > 0

    def count(self) -> tuple[int, str]:
        """How many ids are remembered, and one of them as JSON; empty if there is none."""
        found = self._execute("SELECT COUNT(*), IFNULL(MIN(id), '') FROM seen").fetchone()
        return int(found[0]), str(found[1])

    def _execute(self, command: str, *values: Any) -> sqlite3.Cursor:
        try:
            return self._base.execute(command, values)
        except sqlite3.Error as error:
            raise DatasetError(
                f"the ids cannot be kept in {find_temporary_folder()}: {error}; make room there, or"
                " name another folder in the environment variable SQLITE_TMPDIR"
            ) from error


def find_temporary_folder() -> str:
    """The folder in which SQLite keeps temporary databases: the first of those it looks for."""
    named = (os.environ.get(name, "") for name in ("SQLITE_TMPDIR", "TMPDIR"))
    folders = (*named, "/var/tmp", "/usr/tmp", "/tmp")
    return next((each for each in folders if os.access(each, os.W_OK | os.X_OK)), ".")


class Picker:
    """Picks item and id out of a source's rows; the first row determines the fields.

    Attributes:
        field: Holds the item; None until the first row determines it.
        id_field: Holds the id, likewise; None if the line number is the id.
    """

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
                `custom_id` if the first row has it; if it has none, the line number is the id.
            seen: Detects ids that were used before.
            source: Number of the source, from 0.
            names: Of all sources.
        """
        self.field = field
        self.id_field = id_field
        self._id_is_required = id_field is not None
        #: Whether a row with fields was seen.
        self.is_determined = False
        #: The last line whose number is its id.
        self._numbered_lines = 0
        self._seen = seen
        self.source = source
        self._names = names

    def pick(self, line: int, row: Mapping[str, Any] | str) -> Record | Broken:
        """Makes a record of a row, or says why that fails.

        Raises:
            DatasetError: This is the first row, and it is unclear which field is the item.
        """
        if isinstance(row, str):
            if self.field or self._id_is_required:
                return self._lacking(line, self._own_id(line), "a bare string; it has no fields")
            return Record(line, self._own_id(line), row, self.source)
        self._determine_fields(row)
        id_ = lookup(row, self.id_field) if self.id_field else MISSING
        if id_ is MISSING or id_ is None:
            if self._id_is_required:
                reason = f"no id in field {self.id_field!r}; {_fields(row)}"
                return self._lacking(line, self._own_id(line), reason)
            id_ = self._own_id(line)
        elif used := self.used(id_, line):
            return self.broken(line, used)  # The id is another row's.
        item = lookup(row, self.field or ITEM_FIELD)
        if item is MISSING:
            reason = f"no field {self.field!r}; {_fields(row)}"
            return self._lacking(line, id_, reason)
        return Record(line, id_, item, self.source)

    def broken(self, line: int, reason: str) -> Broken:
        """A broken line whose id is unknown."""
        return Broken(line, self._own_id(line), reason, self.source)

    def _lacking(self, line: int, id_: Any, reason: str) -> Broken:
        return Broken(line, id_, reason, self.source, lacks_field=True)

    def _own_id(self, line: int) -> Any:
        if self.id_field is not None:
            return None
        self._numbered_lines = line
        return line if len(self._names) == 1 else f"{self._names[self.source]}:{line}"

    def used(self, id_: Any, line: int) -> str:
        """Says where the id was used before; remembers a new id and returns an empty text."""
        if type(id_) is int and 0 < id_ <= self._numbered_lines and len(self._names) == 1:
            return f"the id {id_} is the number of an earlier line, which has no id"
        first_source, first_line = self._seen.first_line(id_, self.source, line)
        if (first_source, first_line) == (self.source, line):
            return ""
        where = "" if first_source == self.source else f"{self._names[first_source]}, "
        return f"the id {id_!r:.100} is already used in {where}line {first_line}"

    def _determine_fields(self, row: Mapping[str, Any]) -> None:
        if self.is_determined:
            return
        if self.id_field is None:
            self.id_field = next((name for name in ID_FIELDS if name in row), None)
        if self.field is None:
            self.field = choose_field(row, id_field=self.id_field)
        self.is_determined = True


def choose_field(row: Mapping[str, Any], *, id_field: str | None = None) -> str:
    """Determines which field of a row is the item.

    Args:
        row: The first of the input.
        id_field: The field that is the id, if any.

    Raises:
        DatasetError: There is no `text`, and not exactly one other string.
    """
    if ITEM_FIELD in row:
        return ITEM_FIELD
    texts = [name for name, value in row.items() if isinstance(value, str) and name != id_field]
    if len(texts) == 1:
        return texts[0]
    is_request = {"custom_id", "url", "body"} <= row.keys()
    hint = "; --format openai reads OpenAI's requests" if is_request else ""
    raise DatasetError(
        f"no field {ITEM_FIELD!r} in the first row, and {len(texts) or 'no'} others that can be"
        f" the text; name one with --field: {_fields(row)}{hint}"
    )


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Finds a field by its name, or by a path with dots; returns `MISSING` if it is absent."""
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

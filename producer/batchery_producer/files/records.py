"""Records: rows of the input, reduced to an item and an id."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from batchery.errors import DatasetError
from batchery.settings import nearest_name
from batchery_producer.files.json_lines import simplify

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
        id: The caller's, of any type; or, where rows have no ids, the number of the row, after the
            file's name if there are several files. None if only this row has none: a number might
            be another row's id.
        item: The argument of the job.
        source: Number of its file, from 0.
        item_count: Length of the list if the argument is a list of items; 0 if it is one item.
        form: How the caller wants the result, where each row may say so.
        row: Number of the row in its file, from 1; neither blank lines nor a header count.
    """

    line: int
    id: Any
    item: Any
    source: int = 0
    item_count: int = 0
    form: Mapping[str, Any] | None = None
    row: int = 0


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
    row: int = 0


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
                f"the ids cannot be kept in SQLite's temporary folder: {error}; make room there, or"
                " name another folder in the environment variable SQLITE_TMPDIR"
            ) from error


class Picker:
    """Picks item and id out of a source's rows; the first row with fields determines them.

    Attributes:
        field: Holds the item; None until it is determined.
        id_field: Holds the id, likewise; None if the number of the row is the id.
        unseen: Which of the fields that the caller names no row has had so far.
        row: Number of the last row, from 1.
        fields: Those of the first row that has some.
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
            id_field: Holds the caller's id. By default `id` or `custom_id` if the first row has it;
                if it has none, the number of the row is the id.
            seen: Detects ids that were used before.
            source: Number of the source, from 0.
            names: Of all sources.
        """
        self.field = field
        self.id_field = id_field
        self.unseen = {each for each in (field, id_field) if each is not None}
        self.row = 0
        self.fields: Sequence[str] = ()
        self._is_determined = False
        #: Whether a row could be read, so that it is known whether rows have ids.
        self._has_rows = False
        self._seen = seen
        self.source = source
        self._names = names

    def pick(self, line: int, row: Mapping[str, Any] | str) -> Record | Broken:
        """Makes a record of a row, or says why that fails.

        Raises:
            DatasetError: This is the first row, and it is unclear which field is the item.
        """
        if isinstance(row, str):
            if self.field:
                return self.broken(line, "a bare string; it has no fields", lacks_field=True)
            self._has_rows = True
            return self._record(line, self._own_id(), row)
        self._determine_fields(row)
        id_ = lookup(row, self.id_field) if self.id_field else None
        if id_ is None or id_ is MISSING or (isinstance(id_, str) and not id_.strip()):
            id_ = self._own_id()
        elif used := self.used(id_, line):
            return self.broken(line, used)  # The id is another row's.
        item = lookup(row, self.field or ITEM_FIELD)
        if item is MISSING:
            reason = (
                f"no field {self.field!r}{nearest_name(str(self.field), row)}; {name_fields(row)}"
            )
            return self.broken(line, reason, id_, lacks_field=True)
        return self._record(line, id_, item)

    def broken(
        self, line: int, reason: str, id_: Any = None, *, lacks_field: bool = False
    ) -> Broken:
        """A row that cannot become a job; without an id where that is unknown."""
        id_ = self._own_id() if id_ is None else id_
        return Broken(line, id_, reason, self.source, lacks_field, self.row)

    def used(self, id_: Any, line: int) -> str:
        """Says where the id was used before; remembers a new id and returns an empty text."""
        first_source, first_line = self._seen.first_line(id_, self.source, line)
        if (first_source, first_line) == (self.source, line):
            return ""
        where = "" if first_source == self.source else f"{self._names[first_source]}, "
        return f"the id {id_!r:.100} is already used in {where}line {first_line}"

    def _record(self, line: int, id_: Any, item: Any) -> Record:
        return Record(line, id_, item, self.source, row=self.row)

    def _own_id(self) -> Any:
        if self.id_field is not None or not self._has_rows:
            return None
        return self.row if len(self._names) == 1 else f"{self._names[self.source]}:{self.row}"

    def _determine_fields(self, row: Mapping[str, Any]) -> None:
        if self.unseen:
            self.unseen = {each for each in self.unseen if lookup(row, each) is MISSING}
        if self._is_determined:
            return
        self.fields = list(row)
        if self.id_field is None:
            self.id_field = next((name for name in ID_FIELDS if name in row), None)
        if self.field is None:
            self.field = choose_field(row, id_field=self.id_field)
        self._is_determined = self._has_rows = True


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
    hint = "; `batchery serve` takes OpenAI's batch files" if is_request else ""
    raise DatasetError(
        f"no field {ITEM_FIELD!r} in the first row, and {len(texts) or 'no'} others that can be"
        f" the text; name one with --field: {name_fields(row)}{hint}"
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


def name_fields(row: Mapping[str, Any]) -> str:
    """The fields of a row, for messages."""
    return f"fields: {', '.join(map(repr, row)) or 'none'}"

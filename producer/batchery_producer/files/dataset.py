"""Datasets: files or standard input, read as records, each with an item and an id.

A record becomes one job, or says why it cannot.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from batchery.errors import DatasetError
from batchery.media_settings import MediaSettings
from batchery.settings import nearest_name
from batchery_producer.files.options import SubmitOptions
from batchery_producer.files.rows import (
    InvalidLine,
    find_delimiter,
    read_csv,
    read_json,
    read_table,
    read_text,
    split_lines,
)
from batchery_producer.files.source import (
    FILES,
    Source,
    decompressed,
    find_sources,
    is_damage,
)

#: Formats of tables; their rows are no lines.
TABLES = ("parquet", "arrow")

#: Size of what is looked at to find the delimiter of a CSV, in bytes.
SAMPLE_BYTES = 8192

#: After how many rows the place in the file is looked at: each time is a call of the system.
MEASURE_ROWS = 64

#: Lines of such a file may be valid UTF-8, with zeros in them.
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

#: Number of rows of which one must be readable, and have the fields that the caller names: in JSON
#: lines, a field may be missing here and there.
FIRST_ROWS = 100

#: Default names of the fields that hold the item and the caller's id.
ITEM_FIELD = "text"
ID_FIELDS = ("id", "custom_id")

#: Marks a field that is absent.
MISSING = object()


class Record(NamedTuple):
    """A row of the input.

    Attributes:
        source: Number of its file, from 0.
        row: Number of the row in its file, from 1; neither blank lines nor a header count.
        line: Line of the input at which the row begins, from 1.
        id: The caller's, of any type; or, where rows have no ids, the number of the row, after the
            file's name if there are several files. None if only this row has none: a number might
            be another row's id.
        item: The argument of the job.
        broken: Why it cannot become a job; empty if it can.
        size_bytes: Of an item that is bytes; 0 for all others.
    """

    source: int
    row: int
    line: int
    id: Any
    item: Any = None
    broken: str = ""
    size_bytes: int = 0


class Picker:
    """Picks item and id out of a source's rows; the first row with fields determines them.

    Attributes:
        field: Holds the item; None until it is determined.
        id_field: Holds the id, likewise; None if the number of the row is the id.
        lacks_id_field: Whether the caller names one that no row has had so far.
        fields: Those of the first row that has some.
    """

    def __init__(self, options: SubmitOptions, source: int, names: Sequence[str]) -> None:
        """Prepares for the first row.

        Args:
            options: Which fields hold them, if the caller knows.
            source: Number of the source, from 0.
            names: Of all sources.
        """
        self.field, self.id_field = options.field, options.id_field
        self.lacks_id_field = self.id_field is not None
        self.fields: Sequence[str] = ()
        self._source, self._names = source, names
        #: Whether a row could be read, so that it is known whether rows have ids.
        self._has_rows = False

    def pick(self, number: int, line: int, row: Mapping[str, Any] | str | InvalidLine) -> Record:
        """Makes a record of the row with this number.

        Raises:
            DatasetError: This is the first row, and it is unclear which field is the item.
        """
        id_: Any = None
        item: Any = None
        broken = ""
        if isinstance(row, InvalidLine):
            broken = str(row)
        elif isinstance(row, str):
            item, self._has_rows = row, True
            broken = "a bare string; it has no fields" if self.field else ""
        else:
            if not self.fields:
                self._determine_fields(row)
            item = lookup(row, self.field or ITEM_FIELD)
            id_ = self._find_id(row)
            if item is MISSING:
                near = nearest_name(str(self.field), row)
                broken = f"no field {self.field!r}{near}; {name_fields(row)}"
        if id_ is None and self.id_field is None and self._has_rows:
            id_ = number if len(self._names) == 1 else f"{self._names[self._source]}:{number}"
        if is_media(item):
            # One that is not in the table has a path of its own.
            item = item["bytes"] or item["path"]
        size_bytes = len(item) if isinstance(item, bytes) else 0
        item = None if broken else item
        return Record(self._source, number, line, id_, item, broken, size_bytes)

    def _find_id(self, row: Mapping[str, Any]) -> Any:
        id_ = lookup(row, self.id_field) if self.id_field else None
        self.lacks_id_field = self.lacks_id_field and id_ is MISSING
        return None if id_ is MISSING or (isinstance(id_, str) and not id_.strip()) else id_

    def _determine_fields(self, row: Mapping[str, Any]) -> None:
        self.id_field = self.id_field or next((name for name in ID_FIELDS if name in row), None)
        self.field = self.field or choose_field(row, id_field=self.id_field)
        self.fields, self._has_rows = list(row), bool(row)


def choose_field(row: Mapping[str, Any], *, id_field: str | None = None) -> str:
    """Determines which field of a row is the item.

    Args:
        row: The first of the input.
        id_field: The field that is the id, if any.

    Raises:
        DatasetError: There is no `text`, and neither exactly one picture or sound nor exactly one
            other string.
    """
    if ITEM_FIELD in row:
        return ITEM_FIELD
    texts = [name for name, value in row.items() if isinstance(value, str) and name != id_field]
    found = [name for name, value in row.items() if is_media(value)] or texts
    if len(found) == 1:
        return found[0]
    is_request = {"custom_id", "url", "body"} <= row.keys()
    hint = "; `batchery serve` takes OpenAI's batch files" if is_request else ""
    raise DatasetError(
        f"no field {ITEM_FIELD!r} in the first row, and {len(found) or 'no'} others that can be"
        f" the item; name one with --field: {name_fields(row)}{hint}"
    )


def is_media(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is a picture or a sound, as the data sets of Hugging Face have them."""
    return isinstance(value, Mapping) and {"bytes", "path"} <= value.keys()


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


class Dataset:
    """Records of files or of standard input; each iteration reads them anew, one row at a time.

    Attributes:
        sources: The files, without empty ones.
        name: For messages.
        names: Of the files.
        is_stream: Whether it can be read only once: standard input or a pipe.
        max_bytes: Maximum bytes of an item that is bytes; a row with more is broken.
        done: Source and number of rows whose files need not be read.
    """

    def __init__(
        self,
        names: str | Path | Sequence[str | Path],
        options: SubmitOptions | None = None,
        **changes: Any,
    ) -> None:
        """Checks that the input can be read.

        Args:
            names: Files, URLs, patterns such as `data/*.jsonl`, or `-` for standard input.
            options: How to read them, and which rows.
            changes: Single options, which override those in `options`.

        Raises:
            DatasetError: A file is missing, cannot be read, or has an unknown format.
        """
        self._options = options = replace(options or SubmitOptions(), **changes)
        self.sources = find_sources(names, options.format)
        self.names = [each.name for each in self.sources]
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        self.name = self.names[0] + more
        self.is_stream = any(each.size_bytes is None for each in self.sources)
        self.max_bytes = MediaSettings().max_bytes
        self.done: Container[object] = ()
        self._before_bytes = self._read_rows = 0
        #: Numbers of rows and bytes that were read, now and then.
        self._measured = (0, 0)
        self._complete = False
        self._first: Picker | None = None
        self._found_delimiter = ""

    @property
    def inputs(self) -> Sequence[Path]:
        """Files on this machine that must not be overwritten."""
        return [each.path for each in self.sources if each.path]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine the item and the id of a row."""
        options = self._options
        return {
            "formats": sorted({each.format for each in self.sources}),
            "field": options.field,
            "id field": options.id_field,
        }

    @property
    def description(self) -> str:
        """How its rows are read, in one line; known once the first row was read."""
        first = self._first
        if self.sources[0].format == FILES:
            return f"{self.name}: each file is an item, the id is its path"
        if first is None or first.field is None:
            return f"{self.name}: each line is an item"
        id_ = repr(first.id_field) if first.id_field else "the number of the row"
        columns = f"; columns are divided by {found!r}" if (found := self._found_delimiter) else ""
        return f"{self.name}: the item is {first.field!r}, the id is {id_}{columns}"

    @property
    def total(self) -> int | None:
        """Number of rows; an estimate by bytes until all are read, None if unknown."""
        if self._complete:
            return self._read_rows
        rows, read_bytes = self._measured
        limits = [] if self._options.limit is None else [self._options.limit]
        if read_bytes and not self.is_stream:
            size_bytes = sum(each.size_bytes or 0 for each in self.sources)
            limits.append(max(rows * size_bytes // read_bytes, self._read_rows))
        return min(limits, default=None)

    def __iter__(self) -> Iterator[Record]:
        """Yields a record for each row, in order.

        Raises:
            DatasetError: The input is empty, or has another format than stated.
        """
        yield from islice(self._all(), self._options.limit)
        self._complete = True
        if not self._read_rows:
            raise DatasetError(f"{self.name}: empty; there is nothing to submit")

    def checked(self) -> Iterator[Record]:
        """As iteration, but a wrong field or format is noticed before the first row.

        Raises:
            DatasetError: The input is unusable, or none of the first rows can be read or has the
                fields, or a later file cannot be read at all.
        """
        for number, source in enumerate(self.sources[1:], 1):
            # A run would end at a bad file after hours.
            if self._options.limit is None and source.path and source.size_bytes is not None:
                next(self._read(source, number), None)
        self._first, self._found_delimiter = None, ""
        rows, first = iter(self), list[Record]()
        for row in islice(rows, FIRST_ROWS):
            first.append(row)
            if not (row.broken or (self._first and self._first.lacks_id_field)):
                break
        else:
            self._refuse(first)
        yield from chain(first, rows)

    def _refuse(self, rows: Sequence[Record]) -> None:
        """Raises why the first rows are unusable, if there are any."""
        if not rows:
            return
        why, field = rows[0].broken, self._options.id_field
        if field and self._first and not why:
            fields = ", ".join(map(repr, self._first.fields))
            why = f"no field {field!r}{nearest_name(field, self._first.fields)}; fields: {fields}"
        raise DatasetError(
            f"{self.line_name(rows[0])}: {why}; none of the first {len(rows)} rows can be used:"
            " check --format, --field, --id-field, and the header of a CSV"
        )

    def line_name(self, row: Record) -> str:
        """Names the line of a row in messages, or its file."""
        if self.sources[row.source].format == FILES:
            return f"{self.names[row.source]}: {row.id}"
        return f"{self.names[row.source]}, line {row.line}"

    def _all(self) -> Iterator[Record]:
        self._before_bytes = self._read_rows = 0
        for number, source in enumerate(self.sources):
            read = self._read_files if source.format == FILES else self._read
            yield from read(source, number)
            self._before_bytes += source.size_bytes or 0

    def _read(self, source: Source, number: int) -> Iterator[Record]:
        picker = Picker(self._options, number, self.names)
        self._first = self._first or picker
        count = line = 0
        with source.reading() as raw:
            try:
                for count, (line, row) in enumerate(self._open_rows(source, raw), 1):
                    self._read_rows += 1
                    if self._read_rows % MEASURE_ROWS == 0 and source.size_bytes is not None:
                        self._measured = self._read_rows, self._before_bytes + raw.tell()
                    yield picker.pick(count, line, row)
            except DatasetError as error:
                raise DatasetError(f"{source.name}: {error}") from None
            except Exception as error:
                if not is_damage(error, is_remote=source.remote is not None):
                    raise
                why = (str(error) or type(error).__name__).splitlines()[0]
                if not count:
                    raise DatasetError(f"{source.name}: cannot be read: {why}") from None
                self._read_rows += 1
                rest = InvalidLine(f"cannot be read from here on: {why}")
                yield picker.pick(count + 1, line + 1, rest)

    def _read_files(self, source: Source, number: int) -> Iterator[Record]:
        read_bytes = self._before_bytes
        for row, file in enumerate(source.files, 1):
            self._read_rows += 1
            read_bytes += file.size_bytes or 0
            self._measured = self._read_rows, read_bytes
            data, broken = b"", ""
            try:
                if (number, row) not in self.done:
                    with file.reading() as raw:
                        data = raw.read(self.max_bytes + 1)
            except DatasetError as error:
                broken = str(error)
            yield Record(number, row, row, file.name, data, broken, len(data))

    def _open_rows(self, source: Source, raw: BufferedReader) -> Iterator[tuple[int, Any]]:
        if raw.peek(2)[:2] in UTF16_MARKS:
            raise DatasetError("UTF-16; convert it to UTF-8, with iconv for example")
        if source.format in TABLES:
            return read_table(raw, source.format)
        stream: Any = decompressed(raw)
        lines = split_lines(stream)
        if source.format not in ("csv", "tsv"):
            return read_json(lines) if source.format == "jsonl" else read_text(lines)
        delimiter = find_delimiter(stream.peek(SAMPLE_BYTES)) if source.format == "csv" else "\t"
        self._found_delimiter = self._found_delimiter or delimiter
        return read_csv(lines, delimiter)

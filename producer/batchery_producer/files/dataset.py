"""Datasets: files or standard input, read as records; each record becomes one job."""

import codecs
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any

from batchery.errors import DatasetError
from batchery.retry import Interrupted
from batchery.settings import nearest_name
from batchery_producer.files.feed import HANDOVER_S, Feed
from batchery_producer.files.journal import FinishedRows
from batchery_producer.files.json_lines import read_lines
from batchery_producer.files.records import Broken, Picker, Record, SeenIds
from batchery_producer.files.rows import (
    CsvRows,
    InvalidLine,
    JsonRows,
    Lines,
    TableRows,
    TextRows,
    find_delimiter,
)
from batchery_producer.files.source import (
    Source,
    decompressed,
    decompression_errors,
    find_sources,
    is_damage,
    is_url,
)

Row = Record | Broken

#: Formats of tables; their rows are no lines.
TABLES = ("parquet", "arrow")

#: A fixed seed chooses the same rows each time, so that a run can be resumed.
SEED = 0

#: Size of what is looked at to find the delimiter of a CSV, in bytes.
SAMPLE_BYTES = 8192

#: After how many rows the place in the file is looked at: each time is a call of the system.
MEASURE_ROWS = 64

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

#: Number of rows of which one must have the fields that the caller names: in JSON lines, a field
#: may be missing here and there. If the first of them cannot be read, half must be readable.
FIRST_ROWS = 100


class Failures:
    """The rows that a file of failures names.

    A failure names its row by the id; one without an id, by the number of the row.

    Attributes:
        not_found: Which failures are of no row of the input; empty until all rows were read.
    """

    def __init__(self, path: str | Path, names: Sequence[str]) -> None:
        """Checks that the file exists; `names` are those of the input's files.

        Raises:
            DatasetError: It does not.
        """
        self.path = Path(path)
        self.not_found = ""
        self._rows = FinishedRows(names)
        if not self.path.is_file():
            raise DatasetError(f"{path}: there is no such file of failures")

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields the rows that the file names.

        Raises:
            DatasetError: The file has another form, or belongs to another input.
        """
        with SeenIds() as named:
            for entry, _ in read_lines(self.path, has_ends=False):
                named.first_line(self._find_key(entry), 0, 0)
            total, _ = named.count()
            if not total:
                raise DatasetError(f"{self.path}: no failures; there is nothing to try again")
            for row in rows:
                if named.forget({"id": row.id}) or named.forget({"row": [row.source, row.row]}):
                    yield row
            count, which = named.count()
        if count:
            self.not_found = (
                f"{self.path}: {count:,} of {total:,} failures are of no row of the input, such as"
                f" {which}; is it of another input?"
            )
        if count == total:
            raise DatasetError(self.not_found)

    def _find_key(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        if "error" not in entry:
            raise DatasetError(f"{self.path}: no file of failures, which has an error in each line")
        if entry.get("id") is not None:
            return {"id": entry["id"]}
        try:
            return {"row": self._rows.locate(entry)}
        except DatasetError as error:
            raise DatasetError(f"{self.path}: {error}; is it of another input?") from None


class Dataset:
    """Records of files or of standard input; each iteration reads them anew, one row at a time.

    Attributes:
        sources: The files, without empty ones.
        name: For messages.
        names: Of the files.
        is_stream: Whether it can be read only once: standard input or a pipe.
        is_retry: Whether only rows that failed are read.
    """

    def __init__(
        self,
        names: str | Path | Sequence[str | Path],
        *,
        format: str | None = None,  # noqa: A002 (what every tool calls it)
        field: str | None = None,
        id_field: str | None = None,
        delimiter: str | None = None,
        encoding: str = "utf-8",
        limit: int | None = None,
        sample: int | None = None,
        retry_failed: str | Path | None = None,
    ) -> None:
        """Checks that the input can be read.

        Args:
            names: Files, URLs, patterns such as `data/*.jsonl`, or `-` for standard input.
            format: One of `FORMATS`; by default as each name ends, and JSON lines for standard
                input.
            field: Holds the item: a key (`meta.title` looks inside `meta`) or a column. By default
                `text`, or the only field that is a string.
            id_field: Holds the caller's id; by default `id` or `custom_id` if the first row has
                one, otherwise the number of the row is the id.
            delimiter: Between the columns of CSV; by default what divides the header.
            encoding: Of lines and CSV; one in which a line feed is one byte.
            limit: Read only so many rows.
            sample: Read only so many rows, chosen at random, but the same ones each time. This
                reads the input twice.
            retry_failed: A file of failures of an earlier run; read only the rows that it names.

        Raises:
            DatasetError: A file is missing, cannot be read, or has an unknown format or
                encoding; or a stream was to be sampled, which can be read only once.
        """
        self.sources = find_sources(names, format)
        self.names = [each.name for each in self.sources]
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        self.name = self.names[0] + more
        self.is_stream = any(each.size_bytes is None for each in self.sources)
        given = [names] if isinstance(names, str | Path) else names
        self._patterns = [str(Path(each).absolute()) for each in given if not is_url(each)]
        self._field, self._id_field = field, id_field
        self._delimiter = checked_delimiter(delimiter)
        if delimiter and not any(each.format in ("csv", "tsv") for each in self.sources):
            raise DatasetError(f"{self.name}: is no CSV, so it has no delimiter; try --format csv")
        self._encoding = checked_encoding(encoding)
        self._limit, self._sample = limit, sample
        self._failures = Failures(retry_failed, self.names) if retry_failed else None
        self.is_retry = self._failures is not None
        if sample is not None and self.is_stream:
            raise DatasetError(f"{self.name}: cannot be sampled, as it can be read only once")
        self._before_bytes = self._read_rows = 0
        #: Numbers of rows and bytes that were read, now and then.
        self._measured = (0, 0)
        self._complete = False
        self._first: Picker | None = None
        self._found_delimiter = ""

    @property
    def inputs(self) -> Sequence[Path]:
        """Files on this machine that must not be overwritten."""
        paths = [each.path for each in self.sources if each.path is not None]
        return [*paths, self._failures.path] if self._failures else paths

    def would_read(self, path: Path) -> bool:
        """Whether another run with the same names would read a file, once it is there."""
        return any(path.absolute().match(each) for each in self._patterns)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine the item and the id of a row, and which rows a sample has."""
        return {
            "formats": sorted({each.format for each in self.sources}),
            "field": self._field,
            "id field": self._id_field,
            "delimiter": self._delimiter,
            "encoding": self._encoding,
            "sample": self._sample and f"{self._sample} of {self._limit or 'all'} rows",
        }

    @property
    def not_found(self) -> str:
        """Which failures to retry are of no row; empty if none is, or not all rows were read."""
        return self._failures.not_found if self._failures else ""

    @property
    def description(self) -> str:
        """How its rows are read, in one line; known once the first row was read."""
        first = self._first
        if first is None or first.field is None:
            return f"{self.name}: each line is an item"
        id_ = repr(first.id_field) if first.id_field else "the number of the row"
        columns = f"; columns are divided by {found!r}" if (found := self._found_delimiter) else ""
        return f"{self.name}: the item is {first.field!r}, the id is {id_}{columns}"

    @property
    def total(self) -> int | None:
        """Number of rows; an estimate by bytes until all are read, None if unknown."""
        if self._failures is not None:
            return None
        if self._complete:
            return self._read_rows
        rows, read_bytes = self._measured
        limits = [each for each in (self._limit, self._sample) if each is not None]
        if read_bytes and not self.is_stream:
            size_bytes = sum(each.size_bytes or 0 for each in self.sources)
            limits.append(max(rows * size_bytes // read_bytes, self._read_rows))
        return min(limits, default=None)

    @property
    def unseen(self) -> Iterable[str]:
        """Which of the fields that the caller names no row has had so far."""
        return sorted(self._first.unseen) if self._first else ()

    @property
    def fields(self) -> Sequence[str]:
        """The fields of the first row that has some."""
        return self._first.fields if self._first else ()

    def __iter__(self) -> Iterator[Row]:
        """Yields a record, or a broken row, for each row, in order.

        Raises:
            DatasetError: The input is empty, or has another format than stated.
        """
        chosen: set[int] | None = None
        if self._sample is not None:
            with SeenIds() as seen:
                chosen = _choose(islice(self._all(seen), self._limit), self._sample)
        with SeenIds() as seen:
            rows: Iterator[Row] = islice(self._all(seen), self._limit)
            if chosen is not None:
                rows = (row for number, row in enumerate(rows) if number in chosen)
            if self._failures is not None:
                rows = self._failures.of(rows)
            yield from rows
        if chosen is not None:
            self._read_rows = len(chosen)
        self._complete = True
        if not self._read_rows:
            raise DatasetError(f"{self.name}: empty; there is nothing to submit")

    def check_files(self) -> None:
        """Reads the first row of each file here, as a run would end at a bad one after hours.

        Raises:
            DatasetError: As iteration does.
        """
        with SeenIds() as seen:
            for number, source in enumerate(self.sources[1:] if self._limit is None else (), 1):
                if source.path is not None and source.size_bytes is not None:
                    next(self._rows_in(source, number, seen), None)
        self._first, self._found_delimiter = None, ""

    def line_name(self, source: int, line: int) -> str:
        """Names a line in messages."""
        return f"{self.names[source]}, line {line}"

    def _all(self, seen: SeenIds) -> Iterator[Row]:
        self._before_bytes = self._read_rows = 0
        for number, source in enumerate(self.sources):
            yield from self._rows_in(source, number, seen)
            self._before_bytes += source.size_bytes or 0

    def _rows_in(self, source: Source, number: int, seen: SeenIds) -> Iterator[Row]:
        picker = Picker(self._field, self._id_field, seen, number, self.names)
        self._first = self._first or picker
        with source.reading() as raw:
            try:
                for row in _pick_all(self._open_rows(source, raw), picker, source):
                    self._read_rows += 1
                    if self._read_rows % MEASURE_ROWS == 0 and source.size_bytes is not None:
                        self._measured = self._read_rows, self._before_bytes + raw.tell()
                    yield row
            except DatasetError as error:
                raise DatasetError(f"{source.name}: {error}") from None

    def _open_rows(self, source: Source, raw: BufferedReader) -> TableRows | TextRows:
        if raw.peek(2)[:2] in UTF16_MARKS:
            raise DatasetError("UTF-16; convert it to UTF-8, with iconv for example")
        if source.format == "parquet" and source.size_bytes is None:
            raise DatasetError("a pipe cannot be Parquet, whose index is at its end")
        if source.format in TABLES:
            return TableRows(raw, source.format)
        stream: Any = decompressed(raw)
        if source.format not in ("csv", "tsv"):
            rows = JsonRows if source.format == "jsonl" else TextRows
            return rows(Lines(stream), self._encoding)
        delimiter = self._delimiter or ("\t" if source.format == "tsv" else None)
        if delimiter is None:
            try:
                delimiter = find_delimiter(stream.peek(SAMPLE_BYTES), self._encoding)
            except decompression_errors():
                delimiter = ","  # Reading fails again, and says where.
        self._found_delimiter = self._found_delimiter or delimiter
        return CsvRows(Lines(stream), self._encoding, delimiter)


def _pick_all(rows: TableRows | TextRows, picker: Picker, source: Source) -> Iterator[Row]:
    """All rows of a file; the first damage of its bytes is the last row."""
    damage: Exception | None = None
    while damage is None:
        picker.row += 1
        try:
            if (row := next(rows, None)) is None:
                return
            yield picker.pick(rows.number, row)
        except InvalidLine as error:
            yield picker.broken(rows.number, str(error))
        except decompression_errors() as error:
            if not is_damage(error, is_remote=source.remote is not None):
                raise  # What follows may be read by another run.
            damage = error
    if picker.row == 1:
        raise DatasetError(f"cannot be read: {damage}")
    yield picker.broken(rows.number, f"cannot be read from here on: {damage}")


def _choose(rows: Iterable[Row], size: int) -> set[int]:
    """Chooses rows at random, each set with equal probability; their numbers from 0."""
    chooser, chosen = random.Random(SEED), list[int]()
    for number, _ in enumerate(rows):
        if number < size:
            chosen.append(number)
        elif (replaced := chooser.randrange(number + 1)) < size:
            chosen[replaced] = number
    return set(chosen)


def checked_delimiter(delimiter: str | None) -> str | None:
    r"""The delimiter of CSV that a caller means; a shell hands over a tab as `\t`.

    Raises:
        DatasetError: It is not one character.
    """
    delimiter = "\t" if delimiter == "\\t" else delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise DatasetError(f"delimiter {delimiter!r}: must be one character, such as ';' or '\\t'")
    return delimiter


def checked_encoding(encoding: str) -> str:
    """The usual name of an encoding.

    Raises:
        DatasetError: Python does not know it, or lines cannot be found in it.
    """
    try:
        if b"\n".decode(encoding) == "\n":
            return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        pass
    raise DatasetError(
        f"encoding {encoding!r}: unknown, or not read line by line; latin-1, cp1252, gb18030 and"
        " most others are. Convert UTF-16 to UTF-8, with iconv for example"
    )


def begin_reading(dataset: Dataset, stop: Callable[[], bool]) -> Iterator[Row]:
    """Reads the first rows, so that a wrong field, format or encoding is noticed early.

    Returns:
        All rows, with those that were read.

    Raises:
        Interrupted: `stop` returned True.
        DatasetError: The input is unusable, or none of the first rows has the fields, or most of
            them cannot be read.
    """
    dataset.check_files()
    rows, first = iter(dataset), list[Row]()
    with closing(Feed(_until_usable(dataset, rows), FIRST_ROWS)) as feed:
        while not feed.exhausted:
            if stop():
                raise Interrupted("asked to stop")
            first += feed.take(FIRST_ROWS, HANDOVER_S)
    broken = [each for each in first if isinstance(each, Broken) and not each.lacks_field]
    if len(broken) > len(first) / 2 and not dataset.is_retry:
        raise DatasetError(
            f"{dataset.line_name(broken[0].source, broken[0].line)}: {broken[0].reason}; of the"
            f" first {len(first)} rows, {len(broken)} cannot be read:"
            " check --format, --encoding and --delimiter"
        )
    for field in dataset.unseen:
        raise DatasetError(
            f"{dataset.name}: no field {field!r}{nearest_name(field, dataset.fields)}; so far no"
            f" row of {len(first)} has it: name another with --field or --id-field;"
            f" there are {', '.join(map(repr, dataset.fields)) or 'none'}"
        )
    return chain(first, rows)


def _until_usable(dataset: Dataset, rows: Iterator[Row]) -> Iterator[Row]:
    is_unreadable = False
    for row in islice(rows, FIRST_ROWS):
        yield row
        is_unreadable |= isinstance(row, Broken) and not row.lacks_field
        if isinstance(row, Record) and not is_unreadable and not dataset.unseen:
            return

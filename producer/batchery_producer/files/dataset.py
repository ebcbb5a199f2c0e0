"""Datasets: files or standard input, read as records; each record becomes one job.

A thread may read ahead, so that a slow input delays neither results nor Ctrl-C.
"""

import codecs
import queue
import random
import threading
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from batchery.errors import DatasetError
from batchery.retry import Interrupted
from batchery_producer.files.journal import FinishedLines, read_lines
from batchery_producer.files.openai_batch import RequestPicker, is_request
from batchery_producer.files.records import Broken, Picker, Record, SeenIds
from batchery_producer.files.rows import (
    DELIMITERS,
    LINE_FORMATS,
    TABLES,
    InvalidLine,
    Lines,
    Rows,
    TableRows,
    find_delimiter,
)
from batchery_producer.files.source import (
    MAGIC_BYTES,
    Source,
    decompressed,
    decompression_errors,
    find_sources,
    is_damage,
    matches_pattern,
)

Row = Record | Broken

#: A fixed seed chooses the same rows each time, so that a run can be resumed.
SEED = 0

#: Size of what is looked at to find the delimiter of a CSV, in bytes.
SAMPLE_BYTES = 8192

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

T = TypeVar("T")

#: How long the reader waits for space in its queue at a time, in seconds; it notices `close` that
#: late.
HANDOVER_S = 0.2

#: Number of rows of which one must have the fields that the caller names: in JSON lines, a field
#: may be missing here and there. If the first of them cannot be read, half must be readable.
FIRST_ROWS = 100


def sampled(rows: Iterable[Row], numbers: Iterable[int]) -> Iterator[Row]:
    """The rows with these numbers, which count from 0 and ascend."""
    rest = iter(numbers)
    next_number = next(rest, None)
    for number, row in enumerate(rows):
        if next_number is None:
            return
        if number == next_number:
            next_number = next(rest, None)
            yield row


def choose_sample(rows: Iterable[Row], size: int) -> Sequence[int]:
    """Chooses rows at random, each set with equal probability; their numbers from 0, ascending."""
    chooser = random.Random(SEED)
    chosen = array("Q")
    for number, _ in enumerate(rows):
        if number < size:
            chosen.append(number)
        elif (replaced := chooser.randrange(number + 1)) < size:
            chosen[replaced] = number
    return array("Q", sorted(chosen))


class Failures:
    """The rows that a file of failures names, in our form or in that of OpenAI's error files.

    A failure names its row by the id; one without an id, by the line.

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
        self._lines = FinishedLines(names)
        if not self.path.is_file():
            raise DatasetError(f"{path}: there is no such file of failures")

    def of(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields the rows that the file names.

        Raises:
            DatasetError: The file has another form, or belongs to another input.
        """
        with SeenIds() as ids, SeenIds() as places:
            for entry, _ in read_lines(self.path, has_ends=False):
                self._note(entry, ids, places)
            total = ids.count()[0] + places.count()[0]
            if not total:
                raise DatasetError(f"{self.path}: no failures; there is nothing to try again")
            for row in rows:
                if ids.forget(row.id) or places.forget((row.source, row.line)):
                    yield row
            (more_ids, id_), (more_places, place) = ids.count(), places.count()
        if count := more_ids + more_places:
            which = f"id {id_}" if more_ids else f"file and line {place}"
            self.not_found = (
                f"{self.path}: {count:,} of {total:,} failures are of no row of the input, such as"
                f" {which}; is it of another input?"
            )
        if count == total:
            raise DatasetError(self.not_found)

    def _note(self, entry: Any, ids: SeenIds, places: SeenIds) -> None:
        """Remembers the id of a failure or, without one, file and line."""
        response = entry.get("response")
        is_answer = isinstance(response, Mapping) and response.get("status_code") == 200
        if is_answer or ("custom_id" not in entry and "error" not in entry):
            raise DatasetError(f"{self.path}: no file of failures, which has an error in each line")
        id_, place = entry.get("custom_id", entry.get("id")), entry.get("id")
        if "custom_id" not in entry:
            try:
                place = self._lines.locate(entry)
            except DatasetError as error:
                raise DatasetError(f"{self.path}: {error}; is it of another input?") from None
        if id_ is None:
            places.first_line(place, 0, 0)
        else:
            ids.first_line(id_, 0, 0)


class Dataset:
    """Records of files or of standard input; each iteration reads them anew.

    Iteration holds one row at a time. gzip and zstd are recognised by the first bytes, whatever the
    file's name is.

    Attributes:
        sources: The files, without empty ones.
        name: For messages.
        names: Of the files.
        is_stream: Whether it can be read only once: standard input, a pipe, a file of unknown size.
        is_retry: Whether only rows that failed are read.
        is_openai: Whether the rows are requests of OpenAI's batch API.
        model: Model of those requests; None until one was read.
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
        """Checks that the input can be read; looks at the first row of JSON lines in a file.

        Args:
            names: Files, URLs, patterns such as `data/*.jsonl`, or `-` for standard input.
            format: One of `FORMATS`; by default as each name ends, and JSON lines for standard
                input.
            field: Holds the item: a key (`meta.title` looks inside `meta`) or a column. By default
                `text`, or the only field that is a string.
            id_field: Holds the caller's id; by default `id` or `custom_id` if the first row has
                one, otherwise the line number is the id.
            delimiter: Between the columns of CSV; by default what divides header and first rows.
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
        self._given_names = names
        self.is_stream = any(each.size_bytes is None for each in self.sources)
        self.name = self.sources[0].name
        if len(self.sources) > 1:
            self.name = f"{self.name} and {len(self.sources) - 1} more"
        self.names = [each.name for each in self.sources]
        sizes = [each.size_bytes for each in self.sources]
        self._size_bytes = None if None in sizes else sum(size for size in sizes if size)
        self._before_bytes = self._read_bytes = self._read_rows = 0
        self._complete = False
        self._field = field
        self._id_field = id_field
        self._delimiter = checked_delimiter(delimiter)
        if delimiter and not any(each.format in ("csv", "tsv") for each in self.sources):
            raise DatasetError(f"{self.name}: is no CSV, so it has no delimiter; try --format csv")
        self._encoding = checked_encoding(encoding)
        self._first: tuple[Picker, str | None] | None = None
        self._limit = limit
        self._sample = self._sampled = sample
        self._failures = Failures(retry_failed, self.names) if retry_failed else None
        self.is_retry = self._failures is not None
        if sample is not None and self.is_stream:
            raise DatasetError(f"{self.name}: cannot be sampled, as it can be read only once")
        self.model: str | None = None
        #: Whether the name of a model is no alias; of OpenAI's requests alone.
        self.is_own_name: Callable[[str], bool] = lambda _: True
        self.is_openai = format == "openai"
        if format in (None, "openai") and not (field or id_field or self.is_stream):
            self._detect_requests()

    @property
    def inputs(self) -> Sequence[Path]:
        """Files on this machine that must not be overwritten."""
        paths = [each.path for each in self.sources if not (each.is_stdin or each.remote)]
        return [*paths, self._failures.path] if self._failures else paths

    def would_read(self, path: Path) -> bool:
        """Whether another run with the same names would read a file, once it is there."""
        return matches_pattern(path, self._given_names)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine the item and the id of a row, and which rows a sample has."""
        formats = {"openai"} if self.is_openai else {each.format for each in self.sources}
        return {
            "formats": sorted(formats),
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
        if self.is_openai or self._first is None:
            return f"{self.name}: requests for {self.model!r}"
        picker, delimiter = self._first
        if not picker.is_determined:
            return f"{self.name}: each line is an item"
        id_ = repr(picker.id_field) if picker.id_field else "the line number"
        columns = f"; columns are divided by {delimiter!r}" if delimiter else ""
        return f"{self.name}: the item is {picker.field!r}, the id is {id_}{columns}"

    @property
    def total(self) -> int | None:
        """Number of rows; an estimate by bytes until all are read, None if unknown."""
        if self._sample is not None:
            return self._sampled
        if self._failures is not None:
            return None
        if self._complete:
            return self._read_rows
        read_bytes = self._before_bytes + self._read_bytes
        if self._size_bytes is None or not read_bytes:
            return self._limit
        estimate = max(self._read_rows, self._read_rows * self._size_bytes // read_bytes)
        return estimate if self._limit is None else min(estimate, self._limit)

    def __iter__(self) -> Iterator[Record | Broken]:
        """Yields a record, or a broken row, for each row, in order.

        Raises:
            DatasetError: The input is empty, or has another format than stated.
        """
        self._before_bytes = self._read_bytes = self._read_rows = 0
        numbers: Sequence[int] = ()
        if self._sample is not None:
            with SeenIds() as seen:
                numbers = choose_sample(islice(self._all(seen), self._limit), self._sample)
            self._sampled = len(numbers)
            self._before_bytes = self._read_bytes = self._read_rows = 0
        with SeenIds() as seen:
            rows: Iterator[Record | Broken] = islice(self._all(seen), self._limit)
            if self._sample is not None:
                rows = sampled(rows, numbers)
            if self._failures is not None:
                rows = self._failures.of(rows)
            yield from rows
        self._complete = True
        if not self._read_rows:
            raise DatasetError(f"{self.name}: empty; there is nothing to submit")

    def check_files(self) -> None:
        """Reads the first row of each file here, as a run would end at a bad one after hours.

        Raises:
            DatasetError: As iteration does.
        """
        if self.is_openai or self._limit is not None:
            return
        with SeenIds() as seen:
            for number, source in enumerate(self.sources[1:], 1):
                if source.remote is None and source.size_bytes is not None:
                    next(self._rows_in(source, self._picker(number, seen)), None)
        self._first = None

    def line_name(self, source: int, line: int) -> str:
        """Names a line in messages."""
        return f"{self.names[source]}, line {line}"

    def _detect_requests(self) -> None:
        """Detects whether the first row that can be read is a request, and the model."""
        source = self.sources[0]
        if source.format not in ("jsonl", "openai"):
            return
        with suppress(*decompression_errors()), source.open() as raw:
            rows = LINE_FORMATS["jsonl"](Lines(decompressed(raw, source.name)))
            for _ in range(FIRST_ROWS):
                with suppress(InvalidLine):
                    if is_request(row := next(rows, None)):
                        self.is_openai = True
                        self._settle(str(row["body"].get("model") or ""))
                    if self.model or not self.is_openai or row is None:
                        return

    def _settle(self, model: str) -> str:
        self.model = self.model or model
        return self.model

    def _picker(self, number: int, seen: SeenIds) -> Picker:
        if self.is_openai:
            requests = RequestPicker(None, "custom_id", seen, number, self.names)
            requests.settle = self._settle
            requests.is_own_name = self.is_own_name
            return requests
        return Picker(self._field, self._id_field, seen, number, self.names)

    def _all(self, seen: SeenIds) -> Iterator[Record | Broken]:
        for number, source in enumerate(self.sources):
            yield from self._rows_in(source, self._picker(number, seen))
            self._before_bytes += source.size_bytes or 0
            self._read_bytes = 0

    def _rows_in(self, source: Source, picker: Picker) -> Iterator[Record | Broken]:
        remote = source.remote
        try:
            with remote.reaching(source.name) if remote else nullcontext(), source.open() as raw:
                yield from self._records(source, raw, picker)
        except OSError as error:
            raise DatasetError(f"{source.name}: cannot be read: {error}") from None

    def _records(
        self, source: Source, raw: BufferedReader, picker: Picker
    ) -> Iterator[Record | Broken]:
        first = raw.peek(MAGIC_BYTES)[:MAGIC_BYTES]
        if first.startswith(UTF16_MARKS):
            raise DatasetError(
                f"{source.name}: UTF-16; convert it to UTF-8, with iconv for example"
            )
        rows: Rows
        read_bytes: Callable[[], int]
        delimiter = None
        if source.format in TABLES:
            rows = table = self._table(source, raw)
            read_bytes = partial(table.read_bytes, source.size_bytes or 0)
        else:
            stream = decompressed(raw, source.name)
            lines = Lines(stream)
            delimiter = self._delimiter
            if source.format == "csv" and delimiter is None:
                delimiter = self._find_delimiter(source, stream)
            rows = LINE_FORMATS[source.format](lines, self._encoding, delimiter)
            is_compressed = stream is not raw and source.size_bytes is not None
            read_bytes = raw.tell if is_compressed else lambda: lines.read_bytes
        self._first = self._first or (picker, delimiter)
        while (record := _next(source, rows, picker)) is not None:
            self._read_rows += 1
            self._read_bytes = read_bytes()
            yield record

    def _find_delimiter(self, source: Source, stream: Any) -> str:
        try:
            return find_delimiter(stream.peek(SAMPLE_BYTES), self._encoding)
        except decompression_errors():
            return DELIMITERS[0]  # Reading fails again, and says where.
        except DatasetError as error:
            raise DatasetError(f"{source.name}: {error}") from None

    def _table(self, source: Source, raw: BufferedReader) -> TableRows:
        if source.is_stdin and source.format == "parquet":
            raise DatasetError("standard input cannot be Parquet, whose index is at its end")
        try:
            return TABLES[source.format](raw)
        except DatasetError as error:
            raise DatasetError(f"{source.name}: {error}") from None


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


def _next(source: Source, rows: Rows, picker: Picker) -> Record | Broken | None:
    try:
        return picker.pick(rows.number, row) if (row := next(rows, None)) is not None else None
    except DatasetError as error:
        raise DatasetError(f"{source.name}: {error}") from None
    except InvalidLine as error:
        return picker.broken(rows.number, str(error))
    except decompression_errors() as error:
        if not is_damage(error, is_remote=source.remote is not None):
            raise  # What follows may be read by another run.
        if rows.number <= 1:
            raise DatasetError(f"{source.name}: cannot be read: {error}") from None
        rows.end()
        return picker.broken(rows.number, f"cannot be read from here on: {error}")


class Feed(Generic[T]):
    """Iterates on a thread of its own, up to a fixed number of entries ahead."""

    def __init__(self, entries: Iterable[T], ahead: int) -> None:
        """Starts to read; up to `ahead` entries, at least 1, wait to be taken."""
        self._queue: queue.Queue[T] = queue.Queue(ahead)
        self._closed = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        # A daemon, because a thread that waits for a pipe cannot be woken.
        threading.Thread(
            target=self._read, args=(entries,), name="batchery-feed", daemon=True
        ).start()

    def take(self, maximum: int, wait_s: float = 0) -> list[T]:
        """Takes the entries that are there.

        Args:
            maximum: Maximum number of entries to return, at least 1.
            wait_s: How long to wait for the first one, in seconds.

        Returns:
            The entries, which may be none: see `exhausted`.

        Raises:
            Exception: The error of the iteration, once all entries before it were taken.
        """
        entries: list[T] = []
        try:
            entries.append(
                self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get(False)
            )
            while len(entries) < maximum:
                entries.append(self._queue.get(block=False))
        except queue.Empty:
            if self._error is not None and not entries and self._drained:
                raise self._error from None
        return entries

    @property
    def exhausted(self) -> bool:
        """Whether all entries were taken, and neither entries nor an error will follow."""
        return self._drained and self._error is None

    @property
    def _drained(self) -> bool:
        return self._ended.is_set() and self._queue.empty()

    def close(self) -> None:
        """Lets the thread end; entries that were read ahead are lost."""
        self._closed = True

    def _read(self, entries: Iterable[T]) -> None:
        try:
            for entry in entries:
                if not self._hand_over(entry):
                    break
            if isinstance(entries, Generator):
                # Closed here, because what the generator has open belongs to this thread.
                entries.close()
        except BaseException as error:  # noqa: BLE001 (raised again where it is taken)
            self._error = error
        finally:
            self._ended.set()

    def _hand_over(self, entry: T) -> bool:
        while not self._closed:
            try:
                self._queue.put(entry, timeout=HANDOVER_S)
            except queue.Full:
                continue
            return True
        return False


def begin_reading(dataset: Dataset, stop: Callable[[], bool]) -> Iterator[Record | Broken]:
    """Reads the first rows, so that a wrong field, format or encoding is noticed early.

    Returns:
        All rows, with those that were read.

    Raises:
        Interrupted: `stop` returned True.
        DatasetError: The input is unusable, or none of the first rows has the fields, or most of
            them cannot be read.
    """
    dataset.check_files()
    rows, first = iter(dataset), list[Record | Broken]()
    with closing(Feed(_until_usable(rows), FIRST_ROWS)) as feed:
        while not feed.exhausted:
            if stop():
                raise Interrupted("asked to stop")
            first += feed.take(FIRST_ROWS, HANDOVER_S)
    row = first[-1] if first else None
    is_usable = any(isinstance(each, Record) for each in first)
    if isinstance(row, Broken) and row.lacks_field and not is_usable:
        raise DatasetError(
            f"{dataset.line_name(row.source, row.line)}: {row.reason};"
            f" so far no row of {len(first)} has it: name another with --field or --id-field"
        )
    broken = [each for each in first if isinstance(each, Broken) and not each.lacks_field]
    if len(broken) > len(first) / 2 and not (dataset.is_openai or dataset.is_retry):
        raise DatasetError(
            f"{dataset.line_name(broken[0].source, broken[0].line)}: {broken[0].reason}; of the"
            f" first {len(first)} rows, {len(broken)} cannot be read:"
            " check --format, --encoding and --delimiter"
        )
    return chain(first, rows)


def _until_usable(rows: Iterator[Record | Broken]) -> Iterator[Record | Broken]:
    is_unreadable = False
    for row in islice(rows, FIRST_ROWS):
        yield row
        is_unreadable |= isinstance(row, Broken) and not row.lacks_field
        if isinstance(row, Record) and not is_unreadable:
            return

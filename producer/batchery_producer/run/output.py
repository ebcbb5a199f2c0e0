"""The files of a run: results, failures and a journal; and the final form of an output.

An output may be sorted, a table, or at a URL. Then it cannot be written line by line: results are
gathered in a file of JSON lines, the part. When every row is done, the output is written from the
part, which is kept until the output is complete. So whatever is at a URL is complete.
"""

import csv
import io
import json
import os
import secrets
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import (
    FinishedLines,
    Journal,
    JsonLines,
    TooLong,
    encoded,
    read_lines,
)
from batchery_producer.files.openai_batch import OpenAIFormat
from batchery_producer.files.records import Broken, Record, SeenIds
from batchery_producer.files.rows import write_arrow, write_parquet
from batchery_producer.files.source import (
    EXTENSIONS,
    READ_ONLY,
    STANDARD_STREAM,
    Remote,
    bare_name,
    compression_of_name,
    extra,
    is_url,
)

Entry = Mapping[str, Any]
Entries = Callable[[], Iterable[Entry]]

#: The part's name is that of the output with this suffix.
PART_SUFFIX = ".part"

#: Formats of tables, by the extension of the output. All other outputs are JSON lines.
TABLES = ("csv", "tsv", "parquet", "arrow")

#: Extensions of outputs, and of failures.
OF_LINES = [name for name, format_ in EXTENSIONS.items() if format_ == "jsonl"]
OF_RESULTS = [*OF_LINES, *(name for name, format_ in EXTENSIONS.items() if format_ in TABLES)]

#: The journal's name is that of the output with this suffix.
JOURNAL_SUFFIX = ".journal"

#: Maximum length of a failure's message, where the whole one does not fit into a line.
MAX_MESSAGE_CHARS = 10_000


class Final:
    """Final form of an output."""

    def __init__(
        self,
        path: Path | None,
        *,
        url: str | None = None,
        ordered: bool = False,
        converted: bool = False,
    ) -> None:
        """Determines format and compression by the name.

        Args:
            path: Path of the output; None is standard output or a URL.
            url: URL of the output, if it has one.
            ordered: Whether its lines are in the order of the input.
            converted: Whether entries are converted to another form.

        Raises:
            DatasetError: The format cannot be compressed or has no place for such entries, or a
                library is missing.
        """
        self.path = path
        self.url = url
        self.name = url or ("standard output" if path is None else str(path))
        self._remote = Remote.at(url) if url else None
        place = Path(url) if url else path
        self._format = "jsonl" if place is None else _choose_format(place)
        self._compression = None if place is None else compression_of_name(place)
        self._ordered = ordered
        self._converted = converted
        if self._compression is not None:
            self._compression.decompressor()  # Fails at once if its library is missing.
        if converted and self._format != "jsonl":
            raise DatasetError(f"{place}: answers in OpenAI's form are JSON lines; name it .jsonl")
        if self._format in ("parquet", "arrow"):
            extra("pyarrow")
        if self._compression is not None and self._format in ("parquet", "arrow"):
            raise DatasetError(
                f"{place}: {self._format} is compressed in itself; name it without suffix"
            )
        if place is not None and place.suffix.lower() in READ_ONLY:
            raise DatasetError(f"{place}: cannot be written in this form; name it .gz or .zst")

    @property
    def needs_part(self) -> bool:
        """Whether results cannot be written to the output as they come."""
        return self._format != "jsonl" or self._ordered or self._converted or bool(self._remote)

    @property
    def is_there(self) -> bool:
        """Whether there is a file at the URL."""
        if self._remote is None:
            return False
        with self._remote.reaching(self.name):
            return bool(self._remote.filesystem.exists(self._remote.path))

    def part(self) -> Path:
        """Path of the part; a temporary file for standard output and URLs."""
        if self.path is not None:
            return self.path.with_name(self.path.name + PART_SUFFIX)
        return Path(tempfile.gettempdir(), f"batchery-{secrets.token_hex(8)}.jsonl")

    def write(
        self, part: Path, files: Sequence[str], convert: Callable[[Entry], Entry] | None = None
    ) -> None:
        """Writes the output from its part.

        Raises:
            DatasetError: The output cannot be written.
        """
        new = None if self.path is None else self.path.with_name(f"{self.path.name}.new")
        # Closing a file at a URL would put there what it has so far, after an error as well.
        whole = self._remote.filesystem.transaction if self._remote else nullcontext()
        try:
            with whole, self._open(new) as file:
                self._write(part, files, convert, file)
            if new is not None and self.path is not None:
                os.replace(new, self.path)
        except Exception as error:  # Arrow and filesystems have errors of their own.
            if new is not None:
                with suppress(OSError):
                    new.unlink()
            raise DatasetError(
                f"{self.name}: cannot be written: {getattr(error, 'strerror', None) or error};"
                f" the results are in {part}"
            ) from error

    def _open(self, new: Path | None) -> BinaryIO:
        if self._remote is not None:
            return cast(BinaryIO, self._remote.filesystem.open(self._remote.path, "wb"))
        return open(1 if new is None else new, "wb", closefd=new is not None)

    def _write(
        self,
        part: Path,
        files: Sequence[str],
        convert: Callable[[Entry], Entry] | None,
        file: BinaryIO,
    ) -> None:
        def entries() -> Iterator[Entry]:
            found = _sorted(part, files) if self._ordered else (each for each, _ in _all(part))
            return map(convert, found) if convert else iter(found)

        if self._format == "parquet":
            write_parquet(entries, file)
        elif self._format == "arrow":
            write_arrow(entries, file)
        else:
            target = self._compression.create(file) if self._compression else file
            if self._format == "jsonl":
                for entry in entries():
                    target.write(encoded(entry) + b"\n")
            else:
                _write_csv(entries, target, "," if self._format == "csv" else "\t")
            if target is not file:
                target.close()


def check_extension(name: str, known: Sequence[str]) -> None:
    """Checks that a file name ends in one of these extensions, or in none, before a compression's.

    Raises:
        DatasetError: It does not, so it would hold something else than its name says.
    """
    extension = Path(bare_name(name.lower())).suffix
    if extension and extension not in known:
        raise DatasetError(f"{name}: cannot be written as {extension}, but as {', '.join(known)}")


def _choose_format(path: Path) -> str:
    format_ = EXTENSIONS.get(Path(bare_name(path.name.lower())).suffix)
    return format_ if format_ in TABLES else "jsonl"


def _all(part: Path) -> Iterator[tuple[Entry, int]]:
    return read_lines(part) if part.exists() else iter(())


def _sorted(part: Path, files: Sequence[str]) -> Iterator[Entry]:
    """Entries in the order of the input; memory holds the offset of each line, eight bytes."""
    numbers = {name: number for number, name in enumerate(files)}
    offsets = [array("Q") for _ in files]
    start = 0
    for entry, end in _all(part):
        of_file, line = offsets[numbers.get(entry.get("file", ""), 0)], entry["line"]
        if line >= len(of_file):
            of_file.extend(array("Q", bytes(8 * (line + 1 - len(of_file)))))
        of_file[line] = start + 1  # 0 means that the line has no entry.
        start = end
    with open(part, "rb") as file:
        for of_file in offsets:
            for offset in filter(None, of_file):
                file.seek(offset - 1)
                yield json.loads(file.readline())


def _write_csv(entries: Entries, file: BinaryIO, delimiter: str) -> None:
    """Writes a table; a result that is not a text is written as JSON.

    A lone surrogate, which UTF-8 lacks, is escaped.
    """
    first = next(iter(entries()), {})
    columns = ["id", *(["file"] if "file" in first else []), "line", "result"]
    text = io.TextIOWrapper(file, "utf-8", "backslashreplace", newline="", write_through=False)
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    # Python before 3.13 would leave a lone carriage return bare, which ends a row for readers.
    quoting = csv.writer(text, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    for entry in entries():
        cells = [_cell(entry[column]) for column in columns]
        (quoting if any("\r" in cell for cell in cells) else writer).writerow(cells)
    text.flush()
    text.detach()


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def default_errors_path(source: Dataset, results: str | Path) -> Path:
    """Default path of the file of failures: `out.errors.jsonl` for `out.jsonl.gz`."""
    if is_url(results):
        name, folder = Path(results).name, Path()
    elif str(results) != STANDARD_STREAM:
        name, folder = Path(results).name, Path(results).parent
    else:
        first = source.sources[0]
        name, folder = "stdin" if first.is_stdin else first.path.name, Path()
    return folder / f"{Path(bare_name(name)).stem}.errors.jsonl"


def get_journal_path(results: Path | None) -> Path | None:
    """Path of an output's journal; None if the output is not a regular file."""
    if results is None or (results.exists() and not results.is_file()):
        return None
    return results.with_name(results.name + JOURNAL_SUFFIX)


def has_content(path: Path | None) -> bool:
    """Whether the path is of a file that is not empty."""
    return path is not None and path.is_file() and path.stat().st_size > 0


def check_path(path: Path | None) -> None:
    """Checks that the file and its journal can be looked up.

    Raises:
        DatasetError: The name is too long, or the user may not read the directory.
    """
    for name in () if path is None else (path, Path(f"{path}{JOURNAL_SUFFIX}")):
        try:
            name.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # Other checks report this.
        except OSError as error:
            raise DatasetError(f"{path}: cannot be written: {error.strerror}") from None


def check_output_path(path: Path | None, source: Dataset, *, replace: bool, hint: str) -> None:
    """Checks that a file may be written.

    Args:
        path: Path of the file; None is standard output.
        source: The input, which must not be overwritten.
        replace: Whether a file with content may be overwritten.
        hint: What the user can do if it may not.

    Raises:
        DatasetError: The file may not be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise DatasetError(f"{path}: a directory; name a file")
    if not path.parent.is_dir():
        raise DatasetError(f"{path}: there is no directory {path.parent}; create it first")
    if any(is_same(path, each) for each in source.inputs):
        raise DatasetError(f"{path}: this is the input; name another file")
    if not replace and has_content(path):
        raise DatasetError(f"{path}: already there; {hint}")


def is_same(one: Path | None, other: Path | None) -> bool:
    """Whether two paths name the same file."""
    if one is None or other is None:
        return False
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _first_there(paths: Iterable[Path | None]) -> str:
    return next((str(path) for path in paths if path is not None and path.exists()), "")


class Output:
    """The files of a run: results, failures if any, and a journal until all rows are done.

    A result is `{"id": ..., "line": n, "result": ...}`, a failure
    `{"id": ..., "line": n, "error": {"type": ..., "message": ...}}`; with several input files,
    each has `file`, too. They are in order of completion. Without failures there is no file of
    failures.

    Attributes:
        done: Lines of the input that an earlier process finished.
        journal: Identity of the run; None until the output is open.
        is_resumed: Whether it continues an existing output.
    """

    def __init__(
        self,
        source: Dataset,
        results: str | Path,
        errors: str | Path | None = None,
        *,
        overwrite: bool = False,
        resume: bool = False,
        ordered: bool = False,
    ) -> None:
        """Checks the paths, but writes nothing yet.

        Args:
            source: The input, which must not be overwritten.
            results: A file or a URL, or `-` for standard output.
            errors: A file; by default `<name>.errors.jsonl` next to the results; in the current
                directory if they go to a URL or, named after the input, to standard output.
            overwrite: Whether files with content may be replaced.
            resume: Whether to continue an existing output.
            ordered: Whether results are in the order of the input.

        Raises:
            DatasetError: A file cannot be written, would overwrite another one, or is the input; or
                an existing output cannot be resumed.
        """
        url = str(results) if is_url(results) else None
        path = None if url or str(results) == STANDARD_STREAM else Path(results)
        errors = Path(errors) if errors else default_errors_path(source, results)
        for file in (path, errors):
            check_path(file)
        self.done = FinishedLines(source.names)
        self.journal: Journal | None = None
        self.is_resumed = False
        self._is_known = True
        self._resume = resume
        self._source = source
        self._final = Final(path, url=url, ordered=ordered, converted=source.is_openai)
        self._is_written = False
        self._final_errors = Final(errors, converted=source.is_openai)
        self._journal_path = None if source.is_stream else get_journal_path(path)
        self._check_resume(overwrite)
        may_replace = overwrite or (resume and (self.is_begun or has_content(path)))
        for file, other in ((path, "another file"), (errors, "another with --errors")):
            hint = self._hint(other)
            check_output_path(file, source, replace=may_replace, hint=hint)
            if file and self._journal_path and source.would_read(file):
                raise DatasetError(
                    f"{file}: a pattern of the input matches it, so that --resume would read it;"
                    f" name {other}"
                )
        if url in source.names:
            raise DatasetError(f"{url}: this is the input; name another file")
        if not overwrite and self._final.is_there:
            raise DatasetError(f"{url}: already there; {self._hint()}")
        if is_same(path, errors):
            raise DatasetError(f"{errors}: results and failures need a file each")
        if url or path:
            check_extension(url or str(path), OF_RESULTS)
        check_extension(str(errors), OF_LINES)
        if self.is_begun and not (resume or overwrite):
            raise DatasetError(f"{path}: begun and not finished; {self._hint()}")
        place = self._final.part() if self._final.needs_part else path
        # In the temporary folder, which is everybody's, unless the output has a path.
        self.results = JsonLines(place, is_private=path is None)
        self.errors = JsonLines(self._final_errors.part() if source.is_openai else errors)

    def _check_resume(self, overwrite: bool) -> None:
        if self._resume and overwrite:
            raise DatasetError(
                "--resume keeps an existing output and --overwrite does not; choose one"
            )
        if self._resume and self._journal_path is None:
            raise DatasetError(
                "streams, devices and URLs cannot be resumed; read from files, and write to one"
            )
        finished = self._final.needs_part and has_content(self._final.path)
        if self._resume and finished and not self.is_begun:
            raise DatasetError(
                f"{self._final.path}: complete, or of another program; --overwrite begins anew"
            )

    @property
    def is_begun(self) -> bool:
        """Whether the output belongs to an unfinished run."""
        return self._journal_path is not None and self._journal_path.exists()

    def _hint(self, other: str = "another file") -> str:
        if self.is_begun:
            return "--resume submits the missing rows, --overwrite begins anew"
        return f"name {other}, or use --overwrite"

    def open(self, journal: Journal) -> Journal:
        """Creates the files, or continues existing ones.

        Args:
            journal: The run that this process was asked for.

        Returns:
            The run that the output belongs to.

        Raises:
            DatasetError: An existing file belongs to another run or is no output, or a file cannot
                be written.
        """
        self.journal = journal
        before = None if self._journal_path is None else Journal.read(self._journal_path)
        if self._resume and (before is not None or has_content(self.results.path)):
            self._continue(before)
        else:
            self._begin()
        return self.journal

    def _begin(self) -> None:
        """Removes files of an earlier run. The journal comes last, when the output exists."""
        assert self.journal is not None
        self.results.open()
        final = self._final.path if self._final.needs_part else None
        journal = get_journal_path(self._final.path)  # A stream has none, but replaces a file's.
        for path in (journal, self.errors.path, self._final_errors.path, final):
            if path is not None and path.is_file():
                path.unlink()
        if self._journal_path is not None:
            self.journal.write(self._journal_path)

    def _continue(self, before: Journal | None) -> None:
        assert self.journal is not None
        assert self._journal_path is not None
        if before is not None:
            self.journal = before.continued_by(self.journal)
        self.is_resumed = True
        self._is_known = before is not None
        self.done = FinishedLines(self.journal.files)
        for file in (self.results, self.errors):
            for entry in file.resume(is_ours=self._is_known):
                try:
                    self.done.note(entry)
                except DatasetError as error:
                    raise DatasetError(f"{file.name}: {error}") from None
        if before is not None:
            self.journal.write(self._journal_path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.results.close()
        self.errors.close()
        is_temporary = self._final.path is None and self._final.needs_part
        is_needed = has_content(self.results.path) and not self._is_written
        if is_temporary and self.results.path is not None and not is_needed:
            self.results.path.unlink(missing_ok=True)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the files with results and failures so far; empty for one that is not there."""
        errors = _first_there((self._final_errors.path, self.errors.path))
        if self._final.url is None:
            return _first_there((self._final.path, self.results.path)), errors
        if self._is_written:
            return self._final.url, errors
        return str(self.results.path) if has_content(self.results.path) else "", errors

    def missing(self, rows: Iterable[Record | Broken]) -> Iterator[Record | Broken]:
        """Rows of the input that are not done.

        Raises:
            DatasetError: There is no journal, and the output is not of just these rows.
        """
        if self._is_known:
            yield from (row for row in rows if (row.source, row.line) not in self.done)
            return
        hint = f", and no journal ({self._journal_path}) says how it was begun; use --overwrite"
        with SeenIds() as ids:
            for path in filter(None, (self.results.path, self.errors.path)):
                for entry, _ in _all(path):
                    ids.first_line(entry.get("id"), 0, 0)
            found = 0
            for row in rows:
                found += 1
                # As it was written: JSON lacks some types.
                id_ = json.loads(encoded({"id": row.id}))["id"]
                if (row.source, row.line) not in self.done or not (id_ is None or ids.forget(id_)):
                    what = f"has nothing for {self.line_name(row)}"
                    raise DatasetError(f"{self.results.name}: {what}{hint}")
        if found != len(self.done):
            raise DatasetError(f"{self.results.name}: has rows that the input has not{hint}")

    def result(self, row: Record, result: Any) -> str | None:
        """Adds the result of a job.

        Returns:
            None; or why the result cannot be written.
        """
        try:
            form = {"form": row.form} if row.form else {}
            self.results.write({**self._head(row), **form, "result": result})
        except TooLong as error:
            return str(error)
        return None

    def failure(self, row: Record | Broken, type_: str, message: str) -> None:
        """Adds a job that failed, or a line that could not become one; what is too long is cut."""
        short = message[:MAX_MESSAGE_CHARS]
        for id_, text in ((row.id, message), (row.id, short), (None, short)):
            with suppress(TooLong):
                error = {"type": type_, "message": text}
                self.errors.write({**self._head(row), "id": id_, "error": error})
                return

    def _head(self, row: Record | Broken) -> dict[str, Any]:
        files = self.journal.files if self.journal else ()
        file = {"file": files[row.source]} if len(files) > 1 else {}
        return {"id": row.id, **file, "line": row.line}

    def line_name(self, row: Record | Broken) -> str:
        """Names a line of the input in messages."""
        return self._source.line_name(row.source, row.line)

    def flush(self) -> None:
        """Writes the added lines; raises as `JsonLines.flush` does."""
        self.results.flush()
        self.errors.flush()

    def finish(self, *, complete: bool) -> None:
        """Gives the output its final form.

        Args:
            complete: Whether every row is done, so that the journal can be removed. Otherwise only
                standard output is written; files wait for the other rows, and nothing is at a URL.

        Raises:
            DatasetError: The output cannot be written; no result is lost.
        """
        self.flush()
        parts: list[Path] = []
        is_stream = self._final.path is None and self._final.url is None
        if self._final.needs_part and (complete or is_stream):
            parts = list(self._write_final())
        if complete and self._journal_path is not None:
            self._journal_path.unlink(missing_ok=True)
        for part in parts:  # After the journal, with which the output can be made of them again.
            part.unlink(missing_ok=True)

    def _write_final(self) -> Iterator[Path]:
        """Writes the output, and yields the files that it was made of."""
        assert self.journal is not None
        assert self.results.path is not None
        openai, files = None, self.journal.files
        if self._source.is_openai:
            openai = OpenAIFormat(self.journal, self._source.model or "", self._source.line_name)
        self.results.close()
        self._final.write(self.results.path, files, openai.result if openai else None)
        self._is_written = True
        yield self.results.path
        if openai and self.errors.path is not None and self.errors.path.exists():
            self.errors.close()
            self._final_errors.write(self.errors.path, files, openai.failure)
            yield self.errors.path

"""The files of a run: results, failures and a journal; and the final form of an output.

An output may be sorted, compressed, a table, or at a URL. Then it cannot be written line by line:
results are gathered in a file of JSON lines, the part, which for a URL is in the current folder.
When every row is done, the output is written from the part, which is kept until the output is
complete. So whatever is at a URL is complete.
"""

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Self

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import FinishedRows, Journal
from batchery_producer.files.json_lines import (
    JsonLines,
    TooLong,
    encoded,
    naming_errors,
    read_lines,
)
from batchery_producer.files.parquet import write_parquet
from batchery_producer.files.records import Broken, Record
from batchery_producer.files.source import (
    COMPRESSIONS,
    STANDARD_STREAM,
    Remote,
    extra,
    is_url,
    split_compression,
)

Entry = Mapping[str, Any]

#: Extensions of outputs.
LINES = ("", ".jsonl", ".ndjson")
TABLE = ".parquet"

#: Maximum length of a failure's message, where the whole one does not fit into a line.
MAX_MESSAGE_CHARS = 10_000


class Output:
    """The files of a run: results, failures if any, and a journal until all rows are done.

    A result is `{"id": ..., "row": n, "result": ...}`, a failure
    `{"id": ..., "row": n, "line": n, "error": {"type": ..., "message": ...}}`; with several input
    files, each has `file`, too. They are in order of completion. Without failures there is no file
    of failures.

    Attributes:
        done: Rows of the input that an earlier process finished.
        first_failure: Where the first failure was, and why; of an earlier process, too.
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
        name = str(results)
        self._url = name if is_url(name) else None
        self._remote = Remote.at(name) if self._url else None
        is_stream = name == STANDARD_STREAM
        self._path = None if is_stream else Path(PurePath(name).name if self._url else name)
        self._bare, self._compression = ("", "") if is_stream else _check_format(name)
        self._ordered = ordered
        self._needs_part = bool(self._remote or self._compression or ordered or self._is_table)
        if is_stream and ordered:
            raise DatasetError("standard output gets results as they come; name a file to order")
        self.done = FinishedRows(source.names)
        self.first_failure = ""
        self.journal: Journal | None = None
        self.is_resumed = False
        self._is_written = False
        self._source = source
        errors = Path(errors) if errors else _default_errors_path(source, self._path)
        if errors.suffix.lower() not in LINES:
            raise DatasetError(f"{errors}: failures are JSON lines; name it .jsonl")
        self._journal_place = self._journal_path = None
        if self._path and (os.path.isfile(self._path) or not os.path.exists(self._path)):
            self._journal_place = self._path.with_name(f"{self._path.name}.journal")
            # What is read from a stream cannot be read again, but replaces what was.
            self._journal_path = None if source.is_stream else self._journal_place
        self._check(errors, overwrite=overwrite, resume=resume)
        self._resumes = resume and self.is_begun
        place = self._path
        if self._needs_part and place:
            place = place.with_name(f"{place.name}.part")
        self.results, self.errors = JsonLines(place), JsonLines(errors)

    def _check(self, errors: Path, *, overwrite: bool, resume: bool) -> None:
        if resume and overwrite:
            raise DatasetError(
                "--resume keeps an existing output and --overwrite does not; choose one"
            )
        if resume and self._journal_path is None:
            raise DatasetError("streams and devices cannot be resumed; name files for both")
        if self.is_begun and not (resume or overwrite):
            raise DatasetError(
                f"{self._path}: begun and not finished; --resume submits the missing rows,"
                " --overwrite begins anew"
            )
        for file, option in ((self._path, ""), (errors, " with --errors")):
            if file is None:
                continue
            with naming_errors(str(file)):
                self._check_path(file, option)
                is_there = file.is_file() and file.stat().st_size > 0
            if self._remote is not None and file is self._path:
                with self._remote.reaching(str(self._url)):
                    is_there = self._remote.filesystem.exists(self._remote.path)
            if is_there and not (overwrite or self.is_begun):
                name = self._url if self._url and file is self._path else file
                hint = f"name another file{option}, or use --overwrite"
                if resume:
                    hint = "complete, or of another program; --overwrite begins anew"
                raise DatasetError(f"{name}: already there; {hint}")
        if self._path is not None and self._path.resolve() == errors.resolve():
            raise DatasetError(f"{errors}: results and failures need a file each")

    def _check_path(self, file: Path, option: str) -> None:
        if file.is_dir():
            raise DatasetError(f"{file}: a directory; name a file")
        if not file.parent.is_dir():
            raise DatasetError(f"{file}: there is no directory {file.parent}; create it first")
        inputs = self._source.inputs
        if self._url in self._source.names or (file.exists() and any(map(file.samefile, inputs))):
            raise DatasetError(f"{self._url or file}: this is the input; name another file{option}")
        if self._journal_path and self._source.would_read(file):
            raise DatasetError(
                f"{file}: a pattern of the input matches it, so that --resume would read it;"
                f" name another file{option}"
            )

    @property
    def _is_table(self) -> bool:
        return self._bare.endswith(TABLE)

    @property
    def is_begun(self) -> bool:
        """Whether the output belongs to an unfinished run."""
        return self._journal_path is not None and os.path.exists(self._journal_path)

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
        if self._resumes:
            self._continue()
        else:
            self._begin()
        return self.journal

    def _begin(self) -> None:
        """Removes files of an earlier run. The journal comes last, when the output exists."""
        assert self.journal is not None
        self.results.open()
        final = self._path if self._needs_part and not self._url else None
        for path in (self._journal_place, self.errors.path, final):
            if path is not None and path.is_file():
                path.unlink()
        if self._journal_path is not None:
            self.journal.write(self._journal_path)

    def _continue(self) -> None:
        assert self.journal is not None
        assert self._journal_path is not None
        before = Journal.read(self._journal_path)
        before.check(self.journal)
        self.journal = before
        self.is_resumed = True
        self.done = FinishedRows(self.journal.files)
        for file in (self.results, self.errors):
            for entry in file.resume():
                try:
                    self.done.note(entry)
                except DatasetError as error:
                    raise DatasetError(f"{file.name}: {error}") from None
                if not self.first_failure and isinstance(why := entry.get("error"), dict):
                    where = self._source.line_name(self.done.locate(entry)[0], entry.get("line", 0))
                    self.first_failure = f"{where}: {why.get('type')}: {why.get('message')}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.results.close()
        self.errors.close()

    @property
    def names(self) -> tuple[str, str]:
        """Names of the files with results and failures so far; empty for one that is not there."""
        results = self._path if self._is_written else self.results.path
        found = [
            str(each) if each and each.exists() else "" for each in (results, self.errors.path)
        ]
        return self._url if self._url and self._is_written else found[0], found[1]

    def missing(self, rows: Iterable[Record | Broken]) -> Iterator[Record | Broken]:
        """Rows of the input that are not done."""
        return (row for row in rows if (row.source, row.row) not in self.done)

    def result(self, row: Record, result: Any) -> str | None:
        """Adds the result of a job.

        Returns:
            None; or why the result cannot be written.
        """
        try:
            self.results.write({**self._head(row), "result": result})
        except TooLong as error:
            return str(error)
        return None

    def failure(self, row: Record | Broken, type_: str, message: str) -> str:
        """Adds a job that failed, or a row that could not become one; what is too long is cut.

        Returns:
            Where the failure was, and why.
        """
        short = message[:MAX_MESSAGE_CHARS]
        for id_, text in ((row.id, message), (row.id, short), (None, short)):
            with suppress(TooLong):
                entry = {**self._head(row), "id": id_, "line": row.line}
                self.errors.write({**entry, "error": {"type": type_, "message": text}})
                break
        said = f"{self._source.line_name(row.source, row.line)}: {type_}: {message}"
        self.first_failure = self.first_failure or said
        return said

    def _head(self, row: Record | Broken) -> dict[str, Any]:
        files = self.journal.files if self.journal else ()
        file = {"file": files[row.source]} if len(files) > 1 else {}
        return {"id": row.id, **file, "row": row.row}

    def flush(self) -> None:
        """Writes the added lines; raises as `JsonLines.flush` does."""
        self.results.flush()
        self.errors.flush()

    def finish(self, *, complete: bool) -> None:
        """Gives the output its final form.

        Args:
            complete: Whether every row is done, so that the journal can be removed; files wait for
                the other rows, and nothing is at a URL.

        Raises:
            DatasetError: The output cannot be written; no result is lost.
        """
        self.flush()
        if complete and self._needs_part:
            self._write_final()
        if complete and self._journal_path is not None:
            self._journal_path.unlink(missing_ok=True)
        if self._is_written and self.results.path is not None:
            self.results.path.unlink()  # After the journal, with which it can be used again.

    def _write_final(self) -> None:
        assert self._path is not None
        self.results.close()
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with open(new, "wb") as file:
                self._write(file)
            if self._remote is None:
                os.replace(new, self._path)
            else:
                self._remote.filesystem.put_file(str(new), self._remote.path)
        except Exception as error:  # Arrow and filesystems have errors of their own.
            raise DatasetError(
                f"{self._url or self._path}: cannot be written:"
                f" {getattr(error, 'strerror', None) or error}; the results are in"
                f" {self.results.path}"
            ) from error
        finally:
            new.unlink(missing_ok=True)
        self._is_written = True

    def _write(self, file: BinaryIO) -> None:
        if self._is_table:
            write_parquet(self._entries, file)
            return
        library = COMPRESSIONS[self._compression][1] if self._compression else ""
        target: Any = import_module(library).open(file, "wb") if library else file
        for entry in self._entries():
            target.write(encoded(entry) + b"\n")
        if target is not file:
            target.close()

    def _entries(self) -> Iterator[Entry]:
        assert self.results.path is not None
        assert self.journal is not None
        if self._ordered:
            return _read_sorted(self.results.path, self.journal.files)
        return (entry for entry, _ in read_lines(self.results.path))


def _check_format(name: str) -> tuple[str, str]:
    """A file name without the extension of a compression, and that extension.

    Raises:
        DatasetError: Results cannot be written in the form that it asks for.
    """
    bare, compression = split_compression(PurePath(name).name)
    extension = PurePath(bare.lower()).suffix
    if extension not in (*LINES, TABLE):
        known = ", ".join((*LINES[1:], TABLE))
        raise DatasetError(f"{name}: cannot be written as {extension}, but as {known}")
    if extension == TABLE:
        extra("pyarrow")
        if compression:
            raise DatasetError(f"{name}: Parquet is compressed in itself; name it without suffix")
    if compression == ".zst":
        extra("zstandard")
    return bare.lower(), compression


def _default_errors_path(source: Dataset, results: Path | None) -> Path:
    """Default path of the file of failures: `out.errors.jsonl` for `out.jsonl.gz`."""
    if results is None:
        results = Path((source.sources[0].path or Path("stdin")).name)
    return results.with_name(f"{PurePath(split_compression(results)[0]).stem}.errors.jsonl")


def _read_sorted(part: Path, files: Sequence[str]) -> Iterator[Entry]:
    """Entries in the order of the input; memory holds the offset of each line, eight bytes."""
    numbers = {name: number for number, name in enumerate(files)}
    offsets = [array("Q") for _ in files]
    start = 0
    for entry, end in read_lines(part):
        of_file, row = offsets[numbers.get(entry.get("file", ""), 0)], entry["row"]
        of_file.extend(array("Q", bytes(8 * max(row + 1 - len(of_file), 0))))
        of_file[row] = start + 1  # 0 means that the row has no entry.
        start = end
    with open(part, "rb") as file:
        for of_file in offsets:
            for offset in filter(None, of_file):
                file.seek(offset - 1)
                yield json.loads(file.readline())

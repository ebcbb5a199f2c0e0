"""The files of a run: results, failures and a journal; and the final form of an output.

An output that is a table cannot be written line by line: results are gathered in a file of JSON
lines, the part. When every row is done, the output is written from the part, which is kept until
the output is complete.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Self

from celery.utils.functional import chunks

from batchery.errors import DatasetError
from batchery_producer.files.dataset import Dataset, Record
from batchery_producer.files.journal import FinishedRows, Journal
from batchery_producer.files.json_lines import JsonLines, read_lines
from batchery_producer.files.options import SubmitOptions
from batchery_producer.files.source import (
    STANDARD_STREAM,
    extra,
    is_url,
    naming_errors,
    split_compression,
)

Entry = Mapping[str, Any]

#: Extensions of outputs.
LINES = ("", ".jsonl", ".ndjson")
TABLE = ".parquet"

#: Maximum length of a failure's message in characters, so that its line can be read again.
MAX_MESSAGE_CHARS = 10_000

#: Number of a table's rows in memory at a time, and in a row group.
WRITE_ROWS = 4096


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
        options: SubmitOptions | None = None,
        **changes: Any,
    ) -> None:
        """Checks the paths, but writes nothing yet.

        Args:
            source: The input, which must not be overwritten.
            results: A file, or `-` for standard output.
            options: Where failures go, and what becomes of existing files.
            changes: Single options, which override those in `options`.

        Raises:
            DatasetError: A file cannot be written, would overwrite another one, or is the input; or
                an existing output cannot be resumed.
        """
        options = replace(options or SubmitOptions(), **changes)
        name = str(results)
        if is_url(name):
            raise DatasetError(f"{name}: results go to a file of this machine; copy it in the end")
        self._path = Path(name)
        is_stream = name == STANDARD_STREAM
        self._is_table = not is_stream and _check_format(name)
        self.done = FinishedRows(source.names)
        self.first_failure = ""
        self.journal: Journal | None = None
        self._is_written = False
        self._source = source
        errors = Path(options.errors) if options.errors else self._default_errors(is_stream)
        if errors.suffix.lower() not in LINES:
            raise DatasetError(f"{errors}: failures are JSON lines; name it .jsonl")
        self._journal_place = self._journal_path = None
        if not is_stream and (os.path.isfile(self._path) or not os.path.exists(self._path)):
            self._journal_place = self._path.with_name(f"{self._path.name}.journal")
            # What is read from a stream cannot be read again, but replaces what was.
            self._journal_path = None if source.is_stream else self._journal_place
        self._check(errors, None if is_stream else self._path, options)
        self.is_resumed = options.resume and self.is_begun
        place = self._path.with_name(f"{self._path.name}.part") if self._is_table else self._path
        self.results, self.errors = JsonLines(None if is_stream else place), JsonLines(errors)

    def _default_errors(self, is_stream: bool) -> Path:
        """`out.errors.jsonl` for `out.jsonl`."""
        path = self._path
        if is_stream:
            path = Path((self._source.sources[0].path or Path("stdin")).name)
        return path.with_name(f"{PurePath(split_compression(path)[0]).stem}.errors.jsonl")

    def _check(self, errors: Path, results: Path | None, options: SubmitOptions) -> None:
        if options.resume and options.overwrite:
            raise DatasetError("--resume keeps an output, --overwrite does not; choose one")
        if options.resume and self._journal_path is None:
            raise DatasetError("streams and devices cannot be resumed; name files for both")
        if self.is_begun and not (options.resume or options.overwrite):
            raise DatasetError(
                f"{self._path}: begun and not finished; --resume submits the missing rows,"
                " --overwrite begins anew"
            )
        for file, option in ((results, ""), (errors, " with --errors")):
            if file is None:
                continue
            with naming_errors(str(file)):
                self._check_path(file, option)
                is_there = file.is_file() and file.stat().st_size > 0
            if is_there and not (options.overwrite or self.is_begun):
                hint = f"name another file{option}, or use --overwrite"
                if options.resume:
                    hint = "complete, or of another program; --overwrite begins anew"
                raise DatasetError(f"{file}: already there; {hint}")
        if results is not None and results.resolve() == errors.resolve():
            raise DatasetError(f"{errors}: results and failures need a file each")

    def _check_path(self, file: Path, option: str) -> None:
        if file.is_dir():
            raise DatasetError(f"{file}: a directory; name a file")
        if not file.parent.is_dir():
            raise DatasetError(f"{file}: there is no directory {file.parent}; create it first")
        if file.exists() and any(map(file.samefile, self._source.inputs)):
            raise DatasetError(f"{file}: this is the input; name another file{option}")

    @property
    def is_begun(self) -> bool:
        """Whether the output belongs to an unfinished run."""
        return self._journal_path is not None and os.path.exists(self._journal_path)

    @property
    def hint(self) -> str:
        """What to say to a run that ends now."""
        return "; the same command with --resume goes on from here" if self.is_begun else ""

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
        if self.is_resumed and self._journal_path is not None:
            self.journal = Journal.read(self._journal_path)
            self.journal.check(journal)
            self._read_finished()
            return self.journal
        self.journal = journal
        self.results.open()
        final = self._path if self._is_table else None
        for path in (self._journal_place, self.errors.path, final):
            if path is not None and path.is_file():
                path.unlink()
        if self._journal_path is not None:  # It comes last, when the output exists.
            journal.write(self._journal_path)
        return journal

    def _read_finished(self) -> None:
        for file in (self.results, self.errors):
            for entry in file.resume():
                place = self.done.note(entry, file.name)
                if not self.first_failure and isinstance(why := entry.get("error"), dict):
                    row = Record(*place, entry.get("line", 0), None)
                    self._note_failure(row, why.get("type"), why.get("message"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.results.close()
        self.errors.close()

    @property
    def names(self) -> tuple[str, str]:
        """Names of the files with results and failures so far; empty for one that is not there."""
        results = self._path if self._is_written else self.results.path
        found, failures = (
            str(each) if each and each.exists() else "" for each in (results, self.errors.path)
        )
        return found, failures

    def result(self, row: Record, result: Any) -> str:
        """Adds the result of a job; returns why it cannot be written, or an empty text."""
        return self.results.write({**self._head(row), "result": result})

    def failure(self, row: Record, type_: str, message: str) -> None:
        """Adds a job that failed, or a row that could not become one; what is too long is cut."""
        error = {"type": type_, "message": message[:MAX_MESSAGE_CHARS]}
        entry = {**self._head(row), "line": row.line, "error": error}
        if self.errors.write(entry):
            self.errors.write({**entry, "id": None})
        self._note_failure(row, type_, message)

    def _note_failure(self, row: Record, type_: Any, message: Any) -> None:
        said = f"{self._source.line_name(row)}: {type_}: {message}"
        self.first_failure = self.first_failure or said

    def _head(self, row: Record) -> dict[str, Any]:
        files = self._source.names if self.journal is None else self.journal.files
        file = {"file": files[row.source]} if len(files) > 1 else {}
        return {"id": row.id, **file, "row": row.row}

    def flush(self) -> None:
        """Writes the added lines; raises as `JsonLines.flush` does."""
        self.results.flush()
        self.errors.flush()

    def finish(self, *, complete: bool) -> None:
        """Gives the output its final form.

        Args:
            complete: Whether every row is done, so that the journal can be removed; else files wait
                for the other rows.

        Raises:
            DatasetError: The output cannot be written; no result is lost.
        """
        self.flush()
        if complete and self._is_table:
            self._write_final()
        if complete and self._journal_path is not None:
            self._journal_path.unlink(missing_ok=True)
        if self._is_written and self.results.path is not None:
            self.results.path.unlink()  # After the journal, with which it can be used again.

    def _write_final(self) -> None:
        self.results.close()
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with open(new, "wb") as file:
                write_parquet(self._entries, file)
            os.replace(new, self._path)
        except Exception as error:  # Arrow has errors of its own.
            why, where = getattr(error, "strerror", None) or error, self.results.path
            raise DatasetError(
                f"{self._path}: cannot be written: {why}; the results are in {where}"
            ) from error
        finally:
            new.unlink(missing_ok=True)
        self._is_written = True

    def _entries(self) -> Iterator[Entry]:
        assert self.results.path is not None
        return (entry for entry, _ in read_lines(self.results.path))


def _check_format(name: str) -> bool:
    """Whether a file is a table.

    Raises:
        DatasetError: Results cannot be written in the form that its name asks for.
    """
    extension = PurePath(name.lower()).suffix
    if extension not in (*LINES, TABLE):
        known = ", ".join((*LINES[1:], TABLE))
        raise DatasetError(f"{name}: cannot be written as {extension}, but as {known}")
    if extension == TABLE:
        extra("pyarrow")
    return extension == TABLE


def write_parquet(entries: Callable[[], Iterable[Entry]], file: BinaryIO) -> None:
    """Writes a table whose columns have types that hold all of their values.

    Where there are no such types, ids and results are JSON texts.

    Args:
        entries: Gives the rows, each time from the first.
        file: A file that can be written anew.
    """
    arrow = extra("pyarrow")
    try:
        schema = arrow.schema({"id": arrow.null(), "row": arrow.int64(), "result": arrow.null()})
        for number, rows in enumerate(chunks(iter(entries()), WRITE_ROWS)):
            found = arrow.Table.from_pylist(rows).schema
            known = [schema, found] if number else [found]
            schema = arrow.unify_schemas(known, promote_options="permissive")
        _write_table(schema, entries(), file)
    except (arrow.ArrowException, OverflowError, ValueError, TypeError):
        file.seek(0)
        file.truncate()
        names = next(iter(entries()))
        texts = {name: arrow.string() for name in names} | {"row": arrow.int64()}
        _write_table(arrow.schema(texts), map(_with_texts, entries()), file)


def _write_table(schema: Any, entries: Iterable[Entry], file: BinaryIO) -> None:
    arrow = extra("pyarrow")
    with extra("pyarrow.parquet").ParquetWriter(file, schema) as writer:
        for rows in chunks(iter(entries), WRITE_ROWS):
            writer.write_table(arrow.Table.from_pylist(rows, schema))


def _with_texts(entry: Entry) -> Entry:
    return {**entry, "id": _as_text(entry["id"]), "result": _as_text(entry["result"])}


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # UTF-8 has no lone surrogate.

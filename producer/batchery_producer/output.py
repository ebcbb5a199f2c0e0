"""Output: results and failures as JSON lines, on disk as soon as they are flushed."""

import gzip
import json
from collections.abc import Mapping
from contextlib import suppress
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchery.errors import DatasetError
from batchery_producer.dataset import STANDARD_STREAM, Dataset

#: Lines in memory that are written without being asked for, in bytes.
BUFFER_BYTES = 4 * 1024 * 1024


class JsonLines:
    """A file of JSON lines; gzip if its name says so.

    Whole lines are written by `flush`, or when many have gathered. A gzip file gets a whole gzip
    member each time: what a killed process leaves behind can be read to its last line.
    """

    def __init__(self, path: Path | None) -> None:
        """Prepares the file; `open` or the first `flush` with lines creates it.

        Args:
            path: Where to write, over what is there; standard output if None.
        """
        self.path = path
        self.name = "standard output" if path is None else str(path)
        self._packed = path is not None and path.name.lower().endswith(".gz")
        self._file: BufferedWriter | None = None
        self._lines = bytearray()

    def open(self) -> None:
        """Creates the file, or empties it.

        Raises:
            DatasetError: It cannot be written.
        """
        try:
            self._file = open(  # noqa: SIM115 (closed by close)
                1 if self.path is None else self.path, "wb", closefd=self.path is not None
            )
        except OSError as error:
            raise DatasetError(f"{self.name}: cannot be written: {error.strerror}") from None

    def write(self, entry: Mapping[str, Any]) -> None:
        """Adds a line, to be written by the next `flush` at the latest; raises as that does."""
        try:
            line = json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # Half a surrogate pair: JSON can name it, UTF-8 cannot.
            line = json.dumps(entry).encode()
        self._lines += line + b"\n"
        if len(self._lines) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was added, through to the operating system.

        Raises:
            DatasetError: It cannot be written; the disk is full, for example.
        """
        if not self._lines:
            return
        if self._file is None:
            self.open()
        assert self._file is not None
        try:
            self._file.write(gzip.compress(self._lines) if self._packed else self._lines)
            self._file.flush()
        except OSError as error:
            raise DatasetError(f"{self.name}: cannot be written: {error.strerror}") from None
        self._lines.clear()

    def close(self) -> None:
        """Closes the file; lines that were not flushed are dropped."""
        if self._file is not None:
            with suppress(OSError):  # `flush` has already said what was wrong.
                self._file.close()


class Output:
    """The two files of a run: results, and failures if there are any.

    A result is `{"id": ..., "line": n, "result": ...}`, a failure
    `{"id": ..., "line": n, "error": {"type": ..., "message": ...}}`; in the order in which they
    were completed. There is no file of failures without a failure.
    """

    def __init__(
        self,
        source: Dataset,
        results: str | Path,
        errors: str | Path | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Checks where to write, but writes nothing yet.

        Args:
            source: Must not be overwritten.
            results: A file, or `-` for standard output.
            errors: A file; by default `<name>.errors.jsonl` beside the results, or in the current
                directory and named after the input if the results go to standard output.
            overwrite: Whether files that hold something may be replaced.

        Raises:
            DatasetError: A file cannot be written, would overwrite another one, or is the input.
        """
        to_stdout = str(results) == STANDARD_STREAM
        self.results = JsonLines(None if to_stdout else Path(results))
        self.errors = JsonLines(Path(errors) if errors else _errors_beside(source, results))
        for file in (self.results, self.errors):
            _check(file, source, overwrite=overwrite)
        if _same(self.results.path, self.errors.path):
            raise DatasetError(f"{self.errors.name}: results and failures need a file each")

    def __enter__(self) -> Self:
        """Creates the file of results; removes failures of an earlier run."""
        self.results.open()
        if self.errors.path is not None and self.errors.path.is_file():
            self.errors.path.unlink()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.results.close()
        self.errors.close()

    def result(self, id_: Any, line: int, result: Any) -> None:
        """Adds the result of a job."""
        self.results.write({"id": id_, "line": line, "result": result})

    def failure(self, id_: Any, line: int, type_: str, message: str) -> None:
        """Adds a job that failed, or a line that became no job."""
        self.errors.write({"id": id_, "line": line, "error": {"type": type_, "message": message}})

    def flush(self) -> None:
        """Writes what was added; raises as `JsonLines.flush` does."""
        self.results.flush()
        self.errors.flush()


def _errors_beside(source: Dataset, results: str | Path) -> Path:
    """`out.jsonl.gz` has its failures in `out.errors.jsonl`."""
    if str(results) != STANDARD_STREAM:
        name, folder = Path(results).name, Path(results).parent
    else:
        name, folder = "stdin" if source.is_stdin else source.path.name, Path()
    stem = Path(name.removesuffix(".gz")).stem
    return folder / f"{stem}.errors.jsonl"


def _check(file: JsonLines, source: Dataset, *, overwrite: bool) -> None:
    path = file.path
    if path is None:
        return
    if path.is_dir():
        raise DatasetError(f"{path}: a directory; name a file")
    if not path.parent.is_dir():
        raise DatasetError(f"{path}: there is no directory {path.parent}; create it first")
    if not source.is_stdin and _same(path, source.path):
        raise DatasetError(f"{path}: this is the input; name another file")
    if not overwrite and path.is_file() and path.stat().st_size:
        raise DatasetError(f"{path}: already there; name another file, or say --overwrite")


def _same(one: Path | None, other: Path | None) -> bool:
    if one is None or other is None:
        return False
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()

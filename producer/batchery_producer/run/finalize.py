"""The final form of an output that cannot be written line by line: sorted, a table, or at a URL.

During a run, results are gathered in a file of JSON lines, the part. When every row is done, the
output is written from the part, which is kept until the output is complete.
"""

import csv
import io
import json
import os
import secrets
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from batchery.errors import DatasetError
from batchery_producer.files.journal import encoded, read_lines
from batchery_producer.files.rows import write_arrow, write_parquet
from batchery_producer.files.source import (
    EXTENSIONS,
    READ_ONLY,
    Remote,
    bare_name,
    compression_of_name,
    extra,
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
            DatasetError: The format cannot be compressed, or a library is missing.
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

        Args:
            part: Path of the part, which is complete.
            files: Names of the input's files, in order.
            convert: Converts an entry to its final form.

        Raises:
            DatasetError: The output cannot be written.
        """
        new = None if self.path is None else self.path.with_name(f"{self.path.name}.new")
        try:
            with self._open(new) as file:
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
    """Writes a table; a result that is not a text is written as JSON."""
    first = next(iter(entries()), {})
    columns = ["id", *(["file"] if "file" in first else []), "line", "result"]
    text = io.TextIOWrapper(file, "utf-8", "surrogatepass", newline="", write_through=False)
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    for entry in entries():
        writer.writerow([_cell(entry[column]) for column in columns])
    text.flush()
    text.detach()


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

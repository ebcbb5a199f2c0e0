"""The final form of an output that cannot be written line by line: sorted, or as a table.

While a run goes on, its results are gathered in a file of JSON lines, the part. When every row is
done, the part is written once more as what was asked for; it is kept until that is complete.
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
from batchery_producer.files.columnar import write_arrow, write_parquet
from batchery_producer.files.compression import READ_ONLY, bare_name, packing_of_name
from batchery_producer.files.extras import extra
from batchery_producer.files.jsonl import read_lines
from batchery_producer.files.source import Remote

Entry = Mapping[str, Any]
Entries = Callable[[], Iterable[Entry]]

#: What the name of the part ends with, after the name of the output.
PART_SUFFIX = ".part"

#: Ends of names, without that of a packing -> format. Everything else is JSON lines.
TABLES = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


class Final:
    """What an output shall become."""

    def __init__(
        self,
        path: Path | None,
        *,
        url: str | None = None,
        ordered: bool = False,
        spelled: bool = False,
    ) -> None:
        """Looks at the name, and at nothing else.

        Args:
            path: Where the output goes; None is standard output or a URL.
            url: Where the output goes if that is not on this machine.
            ordered: Whether its lines stand in the order of the input.
            spelled: Whether entries have another form at the end.

        Raises:
            DatasetError: There is no such packing for this format, or a library is missing.
        """
        self.path = path
        self.name = url or ("standard output" if path is None else str(path))
        self._remote = Remote.at(url) if url else None
        place = Path(url) if url else path
        self._format = "jsonl" if place is None else _format_of(place)
        self._packing = None if place is None else packing_of_name(place)
        self._ordered = ordered
        self._spelled = spelled
        if self._packing is not None:
            self._packing.unpacker()  # Better now than at the end.
        if self._format in ("parquet", "arrow"):
            extra("pyarrow")
        if self._packing is not None and self._format in ("parquet", "arrow"):
            raise DatasetError(
                f"{place}: {self._format} is packed as it is; name it without suffix"
            )
        if place is not None and place.suffix.lower() in READ_ONLY:
            raise DatasetError(f"{place}: cannot be written in this form; name it .gz or .zst")

    @property
    def needs_part(self) -> bool:
        """Whether results cannot be written to their place at once."""
        return self._format != "jsonl" or self._ordered or self._spelled or bool(self._remote)

    @property
    def is_there(self) -> bool:
        """Whether there is a file at the URL."""
        if self._remote is None:
            return False
        with self._remote.reaching(self.name):
            return bool(self._remote.filesystem.exists(self._remote.path))

    def part(self) -> Path:
        """Where results are gathered; for standard output and URLs among the temporary files."""
        if self.path is not None:
            return self.path.with_name(self.path.name + PART_SUFFIX)
        return Path(tempfile.gettempdir(), f"batchery-{secrets.token_hex(8)}.jsonl")

    def write(
        self, part: Path, files: Sequence[str], spell: Callable[[Entry], Entry] | None = None
    ) -> None:
        """Makes the output of its part.

        Args:
            part: Is complete.
            files: Names of the input's files, in order.
            spell: Gives an entry its final form.

        Raises:
            DatasetError: It cannot be written.
        """
        new = None if self.path is None else self.path.with_name(f"{self.path.name}.new")
        try:
            with self._open(new) as file:
                self._write(part, files, spell, file)
            if new is not None and self.path is not None:
                os.replace(new, self.path)
        except Exception as error:  # Arrow has errors of its own, from several classes.
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
        spell: Callable[[Entry], Entry] | None,
        file: BinaryIO,
    ) -> None:
        def entries() -> Iterator[Entry]:
            found = _sorted(part, files) if self._ordered else (each for each, _ in _all(part))
            return map(spell, found) if spell else iter(found)

        if self._format == "parquet":
            write_parquet(entries, file)
        elif self._format == "arrow":
            write_arrow(entries, file)
        else:
            target = self._packing.create(file) if self._packing else file
            if self._format == "jsonl":
                _write_lines(entries(), target)
            else:
                _write_csv(entries, target, "," if self._format == "csv" else "\t")
            if target is not file:
                target.close()


def _format_of(path: Path) -> str:
    return TABLES.get(Path(bare_name(path.name.lower())).suffix, "jsonl")


def _all(part: Path) -> Iterator[tuple[Entry, int]]:
    return read_lines(part) if part.exists() else iter(())


def _sorted(part: Path, files: Sequence[str]) -> Iterator[Entry]:
    """In the order of the input: of each line only its place in the part is held, eight bytes."""
    numbers = {name: number for number, name in enumerate(files)}
    places = [array("Q") for _ in files]
    start = 0
    for entry, end in _all(part):
        of_file, line = places[numbers.get(entry.get("file", ""), 0)], entry["line"]
        if line >= len(of_file):
            of_file.extend(array("Q", bytes(8 * (line + 1 - len(of_file)))))
        of_file[line] = start + 1  # 0 is a line that has no entry.
        start = end
    with open(part, "rb") as file:
        for of_file in places:
            for place in filter(None, of_file):
                file.seek(place - 1)
                yield json.loads(file.readline())


def _write_lines(entries: Iterable[Entry], file: BinaryIO) -> None:
    for entry in entries:
        try:
            line = json.dumps(entry, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            line = json.dumps(entry).encode()
        file.write(line + b"\n")


def _write_csv(entries: Entries, file: BinaryIO, delimiter: str) -> None:
    """A text stays as it is; another result is written as JSON."""
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

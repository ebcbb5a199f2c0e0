"""Sources: the files of a dataset, or standard input."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG

from batchery.errors import DatasetError
from batchery_producer.files.compression import bare_name

#: Names of the formats that can be read; `openai` is JSON lines as OpenAI's batch API takes them.
FORMATS = ("jsonl", "csv", "tsv", "text", "parquet", "arrow", "openai")

#: Ends of file names, without that of a packing, and the formats that they stand for.
EXTENSIONS: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}

#: Names standard input, and standard output.
STANDARD_STREAM = "-"

#: Bytes that a fingerprint reads at a time, and of a file in all: up to this size it covers every
#: byte, and of a larger file blocks that are spread evenly.
BLOCK_BYTES = 1024 * 1024
FINGERPRINT_BYTES = 1024 * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or standard input.

    Attributes:
        name: For messages.
        path: Where it is; `-` for standard input.
        format: One of `FORMATS`.
        size_bytes: None where there is no telling.
    """

    name: str
    path: Path
    format: str
    size_bytes: int | None

    @property
    def is_stdin(self) -> bool:
        """Whether it is standard input."""
        return str(self.path) == STANDARD_STREAM

    @property
    def is_empty(self) -> bool:
        """Whether it is a file without a single byte."""
        return self.size_bytes == 0

    def open(self) -> BufferedReader:
        """Opens it."""
        # A stream of our own: a thread that still waits in sys.stdin's would crash the exit.
        return open(0 if self.is_stdin else self.path, "rb", closefd=not self.is_stdin)

    def fingerprint(self) -> str:
        """What tells whether a file is still the same.

        Raises:
            DatasetError: It cannot be read.
        """
        size_bytes = self.size_bytes or 0
        step_bytes = BLOCK_BYTES * max(1, -(-size_bytes // FINGERPRINT_BYTES))
        digest = hashlib.blake2b(str(size_bytes).encode(), digest_size=16)
        try:
            with open(self.path, "rb") as file:
                for start in range(0, size_bytes, step_bytes):
                    file.seek(start)
                    digest.update(file.read(BLOCK_BYTES))
        except OSError as error:
            raise DatasetError(f"{self.name}: cannot be read: {error.strerror}") from None
        return digest.hexdigest()


def find_sources(names: str | Path | Sequence[str | Path], format_: str | None) -> list[Source]:
    """Finds the files that are meant, in the order in which they are named.

    Args:
        names: Paths, patterns such as `data/*.jsonl` whose files are sorted by name, or `-`.
        format_: Of all of them; None tells by their names.

    Raises:
        DatasetError: There is no such file, it cannot be read, or its format is unknown.
    """
    if isinstance(names, str | Path):
        names = [names]
    found = [path for name in names for path in _expand(str(name))]
    if not found:
        raise DatasetError("no input; name a file, a pattern, or - for standard input")
    if STANDARD_STREAM in found and len(found) > 1:
        raise DatasetError("standard input cannot be read together with files; choose one of them")
    path, count = Counter(found).most_common(1)[0]
    if count > 1:
        raise DatasetError(f"{path}: named twice; its rows would be submitted twice")
    sources = [_source(path, format_) for path in found]
    full = [each for each in sources if not each.is_empty]
    if not full:
        raise DatasetError(f"{sources[0].name}: empty; there is nothing to submit")
    # Empty ones among others are usual: what wrote them had fewer rows than files.
    return full


def _expand(name: str) -> list[str]:
    if name == STANDARD_STREAM or not glob.has_magic(name) or os.path.lexists(name):
        return [name]
    matches = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not matches:
        raise DatasetError(f"{name}: no file matches this pattern")
    return matches


def _source(name: str, format_: str | None) -> Source:
    if name == STANDARD_STREAM:
        return Source("standard input", Path(name), format_of(name, format_), None)
    path = Path(name)
    size_bytes = _size_of(path)
    return Source(name, path, format_of(name, format_), size_bytes)


def format_of(name: str, given: str | None) -> str:
    """The format of an input.

    Args:
        name: Of the file, or `-`.
        given: What the user says; None goes by the name.

    Raises:
        DatasetError: It is unknown, or the name tells none.
    """
    if given is not None:
        if given not in FORMATS:
            raise DatasetError(f"format {given!r}: unknown; there are {', '.join(FORMATS)}")
        return given
    if name == STANDARD_STREAM:
        return "jsonl"
    extension = Path(bare_name(name.lower())).suffix
    if extension not in EXTENSIONS:
        raise DatasetError(
            f"{name}: {extension or 'no extension'} tells no format;"
            f" say which with --format: {', '.join(FORMATS)}"
        )
    return EXTENSIONS[extension]


def _size_of(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    if path.is_dir():
        raise DatasetError(f"{path}: a directory; name files, such as '{path}/*.jsonl'")
    if not os.access(path, os.R_OK):
        raise DatasetError(f"{path}: cannot be read: Permission denied")
    return status.st_size if S_ISREG(status.st_mode) else None

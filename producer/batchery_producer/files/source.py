"""Where rows come from: files on this machine, files at URLs, standard input; compressed or not."""

import glob
import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from io import BufferedReader
from lzma import LZMAError
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any, BinaryIO, cast

from batchery.errors import DatasetError

#: Bytes that are read at a time.
CHUNK_BYTES = 256 * 1024

#: File extension, without that of a compression -> format.
EXTENSIONS: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
    ".text": "text",
}

#: Formats that can be read.
FORMATS = tuple(dict.fromkeys(EXTENSIONS.values()))

#: Extension of a compressed file -> how the file begins, and the module that reads and writes it.
COMPRESSIONS: Mapping[str, tuple[bytes, str]] = {
    ".gz": (rb"\x1f\x8b", "gzip"),
    ".bz2": (rb"BZh[1-9]1AY&SY", "bz2"),
    ".xz": (rb"\xfd7zXZ\x00", "lzma"),
    ".zst": (rb"\x28\xb5\x2f\xfd", "zstandard"),
}

#: Longest of these beginnings, in bytes.
MAGIC_BYTES = 10

#: What readers of formats raise where the content is wrong. pyarrow may believe that a file has two
#: gigabytes of metadata, and nobody validates names.
DAMAGES = (EOFError, ValueError, MemoryError, zlib.error, LZMAError, gzip.BadGzipFile)

#: Name of standard input and standard output.
STANDARD_STREAM = "-"


def extra(name: str) -> Any:
    """Imports a library of the extra `datasets`, or a module of it.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise DatasetError(
            f"{name.partition('.')[0]} is missing, which Parquet, Arrow, zstd or URLs need:"
            f" pip install 'batchery[datasets]' ({error})"
        ) from None


def decompressed(raw: BufferedReader) -> BinaryIO:
    """Reads a file from its start as if it were not compressed; returns a plain file itself."""
    first = raw.peek(MAGIC_BYTES)
    library = next((name for magic, name in COMPRESSIONS.values() if re.match(magic, first)), None)
    if library == "zstandard":
        # Its `open` would end after the first of several frames.
        decompressor = extra(library).ZstdDecompressor()
        frames = decompressor.stream_reader(raw, read_across_frames=True, closefd=False)
        return BufferedReader(frames, CHUNK_BYTES)
    return cast(BinaryIO, import_module(library).open(raw)) if library else raw


def is_damage(error: Exception, *, is_remote: bool) -> bool:
    """Whether a file's content is why it cannot be read; or a disk or a network does not answer."""
    of_libraries = (
        getattr(sys.modules.get("zstandard"), "ZstdError", EOFError),
        getattr(sys.modules.get("pyarrow"), "ArrowException", EOFError),
    )
    if isinstance(error, (*DAMAGES, *of_libraries)):
        return True
    return isinstance(error, OSError) and error.errno is None and not is_remote


def split_compression(name: str | Path) -> tuple[str, str]:
    """A file name without the extension of a compression, and that extension or nothing."""
    extension = PurePath(str(name).lower()).suffix
    if extension not in COMPRESSIONS:
        return str(name), ""
    return str(name)[: -len(extension)], extension


@contextmanager
def naming_errors(name: str, what: str = "written") -> Iterator[None]:
    """Names a file or a URL in the error of an operation on it.

    Raises:
        DatasetError: In place of the system's error; of a URL, in place of any.
    """
    try:
        yield
    except DatasetError:
        raise
    except Exception as error:  # Each filesystem has errors of its own.
        if not (isinstance(error, OSError) or is_url(name)):
            raise
        why = getattr(error, "strerror", None) or error
        if why is error and isinstance(error, FileNotFoundError):
            why = "there is no such file"
        raise DatasetError(f"{name}: cannot be {what}: {why}") from None


def find_remote(url: str) -> Any:
    """The file at a URL, as fsspec has it: its filesystem `fs`, and its `path` there.

    Raises:
        DatasetError: There is no such filesystem, or its package is missing, which the error names.
    """
    core = extra("fsspec.core")
    with naming_errors(url, "reached"):
        return core.open(url, "rb")


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or standard input.

    Attributes:
        name: For messages; path, URL, or `standard input`.
        format: One of `FORMATS`.
        size_bytes: Size of the file; None if it can be read only once.
        path: Where it is; None for standard input and URLs.
        remote: Where a file is that has a URL; fsspec's.
        version: A text that changes with the file.
    """

    name: str
    format: str
    size_bytes: int | None
    path: Path | None = None
    remote: Any = None
    version: str = ""

    @contextmanager
    def reading(self) -> Iterator[BufferedReader]:
        """Opens it.

        Raises:
            DatasetError: It cannot be read; also while it is open.
        """
        with naming_errors(self.name, "read"):
            if self.remote is None:
                # Not sys.stdin, because a thread that waits in it would crash the exit.
                raw = open(self.path or 0, "rb", closefd=self.path is not None)  # noqa: SIM115
            else:
                raw = BufferedReader(self.remote.fs.open(self.remote.path, "rb"), CHUNK_BYTES)
            with raw:
                yield raw


def find_sources(names: str | Path | Sequence[str | Path], format_: str | None) -> list[Source]:
    """Finds the files of a dataset, in the order of their names.

    Args:
        names: Paths or URLs, patterns such as `data/*.jsonl` whose files are sorted by name, or
            `-`.
        format_: Format of all files; None determines it by their names.

    Raises:
        DatasetError: A file is missing, cannot be read, or has an unknown format.
    """
    names = [names] if isinstance(names, str | Path) else names
    found = [path for name in names for path in _expand(str(name))]
    if not found:
        raise DatasetError("no input; name a file, a pattern, or - for standard input")
    if STANDARD_STREAM in found and len(found) > 1:
        raise DatasetError("standard input cannot be read together with files; choose one of them")
    places = set[str]()
    for path in found:
        if (place := path if is_url(path) else os.path.realpath(path)) in places:
            raise DatasetError(f"{path}: named twice; its rows would be submitted twice")
        places.add(place)
    sources = [_find_source(path, format_) for path in found]
    # Empty files among others are usual: their writer had fewer rows than files.
    full = [each for each in sources if each.size_bytes != 0]
    if not full:
        raise DatasetError(f"{sources[0].name}: empty; there is nothing to submit")
    return full


def is_url(name: str | Path) -> bool:
    """Whether it is a URL, such as `s3://bucket/rows.jsonl`."""
    return "://" in str(name)


def _expand(name: str) -> list[str]:
    if not glob.has_magic(name) or os.path.lexists(name):
        return [name]
    if is_url(name):
        remote = find_remote(name)
        with naming_errors(name, "read"):
            if remote.fs.exists(remote.path):
                return [name]  # A question mark may be part of a URL.
            there = remote.fs.glob(remote.path, detail=True).items()
            matches = [
                remote.fs.unstrip_protocol(path) for path, info in there if info["type"] == "file"
            ]
    else:
        matches = [path for path in glob.glob(name, recursive=True) if not os.path.isdir(path)]
    if not matches:
        raise DatasetError(f"{name}: no file matches this pattern")
    return sorted(matches)


def _find_source(name: str, format_: str | None) -> Source:
    if name == STANDARD_STREAM:
        return Source("standard input", _choose_format(name, format_), None)
    with naming_errors(name, "read"):
        if is_url(name):
            remote = find_remote(name)
            info = remote.fs.info(remote.path)
            is_folder, size_bytes = info["type"] == "directory", info["size"]
            # The key of HTTP has neither.
            version = f"{remote.fs.ukey(remote.path)} {size_bytes} {info.get('ETag')}"
            source = Source(name, "", size_bytes, remote=remote, version=version)
        else:
            path = Path(name)
            is_folder, status = path.is_dir(), path.stat()
            size_bytes = status.st_size if S_ISREG(status.st_mode) else None
            version = f"{status.st_size} {status.st_mtime_ns}"
            source = Source(name, "", size_bytes, path, version=version)
    if is_folder:
        raise DatasetError(f"{name}: a directory; name files, such as '{name}/*.jsonl'")
    return replace(source, format=_choose_format(name, format_))


def _choose_format(name: str, given: str | None) -> str:
    if given is not None and given not in FORMATS:
        raise DatasetError(f"format {given!r}: unknown; there are {', '.join(FORMATS)}")
    if given is not None or name == STANDARD_STREAM:
        return given or "jsonl"
    extension = PurePath(split_compression(name)[0].lower()).suffix
    if extension not in EXTENSIONS:
        raise DatasetError(
            f"{name}: {extension or 'no extension'} tells no format;"
            f" name it with --format: {', '.join(FORMATS)}"
        )
    return EXTENSIONS[extension]

"""Where rows come from: files on this machine, files at URLs, standard input; compressed or not."""

import glob
import gzip
import hashlib
import os
import posixpath
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

#: Format of what is no list of rows: each file is a row, and its bytes are the item.
FILES = "files"

#: How the names of pictures and sounds end, which a folder is looked through for.
MEDIA_EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".heic", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"),
    *(".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".mp4", ".mpeg", ".mpga", ".oga"),
    *(".ogg", ".opus", ".wav", ".webm", ".wma"),
)

#: Formats that can be read.
FORMATS = (*dict.fromkeys(EXTENSIONS.values()), FILES)

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
        files: Of the format `files`: the files that are its rows.
    """

    name: str
    format: str
    size_bytes: int | None
    path: Path | None = None
    remote: Any = None
    version: str = ""
    files: Sequence["Source"] = ()

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
    if STANDARD_STREAM in (paths := list(map(str, names))) and len(paths) > 1:
        raise DatasetError("standard input cannot be read together with files; choose one of them")
    found = {name: list(_find_all(name, format_)) for name in paths}
    every = [each for some in found.values() for each in some]
    if not every:
        raise DatasetError("no input; name a file, a pattern, or - for standard input")
    places = set[str]()
    for each in every:
        place = each.remote.full_name if each.remote else os.path.realpath(each.name)
        if place in places:
            raise DatasetError(f"{each.name}: named twice; its rows would be submitted twice")
        places.add(place)
    sources = [each for name, some in found.items() for each in _join_files(name, some)]
    # Empty files among others are usual: their writer had fewer rows than files.
    full = [each for each in sources if each.size_bytes != 0]
    if not full:
        raise DatasetError(f"{sources[0].name}: empty; there is nothing to submit")
    return full


def _find_all(name: str, format_: str | None) -> Iterator[Source]:
    """The files that a name stands for: itself, those of a pattern, or those in a folder."""
    for path in _expand(name):
        source = _find_source(path, format_)
        if source is not None:
            yield source
        elif format_ not in (None, FILES):
            raise DatasetError(f"{path}: a directory; name files, such as '{path}/*.jsonl'")
        else:
            yield from _find_in_folder(path, format_)


def _find_in_folder(folder: str, format_: str | None) -> Iterator[Source]:
    """The files in a folder, at any depth and not hidden; without a format, pictures and sounds."""
    with naming_errors(folder, "read"):
        if is_url(folder):
            remote = find_remote(folder)
            paths = remote.fs.find(remote.path)
            below = {remote.fs.unstrip_protocol(each): each[len(remote.path) :] for each in paths}
        else:
            files = filter(Path.is_file, Path(folder).rglob("*"))
            below = {str(each): f"/{each.relative_to(folder)}" for each in files}
    names = sorted(each for each, path in below.items() if "/." not in path)
    if format_ is None:
        names = [each for each in names if _find_extension(each) in MEDIA_EXTENSIONS]
    if not names:
        raise DatasetError(
            f"{folder}: a directory without pictures or sounds; name files, such as"
            f" '{folder}/*.jsonl'"
        )
    for each in names:
        if (source := _find_source(each, FILES)) is not None:
            yield source


def _join_files(name: str, sources: Sequence[Source]) -> Iterator[Source]:
    """Makes one source of the files of a name that are rows, and leaves the others as they are.

    Args:
        name: As the user has it: of a file, of a folder, or a pattern.
        sources: What it stands for.
    """
    files = [each for each in sources if each.format == FILES]
    if files:
        names = _relative_names(name, files)
        named = [replace(each, name=row) for each, row in zip(files, names, strict=True)]
        rows = "".join(f"{each.name}\0{each.version}\0" for each in named)
        yield Source(
            name,
            FILES,
            sum(each.size_bytes or 0 for each in files),
            version=hashlib.sha256(rows.encode(errors="surrogateescape")).hexdigest(),
            files=named,
        )
    yield from (each for each in sources if each.format != FILES)


def _relative_names(name: str, files: Sequence[Source]) -> Iterator[str]:
    """The paths of files below a folder, the fixed part of a pattern, or their own folder."""
    base = name
    while base and (glob.has_magic(base) or base == files[0].name):
        base = os.path.dirname(base)
    if files[0].remote is None:
        return (os.path.relpath(each.name, base or ".") for each in files)
    top = find_remote(base).path
    return (posixpath.relpath(each.remote.path, top) for each in files)


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


def _find_source(name: str, format_: str | None) -> Source | None:
    """The file of a name; None if it is a folder."""
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
    return None if is_folder else replace(source, format=_choose_format(name, format_))


def _choose_format(name: str, given: str | None) -> str:
    if given is not None and given not in FORMATS:
        raise DatasetError(f"format {given!r}: unknown; there are {', '.join(FORMATS)}")
    if given is not None or name == STANDARD_STREAM:
        return given or "jsonl"
    extension = _find_extension(name)
    if extension in MEDIA_EXTENSIONS:
        return FILES
    if extension not in EXTENSIONS:
        raise DatasetError(
            f"{name}: {extension or 'no extension'} tells no format;"
            f" name it with --format: {', '.join(FORMATS)}"
        )
    return EXTENSIONS[extension]


def _find_extension(name: str) -> str:
    return PurePath(split_compression(name)[0].lower()).suffix

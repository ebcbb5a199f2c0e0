"""Sources: the files of a dataset on this machine or at URLs, or standard input; compressed or not.

gzip and zstd are ours to read and write, others are read through fsspec. They are recognised by
their first bytes, and written one member at a time, so that a file that was torn can be read and
continued. fsspec's own reader of zstd stops after the first member.
"""

import glob
import gzip
import hashlib
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from io import BufferedReader
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any, BinaryIO, NamedTuple, cast

from batchery.errors import DatasetError

#: Library -> what needs it, for messages, and the extra that installs it.
USES = {
    "fsspec": ("URLs, bz2 and xz", "datasets"),
    "pyarrow": ("Parquet and Arrow files", "datasets"),
    "zstandard": ("zstd files", "datasets"),
}

#: Bytes that are read at a time.
CHUNK_BYTES = 256 * 1024

#: Formats that can be read; `openai` means requests of OpenAI's batch API in JSON lines.
FORMATS = ("jsonl", "csv", "tsv", "text", "parquet", "arrow", "openai")

#: File extension, without that of a compression -> format.
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

#: Name of standard input and standard output.
STANDARD_STREAM = "-"

#: Size of a fingerprint's blocks, and maximum that it reads of a file, in bytes. The fingerprint of
#: a larger file covers blocks at regular distances.
BLOCK_BYTES = 1024 * 1024
FINGERPRINT_BYTES = 1024 * BLOCK_BYTES


def extra(name: str) -> Any:
    """Imports a library, or a module of it.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        things, name = USES[library]
        raise DatasetError(
            f"{things} need {library}: pip install 'batchery[{name}]' ({error})"
        ) from None


class Compression(NamedTuple):
    """A way to compress a stream of bytes.

    Attributes:
        suffix: Of file names.
        magic: First bytes of a file.
        compress: Makes one member of some bytes; a file may hold many, one after the other.
        decompressor: Makes an object for one member: `decompress`, `eof`, `unused_data`.
        open: Reads a file as if it were not compressed.
        create: Writes a file as if it were not compressed; the file itself is left open.
    """

    suffix: str
    magic: bytes
    compress: Callable[[bytes | bytearray], bytes]
    decompressor: Callable[[], Any]
    open: Callable[[BinaryIO], BinaryIO]
    create: Callable[[BinaryIO], BinaryIO]


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    decompressor = extra("zstandard").ZstdDecompressor()
    stream = decompressor.stream_reader(raw, read_across_frames=True, closefd=False)
    # zstandard's stream has no readline.
    return BufferedReader(stream, CHUNK_BYTES)


def _create_zstd(raw: BinaryIO) -> BinaryIO:
    compressor = extra("zstandard").ZstdCompressor()
    return cast(BinaryIO, compressor.stream_writer(raw, closefd=False))


GZIP = Compression(
    suffix=".gz",
    magic=b"\x1f\x8b",
    compress=gzip.compress,
    decompressor=lambda: zlib.decompressobj(wbits=31),
    open=lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw)),
    create=lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="wb")),
)
ZSTD = Compression(
    suffix=".zst",
    magic=b"\x28\xb5\x2f\xfd",
    compress=lambda data: cast(bytes, extra("zstandard").ZstdCompressor().compress(data)),
    decompressor=lambda: extra("zstandard").ZstdDecompressor().decompressobj(),
    open=_open_zstd,
    create=_create_zstd,
)
COMPRESSIONS = (GZIP, ZSTD)

#: Other endings of file names, and what fsspec calls them: they can be read and not written.
READ_ONLY = {".bz2": "bz2", ".xz": "xz"}

#: Longest of the magic numbers.
MAGIC_BYTES = 4


def decompressed(raw: BufferedReader, name: str) -> BinaryIO:
    """Reads a file from its start as if it were not compressed; returns a plain file itself."""
    first = raw.peek(MAGIC_BYTES)
    compression = next((each for each in COMPRESSIONS if first.startswith(each.magic)), None)
    if compression is not None:
        return compression.open(raw)
    other = READ_ONLY.get(PurePath(name.lower()).suffix)
    if other is None:
        return raw
    return cast(BinaryIO, extra("fsspec.compression").compr[other](raw, mode="rb"))


def compression_of_name(name: str | PurePath) -> Compression | None:
    """The compression that a file name asks for."""
    return next((each for each in COMPRESSIONS if str(name).lower().endswith(each.suffix)), None)


def bare_name(name: str | PurePath) -> str:
    """A file name without the suffix of its compression."""
    suffix = PurePath(str(name).lower()).suffix
    is_compressed = suffix in READ_ONLY or compression_of_name(name) is not None
    return str(name)[: -len(suffix)] if is_compressed else str(name)


def decompression_errors() -> tuple[type[Exception], ...]:
    """What reading a compressed file may raise when it is damaged."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        return (*errors, extra("zstandard").ZstdError)
    except DatasetError:
        return errors


def is_damage(error: Exception, *, is_remote: bool) -> bool:
    """Whether such an error is of the content; otherwise a disk or a network does not answer."""
    if isinstance(error, gzip.BadGzipFile) or not isinstance(error, OSError):
        return True
    return error.errno is None and not is_remote


def members(file: BinaryIO, compression: Compression) -> Iterator[tuple[bytes, int]]:
    """Decompresses a file member by member, up to the first incomplete one.

    Yields:
        The content of a member, and the offset in the file at which the member ends.
    """
    end, data, ended = 0, b"", False
    while True:
        decompressor, parts = compression.decompressor(), []
        began = False
        try:
            while not decompressor.eof:
                if not data:
                    data = file.read(CHUNK_BYTES)
                    ended = not data
                if ended:
                    return
                began = True
                end += len(data)
                parts.append(decompressor.decompress(data))
                data = b""
        except decompression_errors():
            return
        data = decompressor.unused_data
        end -= len(data)
        if began:
            yield b"".join(parts), end


class Remote(NamedTuple):
    """A file at a URL.

    Attributes:
        filesystem: One of fsspec's.
        path: Of the file in it.
    """

    filesystem: Any
    path: str

    @classmethod
    def at(cls, url: str) -> "Remote":
        """Finds the filesystem of a URL.

        Raises:
            DatasetError: There is none, or its package is not installed.
        """
        core, registry = extra("fsspec.core"), extra("fsspec.registry")
        protocol = url.partition("://")[0]
        try:
            return cls(*core.url_to_fs(url))
        except ImportError as error:
            known = registry.known_implementations.get(protocol, {"class": protocol})["class"]
            package, *inner = known.split(".")
            if package == "fsspec":
                package = f"'fsspec[{inner[1]}]'"
            raise DatasetError(
                f"{url}: its package is missing: pip install {package} ({error})"
            ) from None
        except Exception as error:  # noqa: BLE001 (each filesystem has errors of its own)
            raise DatasetError(f"{url}: cannot be reached: {error}") from None

    @contextmanager
    def reaching(self, url: str) -> Iterator[None]:
        """Names the URL in whatever error the filesystem raises.

        Raises:
            DatasetError: The file cannot be read or written.
        """
        try:
            yield
        except DatasetError:
            raise
        except FileNotFoundError:
            raise DatasetError(f"{url}: there is no such file") from None
        except Exception as error:  # noqa: BLE001 (as above)
            raise DatasetError(f"{url}: cannot be reached: {error}") from None


@dataclass(frozen=True, slots=True)
class Source:
    """A file, or standard input.

    Attributes:
        name: For messages.
        path: Where it is; `-` for standard input. Of a URL, the path in its filesystem.
        format: One of `FORMATS`.
        size_bytes: Size of the file; None if unknown.
        remote: Where a file is that has a URL; None if it is on this machine.
        etag: What a server says of this version of the file, if it does.
    """

    name: str
    path: Path
    format: str
    size_bytes: int | None
    remote: Remote | None = None
    etag: Any = None

    @property
    def is_stdin(self) -> bool:
        """Whether it is standard input."""
        return str(self.path) == STANDARD_STREAM

    def open(self) -> BufferedReader:
        """Opens it."""
        if self.remote is not None:
            with self.remote.reaching(self.name):
                return BufferedReader(self.remote.filesystem.open(self.remote.path, "rb"))
        # Not sys.stdin, because a thread that waits in it would crash the exit.
        return open(0 if self.is_stdin else self.path, "rb", closefd=not self.is_stdin)

    def fingerprint(self) -> str:
        """A text that changes with the file.

        Raises:
            DatasetError: The file cannot be read.
        """
        if self.remote is not None:
            with self.remote.reaching(self.name):
                # That of HTTP takes files for unchanging.
                key = self.remote.filesystem.ukey(self.remote.path)
            return f"{key} {self.size_bytes} {self.etag}"
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
    """Finds the files of a dataset, in the order of their names.

    Args:
        names: Paths or URLs, patterns such as `data/*.jsonl` whose files are sorted by name, or
            `-`.
        format_: Format of all files; None determines it by their names.

    Raises:
        DatasetError: A file is missing, cannot be read, or has an unknown format.
    """
    if isinstance(names, str | Path):
        names = [names]
    found = [path for name in names for path in _expand(str(name))]
    if not found:
        raise DatasetError("no input; name a file, a pattern, or - for standard input")
    if STANDARD_STREAM in found and len(found) > 1:
        raise DatasetError("standard input cannot be read together with files; choose one of them")
    places = Counter(path if is_url(path) else os.path.realpath(path) for path in found)
    path, count = places.most_common(1)[0]
    if count > 1:
        raise DatasetError(f"{path}: named twice; its rows would be submitted twice")
    sources = [_source(path, format_) for path in found]
    full = [each for each in sources if each.size_bytes != 0]
    if not full:
        raise DatasetError(f"{sources[0].name}: empty; there is nothing to submit")
    # Empty files among others are usual: their writer had fewer rows than files.
    return full


def matches_pattern(path: Path, names: str | Path | Sequence[str | Path]) -> bool:
    """Whether a pattern among the names of inputs matches a file, which need not exist yet."""
    names = [names] if isinstance(names, str | Path) else names
    patterns = [name for name in map(str, names) if glob.has_magic(name)]
    absolute = [os.path.abspath(each) for each in patterns if not os.path.lexists(each)]
    place = PurePath(os.path.abspath(path))
    # `match` takes two stars for one, and `glob` for any number of folders.
    return any(place.match(each) or place.match(each.replace("**/", "")) for each in absolute)


def is_url(name: str | Path) -> bool:
    """Whether it is a URL, such as `s3://bucket/rows.jsonl`."""
    return "://" in str(name)


def _expand(name: str) -> list[str]:
    if is_url(name):
        return _expand_url(name) if glob.has_magic(name) else [name]
    if name == STANDARD_STREAM or not glob.has_magic(name) or os.path.lexists(name):
        return [name]
    matches = sorted(path for path in glob.glob(name, recursive=True) if not os.path.isdir(path))
    if not matches:
        raise DatasetError(f"{name}: no file matches this pattern")
    return matches


def _expand_url(url: str) -> list[str]:
    remote = Remote.at(url)
    files = remote.filesystem
    with remote.reaching(url):
        if files.exists(remote.path):
            return [url]  # A question mark may be part of a URL.
        found = files.glob(remote.path, detail=True)
        matches = [path for path, info in found.items() if info["type"] != "directory"]
        if not matches:
            raise DatasetError(f"{url}: no file matches this pattern")
        return sorted(files.unstrip_protocol(path) for path in matches)


def _source(name: str, format_: str | None) -> Source:
    if is_url(name):
        return _source_at(name, format_)
    if name == STANDARD_STREAM:
        return Source("standard input", Path(name), choose_format(name, format_), None)
    path = Path(name)
    size_bytes = _read_size(path)
    return Source(name, path, choose_format(name, format_), size_bytes)


def _source_at(url: str, format_: str | None) -> Source:
    remote = Remote.at(url)
    with remote.reaching(url):
        info = remote.filesystem.info(remote.path)
    if info["type"] == "directory":
        raise DatasetError(f"{url}: a directory; name files, such as '{url}/*.jsonl'")
    path = Path(remote.path)
    return Source(
        url, path, choose_format(str(path), format_), info["size"], remote, info.get("ETag")
    )


def choose_format(name: str, given: str | None) -> str:
    """The format of an input.

    Args:
        name: Name of the file, or `-`.
        given: Format that the user names; None determines it by the name.

    Raises:
        DatasetError: The format is unknown, or the name determines none.
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
            f" name it with --format: {', '.join(FORMATS)}"
        )
    return EXTENSIONS[extension]


def _read_size(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    if path.is_dir():
        raise DatasetError(f"{path}: a directory; name files, such as '{path}/*.jsonl'")
    if not os.access(path, os.R_OK):
        raise DatasetError(f"{path}: cannot be read: Permission denied")
    return status.st_size if S_ISREG(status.st_mode) else None

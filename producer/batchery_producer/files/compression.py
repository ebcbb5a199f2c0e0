"""Compressed files: gzip and zstd are ours to read and write, others are read through fsspec.

gzip and zstd are recognised by their first bytes, and written one member at a time, so that a file
that was torn can be read and continued. fsspec's own reader of zstd stops after the first member.
"""

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple, cast

from batchery.errors import DatasetError
from batchery_producer.files.extras import extra

#: Bytes that are read at a time.
CHUNK_BYTES = 256 * 1024


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


def _open_gzip(raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw))


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    decompressor = extra("zstandard").ZstdDecompressor()
    stream = decompressor.stream_reader(raw, read_across_frames=True, closefd=False)
    # zstandard's stream has no readline.
    return BufferedReader(stream, CHUNK_BYTES)


def _create_gzip(raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="wb"))


def _create_zstd(raw: BinaryIO) -> BinaryIO:
    compressor = extra("zstandard").ZstdCompressor()
    return cast(BinaryIO, compressor.stream_writer(raw, closefd=False))


def _compress_zstd(data: bytes | bytearray) -> bytes:
    return cast(bytes, extra("zstandard").ZstdCompressor().compress(data))


GZIP = Compression(
    suffix=".gz",
    magic=b"\x1f\x8b",
    compress=gzip.compress,
    decompressor=lambda: zlib.decompressobj(wbits=31),
    open=_open_gzip,
    create=_create_gzip,
)
ZSTD = Compression(
    suffix=".zst",
    magic=b"\x28\xb5\x2f\xfd",
    compress=_compress_zstd,
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
    """Reads a file as if it were not compressed; returns the file itself if it is not.

    Args:
        raw: At its start.
        name: Of the file.

    Raises:
        DatasetError: A library is missing.
    """
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

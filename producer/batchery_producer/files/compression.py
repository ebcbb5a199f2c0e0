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


class Packing(NamedTuple):
    """A way to pack a stream of bytes.

    Attributes:
        suffix: Of file names.
        magic: First bytes of a file.
        pack: Makes a member of its own of some bytes; a file may hold many, one after the other.
        unpacker: Makes an object that unpacks one member: `decompress`, `eof`, `unused_data`.
        open: Reads a file as if it were not packed.
        create: Writes a file as if it were not packed; the file itself is left open.
    """

    suffix: str
    magic: bytes
    pack: Callable[[bytes | bytearray], bytes]
    unpacker: Callable[[], Any]
    open: Callable[[BinaryIO], BinaryIO]
    create: Callable[[BinaryIO], BinaryIO]


def _open_gzip(raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw))


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    unpacker = extra("zstandard").ZstdDecompressor()
    stream = unpacker.stream_reader(raw, read_across_frames=True, closefd=False)
    # It reads no lines by itself.
    return BufferedReader(stream, CHUNK_BYTES)


def _create_gzip(raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="wb"))


def _create_zstd(raw: BinaryIO) -> BinaryIO:
    packer = extra("zstandard").ZstdCompressor()
    return cast(BinaryIO, packer.stream_writer(raw, closefd=False))


def _pack_zstd(data: bytes | bytearray) -> bytes:
    return cast(bytes, extra("zstandard").ZstdCompressor().compress(data))


GZIP = Packing(
    suffix=".gz",
    magic=b"\x1f\x8b",
    pack=gzip.compress,
    unpacker=lambda: zlib.decompressobj(wbits=31),
    open=_open_gzip,
    create=_create_gzip,
)
ZSTD = Packing(
    suffix=".zst",
    magic=b"\x28\xb5\x2f\xfd",
    pack=_pack_zstd,
    unpacker=lambda: extra("zstandard").ZstdDecompressor().decompressobj(),
    open=_open_zstd,
    create=_create_zstd,
)
PACKINGS = (GZIP, ZSTD)

#: Other endings of file names, and what fsspec calls them: they can be read and not written.
READ_ONLY = {".bz2": "bz2", ".xz": "xz"}

#: Longest of the magic numbers.
MAGIC_BYTES = 4


def unpacked(raw: BufferedReader, name: str) -> BinaryIO:
    """What a file holds, read as if it were not packed; the file itself if it is not.

    Args:
        raw: At its start.
        name: Of the file.

    Raises:
        DatasetError: A library is missing.
    """
    first = raw.peek(MAGIC_BYTES)
    packing = next((each for each in PACKINGS if first.startswith(each.magic)), None)
    if packing is not None:
        return packing.open(raw)
    other = READ_ONLY.get(PurePath(name.lower()).suffix)
    if other is None:
        return raw
    return cast(BinaryIO, extra("fsspec.compression").compr[other](raw, mode="rb"))


def packing_of_name(name: str | PurePath) -> Packing | None:
    """The packing that a file name asks for."""
    return next((each for each in PACKINGS if str(name).lower().endswith(each.suffix)), None)


def bare_name(name: str | PurePath) -> str:
    """A file name without the suffix of its packing."""
    suffix = PurePath(str(name).lower()).suffix
    is_packed = suffix in READ_ONLY or packing_of_name(name) is not None
    return str(name)[: -len(suffix)] if is_packed else str(name)


def unpack_errors() -> tuple[type[Exception], ...]:
    """What reading a packed file may raise when it is damaged."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
    try:
        return (*errors, extra("zstandard").ZstdError)
    except DatasetError:
        return errors


def members(file: BinaryIO, packing: Packing) -> Iterator[tuple[bytes, int]]:
    """Unpacks a file member by member, up to the first that is not whole.

    Yields:
        What was packed, and where in the file the member ends.
    """
    end, data, ended = 0, b"", False
    while True:
        unpacker, parts = packing.unpacker(), []
        began = False
        try:
            while not unpacker.eof:
                if not data:
                    data = file.read(CHUNK_BYTES)
                    ended = not data
                if ended:
                    return
                began = True
                end += len(data)
                parts.append(unpacker.decompress(data))
                data = b""
        except unpack_errors():
            return
        data = unpacker.unused_data
        end -= len(data)
        if began:
            yield b"".join(parts), end

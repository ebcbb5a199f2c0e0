"""Inputs at URLs, and compressed ones."""

import bz2
import gzip
import io
import lzma
import os
import sys
from collections.abc import Iterator
from errno import EIO
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.source import find_sources

FOLDER = "memory://rows"


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's filesystem in memory, empty before and after."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def items(dataset: Dataset) -> list[Any]:
    return [each.item for each in dataset if not each.broken]


def zstd(data: bytes) -> bytes:
    """Two members, as our own output has."""
    half = len(data) // 2
    compressor = zstandard.ZstdCompressor()
    return compressor.compress(data[:half]) + compressor.compress(data[half:])


PACKERS = [("", bytes), (".gz", gzip.compress), (".zst", zstd), (".bz2", bz2.compress)]
PACKERS += [(".xz", lzma.compress)]


@pytest.mark.parametrize(("ending", "pack"), PACKERS, ids=[name or "plain" for name, _ in PACKERS])
@pytest.mark.parametrize("place", ["local", "memory"])
def test_input_is_unpacked_on_every_filesystem(
    tmp_path: Path, memory: Any, place: str, ending: str, pack: Any
) -> None:
    data = pack("".join(f'{{"text": "row {n}"}}\n' for n in range(100)).encode())
    if place == "local":
        name = str(tmp_path / f"in.jsonl{ending}")
        Path(name).write_bytes(data)
    else:
        name = f"{FOLDER}/in.jsonl{ending}"
        memory.pipe(name, data)
    dataset = Dataset(name)
    assert items(dataset) == items(dataset) == [f"row {n}" for n in range(100)]
    assert dataset.total == 100


def test_url_pattern_names_its_files_in_order(memory: Any) -> None:
    for name in ("b", "a", "c"):
        memory.pipe(f"{FOLDER}/{name}.txt", name.encode())
    memory.pipe(f"{FOLDER}/d.csv", b"text\n")
    found = find_sources(f"{FOLDER}/*.txt", None)
    assert [each.name for each in found] == [f"memory:///rows/{name}.txt" for name in "abc"]
    assert [each.size_bytes for each in found] == [1, 1, 1]
    assert items(Dataset([each.name for each in found])) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", r"memory://rows/none\.txt: .* there is no such file"),
        ("*.csv", r"memory://rows/\*\.csv: no file matches"),
        ("inner", "memory://rows/inner: a directory"),
    ],
)
def test_url_of_no_file_is_refused(memory: Any, name: str, message: str) -> None:
    memory.pipe(f"{FOLDER}/inner/a.txt", b"a")
    with pytest.raises(DatasetError, match=message):
        Dataset(f"{FOLDER}/{name}")


@pytest.mark.parametrize(
    ("url", "module", "message"),
    [
        ("s3://bucket/a.txt", "s3fs", "s3://bucket/a.txt: cannot be reached: .*s3fs"),
        ("nowhere://a.txt", "nowhere", "Protocol not known"),
        ("memory://a.txt", "fsspec.core", r"pip install 'batchery\[datasets\]'"),
    ],
)
def test_url_whose_package_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetError, match=message):
        Dataset(url)


def test_version_of_a_file_changes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    before = find_sources(path, None)[0].version
    assert find_sources(path, None)[0].version == before
    path.write_text("two\n")
    os.utime(path, ns=(0, 1))
    assert find_sources(path, None)[0].version != before


def test_version_of_a_url_changes_with_the_file(memory: Any) -> None:
    url = f"{FOLDER}/in.txt"
    memory.pipe(url, b"one\n")
    before = find_sources(url, None)[0].version
    assert find_sources(url, None)[0].version == before
    memory.pipe(url, b"two\n")
    assert find_sources(url, None)[0].version != before


class Breaking(io.RawIOBase):
    """A file of which only the first bytes can be read."""

    def __init__(self, data: bytes, error: Exception) -> None:
        self._parts = iter([data])
        self._error = error

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return 0

    def readinto(self, buffer: Any) -> int:
        if (part := next(self._parts, None)) is None:
            raise self._error
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("local", OSError(EIO, "Input/output error")),
        ("memory", TimeoutError("no answer")),
        ("memory", RuntimeError("no answer")),
    ],
    ids=["disk", "network", "library"],
)
def test_input_that_cannot_be_read_any_more_is_not_taken_for_its_end(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    url = str(tmp_path / "in.txt") if place == "local" else f"{FOLDER}/in.txt"
    fsspec.open(url, "wb").open().write(b"one\ntwo\n")
    broken = Breaking(b"one\ntwo\n", error)
    monkeypatch.setattr(type(memory), "open", lambda *_, **__: broken)
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.BufferedReader(broken))
    rows = iter(Dataset(url))
    assert [next(rows).line, next(rows).line] == [1, 2]
    with pytest.raises(DatasetError, match=r"in\.txt: cannot be re(ad|ached): .*(error|answer)"):
        next(rows)


def test_version_of_a_url_changes_with_what_a_server_says_of_the_file(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, kind = f"{FOLDER}/in.txt", type(memory)
    memory.pipe(url, b"one\n")
    # As fsspec's filesystem of HTTP.
    monkeypatch.setattr(kind, "ukey", lambda _, path: path)
    found = set()
    for size, etag in ((4, None), (5, None), (4, '"1"'), (4, '"2"')):
        info = {"name": url, "type": "file", "size": size, "ETag": etag}
        monkeypatch.setattr(kind, "info", lambda *_, info=info, **__: info)
        found.add(find_sources(url, None)[0].version)
    assert len(found) == 4

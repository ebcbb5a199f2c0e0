import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from batchery import DatasetError
from batchery_producer.gateway.batches.files import TORN_AFTER_S, Storage
from support import object_store
from support.object_store import PartsFileSystem, StoreError


@pytest.fixture(params=["folder", "file://", "memory://", "parts://"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A storage in each kind of place."""
    files = fsspec.filesystem("memory")
    object_store.register()
    PartsFileSystem.contents.clear()
    urls = {"folder": f"{tmp_path}/x", "file://": f"file://{tmp_path}/x"}
    yield Storage(urls.get(request.param, f"{request.param}x"))
    if files.exists("/x"):
        files.rm("/x", recursive=True)


def skip_memory(storage: Storage) -> None:
    if isinstance(storage._files, MemoryFileSystem):
        pytest.skip("fsspec's memory has a file as soon as it is opened")


def read(storage: Storage, name: str) -> bytes | None:
    opened = storage.open(name)
    if opened is None:
        return None
    with opened:
        return opened.read()


def read_names(storage: Storage) -> list[str]:
    """What is in folder `a`, and is whole."""
    files, path = storage._files, storage._path("a")
    files.invalidate_cache(path)
    found = files.ls(path, detail=False) if files.exists(path) else []
    names = (str(each).rpartition("/")[2] for each in found)
    return sorted(name for name in names if not name.endswith(".new"))


def test_file_is_written_and_read_and_replaced_and_removed(storage: Storage) -> None:
    assert read(storage, "a/b.json") is None
    assert storage.open("a/b.json") is None
    assert read_names(storage) == []
    for content in (b"one", b"another"):
        storage.write("a/b.json", content)
        assert read(storage, "a/b.json") == content
    storage.write("a/a.json", b"")
    assert read_names(storage) == ["a.json", "b.json"]
    storage.remove("a/b.json")
    storage.remove("a/b.json")
    assert read_names(storage) == ["a.json"]
    storage.remove_folder("a")
    storage.remove_folder("a")
    assert read_names(storage) == []
    storage.write("a/b.json", b"anew")
    assert read_names(storage) == ["b.json"]


def test_file_that_is_not_written_to_its_end_is_not_there(storage: Storage) -> None:
    skip_memory(storage)
    storage.write("a/b.json", b"old")
    with suppress(RuntimeError), storage.create("a/b.json") as file:
        file.write(b"half of it")
        raise RuntimeError
    assert read(storage, "a/b.json") == b"old"
    assert read_names(storage) == ["b.json"]


def test_file_is_not_there_before_it_is_whole(storage: Storage) -> None:
    skip_memory(storage)
    with storage.create("a/b.json") as file:
        file.write(b"half of it")
        assert read_names(storage) == []
    assert read_names(storage) == ["b.json"]


def test_file_is_read_line_by_line_up_to_a_maximum(storage: Storage) -> None:
    storage.write("a.jsonl", b"one\ntwo\n" + b"x" * 300_000)
    opened = storage.open("a.jsonl")
    assert opened is not None
    with opened:
        assert [opened.readline(10), opened.readline(2), opened.readline(10)] == [
            *[b"one\n", b"tw", b"o\n"]
        ]
        assert len(opened.read()) == 300_000


def test_store_that_is_away_is_told_and_the_caller_s_own_errors_are_left() -> None:
    object_store.register()
    storage, files = Storage("parts://x"), fsspec.filesystem("parts")
    files.is_away = True
    try:
        with pytest.raises(DatasetError, match="files: a: cannot be reached: StoreError"):
            storage.open("a")
        with pytest.raises(DatasetError, match="files: a: cannot be reached: StoreError"):
            storage.write("a", b"1")
    finally:
        files.is_away = False
    with pytest.raises(StoreError, match="mine"), storage.create("a"):
        raise StoreError("mine")
    assert read(storage, "a") is None


def test_place_that_cannot_be_had_is_told_without_its_url(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    storage = Storage(f"file://{tmp_path}/file")
    with pytest.raises(DatasetError, match=r"^files: a/b: cannot be reached: Not a directory"):
        storage.write("a/b", b"")
    with pytest.raises(DatasetError, match=r"cannot be reached: .*s3fs"):
        Storage("s3://bucket/files")


def test_what_a_killed_upload_has_left_is_removed_after_a_day(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("a/whole", b"whole")
    writing = storage.create("a/torn")
    writing.__enter__().write(b"half")  # Its process is killed here.
    (torn,) = tmp_path.rglob("*.new")
    now_s = torn.stat().st_mtime
    storage.remove_torn(now_s + TORN_AFTER_S - 1)
    assert torn.exists()
    storage.remove_torn(now_s + TORN_AFTER_S + 1)
    assert not torn.exists()
    assert read(storage, "a/whole") == b"whole"


def test_folder_that_goes_meanwhile_does_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path))
    names = ("a/pieces/1/output", "b/pieces/1/output")
    for name in names:
        storage.write(name, b"x")
        (tmp_path / f"{name}.new").touch()
    scan, gone = os.scandir, tmp_path / "a/pieces/1"

    def scan_late(path: Any) -> Any:
        # Another process tidies up behind a batch.
        if str(path) == str(gone):
            shutil.rmtree(gone)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    storage.remove_torn(time.time() + TORN_AFTER_S + 1)
    assert not gone.exists()
    assert [path.name for path in (tmp_path / "b/pieces/1").iterdir()] == ["output"]

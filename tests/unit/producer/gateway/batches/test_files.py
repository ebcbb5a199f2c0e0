from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from batchery import DatasetError
from batchery_producer.gateway.batches.files import Storage, describe_file, get_owner
from batchery_producer.gateway.callers import Caller
from support import object_store
from support.object_store import PartsFileSystem


@pytest.fixture(params=["folder", "file://", "memory://", "parts://"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A storage in each kind of place."""
    object_store.register()
    PartsFileSystem.contents.clear()
    urls = {"folder": f"{tmp_path}/x", "file://": f"file://{tmp_path}/x"}
    yield Storage(urls.get(request.param, f"{request.param}x"))
    files = fsspec.filesystem("memory")
    if files.exists("/x"):
        files.rm("/x", recursive=True)


def read(storage: Storage, name: str) -> bytes | None:
    opened = storage.open(name)
    if opened is None:
        return None
    with opened:
        return opened.read()


def test_file_is_written_and_read_and_replaced_and_removed(storage: Storage) -> None:
    assert read(storage, "a/b.json") is None
    for parts in ([b"one"], [b"an", b"other"]):
        assert storage.write("a/b.json", parts) == sum(map(len, parts))
        assert read(storage, "a/b.json") == b"".join(parts)
    storage.write("a/a.json", [])
    for _ in range(2):
        storage.remove("a/b.json")
    assert (read(storage, "a/a.json"), read(storage, "a/b.json")) == (b"", None)
    for _ in range(2):
        storage.remove("a")
    assert read(storage, "a/a.json") is None
    storage.write("a/b.json", [b"anew"])
    assert read(storage, "a/b.json") == b"anew"


def test_file_is_read_line_by_line_up_to_a_maximum(storage: Storage) -> None:
    storage.write("a.jsonl", [b"one\ntwo\n", b"x" * 300_000])
    opened = storage.open("a.jsonl")
    assert opened is not None
    with opened:
        lines = [opened.readline(10), opened.readline(2), opened.readline(10)]
        assert lines == [b"one\n", b"tw", b"o\n"]
        assert len(opened.read()) == 300_000


def test_store_that_is_away_is_told() -> None:
    object_store.register()
    storage, files = Storage("parts://x"), fsspec.filesystem("parts")
    files.is_away = True
    try:
        for call in (lambda: storage.open("a"), lambda: storage.write("a", [b"1"])):
            with pytest.raises(DatasetError, match="cannot be reached: StoreError"):
                call()
    finally:
        files.is_away = False


def test_place_that_cannot_be_had_is_told_without_any_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DatasetError, match="cannot be reached: Not a directory") as raised:
        Storage(f"file://{tmp_path}/file").write("tenant-acme/files/b", [b""])
    assert "/" not in str(raised.value)
    with pytest.raises(DatasetError, match=r"cannot be reached: .*s3fs"):
        Storage("s3://bucket/files")


def test_name_of_a_file_is_cut_and_has_no_half_character() -> None:
    assert describe_file("file-1", "a\ud800", "batch", 1).filename == "a?"
    assert describe_file("file-1", "n" * 300, "batch", 1).filename == "n" * 255


def test_owner_is_the_tenant_and_a_plain_name_of_a_folder() -> None:
    def owner(name: str, tenant: str | None) -> str:
        return get_owner(Caller(name, tenant, None, 1, 1, 1))

    assert owner("new", "acme") == owner("old", "acme") == "tenant-acme"
    assert owner("acme", None) == owner("acme", "") == "key-acme"
    odd = [owner("a", tenant) for tenant in ("..", "a/b", "a,b", "a b", "ü" * 200, "é" * 200)]
    assert len(set(odd)) == 6
    assert all(set("/, ").isdisjoint(each) and len(each) < 200 for each in odd)

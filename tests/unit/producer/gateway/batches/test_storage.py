from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from batchery import DatasetError
from batchery_producer.gateway.batches.storage import TORN_AFTER_S, Storage


@pytest.fixture(params=["folder", "file://", "memory://"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """A storage in each kind of place."""
    files = fsspec.filesystem("memory")
    urls = {"folder": f"{tmp_path}/x", "file://": f"file://{tmp_path}/x", "memory://": "memory://x"}
    yield Storage(urls[request.param])
    if files.exists("/x"):
        files.rm("/x", recursive=True)


def skip_memory(storage: Storage) -> None:
    if storage.url_of("").startswith("memory:"):
        pytest.skip("fsspec's memory has a file as soon as it is opened")


def test_file_is_written_and_read_and_replaced_and_removed(storage: Storage) -> None:
    assert storage.read("a/b.json") is None
    assert storage.open("a/b.json") is None
    assert storage.names("a") == []
    for content in (b"one", b"another"):
        storage.write("a/b.json", content)
        assert storage.read("a/b.json") == content
    opened = storage.open("a/b.json")
    assert opened is not None
    with opened:
        assert opened.read() == b"another"
    storage.write("a/a.json", b"")
    assert storage.names("a") == ["a.json", "b.json"]
    assert storage.read_many(["a/b.json", "a/none.json", "a/a.json"]) == [b"another", b""]
    storage.remove("a/b.json")
    storage.remove("a/b.json")
    assert storage.names("a") == ["a.json"]
    storage.remove_folder("a")
    storage.remove_folder("a")
    assert storage.names("a") == []
    storage.write("a/b.json", b"anew")
    assert storage.names("a") == ["b.json"]


def test_file_that_is_not_written_to_its_end_is_not_there(storage: Storage) -> None:
    skip_memory(storage)
    storage.write("a/b.json", b"old")
    with suppress(RuntimeError), storage.create("a/b.json") as file:
        file.write(b"half of it")
        raise RuntimeError
    assert storage.read("a/b.json") == b"old"
    assert storage.names("a") == ["b.json"]


def test_file_is_not_there_before_it_is_whole(storage: Storage) -> None:
    skip_memory(storage)
    with storage.create("a/b.json") as file:
        file.write(b"half of it")
        file.flush()
        assert storage.names("a") == []
    assert storage.names("a") == ["b.json"]


def test_url_of_a_file_can_be_opened_by_itself(storage: Storage) -> None:
    storage.write("a/b.json", b"content")
    with fsspec.open(storage.url_of("a/b.json"), "rb") as file:
        assert file.read() == b"content"


def test_place_that_cannot_be_had_is_told_without_its_url(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    storage = Storage(f"file://{tmp_path}/file")
    with pytest.raises(DatasetError, match=r"^files: a/b: cannot be reached: Not a directory"):
        storage.write("a/b", b"")
    with pytest.raises(DatasetError, match="pip install s3fs"):
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
    assert storage.read("a/whole") == b"whole"

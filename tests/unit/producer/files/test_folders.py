"""Files that are rows: folders and patterns of pictures and sounds, and cells of bytes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from batchery import DatasetError
from batchery_producer.files import run as run_module
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.run import Feed
from batchery_producer.files.source import find_sources

#: A folder as users have it: with other files among its pictures, and some that are hidden.
FILES = {
    "b.PNG": b"picture b",
    "a/x.jpg": b"picture x",
    "a/y.wav": b"sound y",
    "notes.txt": b"no picture",
    ".trash/z.png": b"hidden",
    "a/.z.png": b"hidden",
}


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The folder, on this machine and in a store."""
    place = str(tmp_path / "photos") if request.param == "local" else "memory://photos"
    for name, data in FILES.items():
        with fsspec.open(f"{place}/{name}", "wb", auto_mkdir=True) as file:
            file.write(data)
    yield place
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/photos", recursive=True)


def read(names: Any, **options: Any) -> dict[str, Any]:
    return {row.id: row.item for row in Dataset(names, **options)}


def test_a_folder_stands_for_the_pictures_and_sounds_in_it(folder: str) -> None:
    found = {"a/x.jpg": b"picture x", "a/y.wav": b"sound y", "b.PNG": b"picture b"}
    dataset = Dataset(folder)
    rows = list(dataset)
    assert {row.id: row.item for row in rows} == found
    assert [(row.source, row.row) for row in rows] == [(0, 1), (0, 2), (0, 3)]
    assert (dataset.names, dataset.total, dataset.is_stream) == ([folder], 3, False)
    assert dataset.description == f"{folder}: each file is an item, the id is its path"
    assert dataset.line_name(rows[0]) == f"{folder}: a/x.jpg"
    assert read(folder + "/") == found
    assert read(folder, format="files") == {**found, "notes.txt": b"no picture"}


def test_a_pattern_names_its_files_from_where_it_begins(folder: str) -> None:
    assert read(f"{folder}/a/x.*") == {"x.jpg": b"picture x"}
    assert read(f"{folder}/*/x.jpg") == {"a/x.jpg": b"picture x"}
    assert read(f"{folder}/b.PNG") == {"b.PNG": b"picture b"}


def test_several_names_are_several_inputs(folder: str) -> None:
    dataset = Dataset([f"{folder}/a", f"{folder}/b.PNG"])
    assert [(row.source, row.id) for row in dataset] == [(0, "x.jpg"), (0, "y.wav"), (1, "b.PNG")]
    with pytest.raises(DatasetError, match=r"x\.jpg: named twice"):
        Dataset([f"{folder}/a", f"{folder}/a/x.jpg"])


def test_a_folder_without_any_says_so(folder: str) -> None:
    with fsspec.open(f"{folder}/rows/in.jsonl", "wb", auto_mkdir=True) as file:
        file.write(b'"a"\n')
    with pytest.raises(DatasetError, match=r"a directory without pictures or sounds.*\*\.jsonl"):
        Dataset(f"{folder}/rows")
    with pytest.raises(DatasetError, match=r"rows: a directory; name files"):
        Dataset(f"{folder}/rows", format="jsonl")


def test_a_run_is_another_one_when_a_file_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"one")

    def version() -> str:
        (source,) = find_sources(tmp_path, None)
        return source.version

    before = version()
    assert version() == before
    (tmp_path / "b.png").write_bytes(b"two")
    after = version()
    assert after != before
    (tmp_path / "a.png").write_bytes(b"more")
    assert version() not in (before, after)


def test_a_file_is_read_up_to_its_limit_and_a_missing_one_is_a_row(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(b"x" * 100)
    dataset = Dataset(tmp_path)
    dataset.max_bytes = 10
    (tmp_path / "b.png").unlink()
    dataset.done = {(0, 3)}
    large, missing, done = dataset
    assert (large.size_bytes, large.broken) == (11, "")
    assert "b.png: cannot be read: No such file" in missing.broken
    # What an earlier process finished is not read again.
    assert done.size_bytes == 0


@pytest.mark.parametrize("name", ["image", "audio"])
def test_cells_of_hugging_face_are_bytes_or_where_they_are(tmp_path: Path, name: str) -> None:
    rows = [
        {"id": 1, name: {"bytes": b"\xff\xd8", "path": "a.jpg"}, "label": "cat"},
        {"id": 2, name: {"bytes": None, "path": "s3://bucket/b.jpg"}, "label": "dog"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    dataset = Dataset(tmp_path / "d.parquet")
    found = [(row.id, row.item, row.size_bytes) for row in dataset.checked()]
    assert found == [(1, b"\xff\xd8", 2), (2, "s3://bucket/b.jpg", 0)]
    assert f"the item is {name!r}" in dataset.description
    assert [row.item for row in Dataset(tmp_path / "d.parquet", field="label")] == ["cat", "dog"]


def test_large_cells_are_converted_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery_producer.files.rows.READ_BYTES", 1000)
    rows = [{"image": {"bytes": bytes([n]) * 300, "path": None}} for n in range(50)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    found = list(Dataset(tmp_path / "d.parquet"))
    assert [row.item for row in found] == [row["image"]["bytes"] for row in rows]
    assert [row.row for row in found] == list(range(1, 51))


def test_a_manifest_of_places_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("calls/a.wav\ns3://bucket/b.wav\n")
    assert [row.item for row in Dataset(tmp_path / "list.txt")] == [
        "calls/a.wav",
        "s3://bucket/b.wav",
    ]
    (tmp_path / "list.jsonl").write_text('{"id": 7, "image": "https://shop.example/7.png"}\n')
    (row,) = Dataset(tmp_path / "list.jsonl")
    assert (row.id, row.item) == (7, "https://shop.example/7.png")


def test_a_feed_reads_only_so_many_bytes_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_HELD_BYTES", 25)
    read, has_read = list[int](), threading.Semaphore(0)

    def entries() -> Iterator[bytes]:
        for number in range(6):
            read.append(number)
            yield b"x" * 10
            has_read.release()

    feed = Feed(entries(), 100, len)
    try:
        taken = list[bytes]()
        while not feed.exhausted:
            taken += feed.take(1, 5)
            # One more than fits is held, and the next one is not asked for.
            assert len(read) <= len(taken) + 4
        assert len(taken) == 6
    finally:
        feed.close()

"""Which files are read: patterns, and several of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"text {n}\n" for n in range(1000)))
    return path


def numbers(dataset: Dataset) -> list[int]:
    return [row.row for row in dataset]


def test_pattern_gives_sorted_files_without_empty_ones(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two\n"), ("a.txt", "one\n"), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.txt").mkdir()
    dataset = Dataset(str(tmp_path / "*.txt"))
    assert dataset.names == [f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"]
    assert [(row.source, row.row, row.id) for row in dataset] == [
        (0, 1, f"{tmp_path}/a.txt:1"),
        (1, 1, f"{tmp_path}/b.txt:1"),
    ]
    assert dataset.total == 2


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no input"),
        (["*.nothing"], "no file matches"),
        (["in.txt", "./in.txt"], "in.txt: named twice"),
        (["in.txt", "-"], "cannot be read together"),
        (["none.jsonl"], "No such file"),
        (["folder"], "folder: a directory"),
        (["empty.txt"], "empty; there is nothing to submit"),
    ],
    ids=str,
)
def test_invalid_combination_of_sources_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], why: str
) -> None:
    monkeypatch.chdir(source.parent)
    Path("folder").mkdir()
    Path("empty.txt").touch()
    with pytest.raises(DatasetError, match=why):
        Dataset(names)

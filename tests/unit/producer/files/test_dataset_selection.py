"""Which rows are read: patterns, samples, and those that a file of failures names."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.json_lines import JsonLines


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


def test_sample_is_the_same_each_time_and_in_order(source: Path) -> None:
    dataset = Dataset(source, sample=50)
    found = numbers(dataset)
    assert len(set(found)) == 50
    assert found == sorted(found) == numbers(dataset) == numbers(Dataset(source, sample=50))
    assert found != list(range(1, 51))
    assert dataset.total == 50
    assert 350 < sum(numbers(Dataset(source, sample=400))) / 400 < 650


def test_sample_larger_than_the_input_is_all_rows(source: Path) -> None:
    dataset = Dataset(source, sample=5000)
    assert numbers(dataset) == list(range(1, 1001))
    assert dataset.total == 1000
    assert max(numbers(Dataset(source, sample=10, limit=20))) <= 20
    with pytest.raises(DatasetError, match="standard input: cannot be sampled"):
        Dataset("-", sample=5)


def failure(row: int, **more: Any) -> dict[str, Any]:
    return {"id": row, "row": row, "line": row, "error": {"type": "X", "message": "y"}, **more}


def test_failures_name_rows_by_their_ids_wherever_those_are_now(
    tmp_path: Path, source: Path
) -> None:
    errors = write(tmp_path / "e.jsonl", [failure(900), failure(7)])
    assert numbers(Dataset(source, retry_failed=errors)) == [7, 900]
    rows = [{"id": n, "text": "x"} for n in (0, 1, 2, "b", 3)]
    write(tmp_path / "in.jsonl", rows)
    errors = write(tmp_path / "e.jsonl", [failure(2), failure(9, id="b"), failure(1, id=None)])
    dataset = Dataset(tmp_path / "in.jsonl", retry_failed=errors)
    assert [row.id for row in dataset] == [0, 2, "b"]
    assert not dataset.not_found


def test_failures_of_several_files_name_their_file(tmp_path: Path, source: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("one\ntwo\n")
    errors = write(tmp_path / "e.jsonl", [failure(2, id=None, file=str(other))])
    assert [row.id for row in Dataset([source, other], retry_failed=errors)] == [f"{other}:2"]


@pytest.mark.parametrize("ids", [[b"one", b"two"], [datetime(2026, 1, 2, 3), datetime(2026, 2, 3)]])
def test_failures_name_rows_by_ids_that_json_lacks(tmp_path: Path, ids: list[Any]) -> None:
    table = pa.table({"id": ids, "text": ["a", "b"]})
    pq.write_table(table, tmp_path / "in.parquet")
    row = list(Dataset(tmp_path / "in.parquet"))[1]
    errors = JsonLines(tmp_path / "e.jsonl")
    errors.write(failure(2, id=row.id))
    errors.flush()
    errors.close()
    assert numbers(Dataset(tmp_path / "in.parquet", retry_failed=tmp_path / "e.jsonl")) == [2]


def test_failures_of_rows_that_are_not_there_are_named(tmp_path: Path, source: Path) -> None:
    errors = write(tmp_path / "e.jsonl", [failure(7), failure(7), failure(5, id="b")])
    dataset = Dataset(source, retry_failed=errors)
    assert numbers(dataset) == [7]
    expected = '1 of 2 failures are of no row of the input, such as {"id": "b"}; is'
    assert expected in dataset.not_found
    write(errors, [failure(7, id="b")])
    with pytest.raises(DatasetError, match=r"1 of 1 failures are of no row .* is it of"):
        numbers(Dataset(source, retry_failed=errors))


def test_row_whose_id_another_has_is_tried_again_without_that_one(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"id": each, "text": "x"} for each in "abac"])
    duplicate = list(Dataset(source))[2]
    errors = write(tmp_path / "e.jsonl", [failure(3, id=duplicate.id), failure(4, id="c")])
    assert numbers(Dataset(source, retry_failed=errors)) == [3, 4]


def test_rows_that_could_not_be_read_are_tried_again_once_they_are_mended(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("not JSON\nnor this\n" + '{"id": 1, "text": "x"}\n' * 2)
    broken = [row for row in Dataset(source) if row.broken]
    errors = write(tmp_path / "e.jsonl", [failure(row.row, id=row.id) for row in broken])
    rows = list(Dataset(source, retry_failed=errors).checked())
    assert [row.row for row in rows] == [1, 2, 4]
    source.write_text('{"id": 8, "text": "y"}\nnor this\n' + '{"id": 1, "text": "x"}\n' * 2)
    rows = list(Dataset(source, retry_failed=errors).checked())
    assert [(row.id, not row.broken) for row in rows] == [(8, 1), (None, 0), (None, 0)]


def test_last_failure_needs_no_line_end(tmp_path: Path, source: Path) -> None:
    errors = tmp_path / "e.jsonl"
    errors.write_text("\n".join(json.dumps(failure(row)) for row in (2, 4)))
    assert numbers(Dataset(source, retry_failed=errors)) == [2, 4]


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([], "no failures"),
        ([{"id": 1, "row": 1, "result": 5}], "no file of failures"),
        ([failure(1, id=None, file="another")], "is of another input"),
    ],
    ids=["empty", "results", "another"],
)
def test_file_in_another_form_is_refused(
    tmp_path: Path, source: Path, entries: list[Any], why: str
) -> None:
    errors = write(tmp_path / "e.jsonl", entries)
    with pytest.raises(DatasetError, match=why):
        numbers(Dataset(source, retry_failed=errors))
    with pytest.raises(DatasetError, match="no such file of failures"):
        Dataset(source, retry_failed=tmp_path / "none")


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


def test_repeated_id_in_another_file_is_found(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"id": 1, "text": "x"}])
    second = write(tmp_path / "b.jsonl", [{"id": 2, "text": "x"}, {"id": 1, "text": "y"}])
    *_, last = Dataset([first, second])
    assert last.broken == f"the id 1 is already used in {first}, line 1"


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

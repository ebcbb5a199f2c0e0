import gzip
import json
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset, begin_reading
from batchery_producer.files.journal import JsonLines
from batchery_producer.files.records import Broken, Record
from batchery_producer.run.output import Output


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"text {n}\n" for n in range(1000)))
    return path


def lines(dataset: Dataset) -> list[int]:
    return [row.line for row in dataset]


def test_sample_is_the_same_each_time_and_in_order(source: Path) -> None:
    dataset = Dataset(source, sample=50)
    found = lines(dataset)
    assert len(set(found)) == 50
    assert found == sorted(found) == lines(dataset) == lines(Dataset(source, sample=50))
    assert found != list(range(1, 51))
    assert dataset.total == 50


def test_sample_chooses_each_row_with_equal_probability(source: Path) -> None:
    assert 350 < sum(lines(Dataset(source, sample=400))) / 400 < 650


def test_sample_larger_than_the_input_is_all_rows(source: Path) -> None:
    dataset = Dataset(source, sample=5000)
    assert lines(dataset) == list(range(1, 1001))
    assert dataset.total == 1000
    assert max(lines(Dataset(source, sample=10, limit=20))) <= 20


def test_standard_input_cannot_be_sampled() -> None:
    with pytest.raises(DatasetError, match="standard input: cannot be sampled"):
        Dataset("-", sample=5)


def failure(line: int, **more: Any) -> dict[str, Any]:
    return {"id": line, "line": line, "error": {"type": "X", "message": "y"}, **more}


def test_retry_failed_reads_only_the_failed_rows(tmp_path: Path, source: Path) -> None:
    errors = write(tmp_path / "e.jsonl", [failure(900), failure(7)])
    assert lines(Dataset(source, retry_failed=errors)) == [7, 900]


def test_failures_of_several_files_name_their_file(tmp_path: Path, source: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("one\ntwo\n")
    errors = write(tmp_path / "e.jsonl", [failure(2, id=f"{other}:2", file=str(other))])
    assert [row.id for row in Dataset([source, other], retry_failed=errors)] == [f"{other}:2"]


def test_retry_failed_reads_openai_s_error_file(tmp_path: Path) -> None:
    body = {"model": "embed", "input": "x"}
    rows = [{"custom_id": f"r{n}", "url": "/v1/embeddings", "body": body} for n in range(5)]
    source = write(tmp_path / "in.jsonl", rows)
    errors = write(tmp_path / "e.jsonl", [{"custom_id": "r3"}, {"custom_id": None}])
    assert [row.id for row in Dataset(source, retry_failed=errors)] == ["r3"]


def test_failures_name_rows_by_their_ids_wherever_those_are_now(tmp_path: Path) -> None:
    rows = [{"id": n, "text": "x"} for n in (0, 1, 2, "b", 3)]
    source = write(tmp_path / "in.jsonl", rows)
    errors = write(tmp_path / "e.jsonl", [failure(2), failure(9, id="b"), failure(1, id=None)])
    dataset = Dataset(source, retry_failed=errors)
    assert [row.id for row in dataset] == [0, 2, "b"]
    assert not dataset.not_found


@pytest.mark.parametrize("ids", [[b"one", b"two"], [datetime(2026, 1, 2, 3), datetime(2026, 2, 3)]])
def test_failures_name_rows_by_ids_that_json_lacks(tmp_path: Path, ids: list[Any]) -> None:
    table = pa.table({"id": ids, "text": ["a", "b"]})
    pq.write_table(table, tmp_path / "in.parquet")
    row = list(Dataset(tmp_path / "in.parquet"))[1]
    errors = JsonLines(tmp_path / "e.jsonl")
    errors.write(failure(2, id=row.id))
    errors.flush()
    errors.close()
    assert lines(Dataset(tmp_path / "in.parquet", retry_failed=tmp_path / "e.jsonl")) == [2]


def test_failures_of_rows_that_are_not_there_are_named(tmp_path: Path, source: Path) -> None:
    errors = write(tmp_path / "e.jsonl", [failure(7), failure(7), failure(5, id="b")])
    dataset = Dataset(source, retry_failed=errors)
    assert lines(dataset) == [7]
    assert '1 of 2 failures are of no row of the input, such as id "b"; is' in dataset.not_found
    errors = write(tmp_path / "e.jsonl", [failure(7), failure(2000, id=None)])
    dataset = Dataset(source, retry_failed=errors)
    assert lines(dataset) == [7]
    assert "such as file and line [0, 2000]; is" in dataset.not_found
    write(errors, [failure(7, id="b")])
    with pytest.raises(DatasetError, match=r'1 of 1 failures are of no row .* id "b"; is it of'):
        lines(Dataset(source, retry_failed=errors))


@pytest.mark.parametrize("is_openai", [True, False])
def test_row_whose_id_another_has_fails_again_without_that_one(
    tmp_path: Path, is_openai: bool
) -> None:
    rows: list[Any] = [{"id": each, "text": "x"} for each in "abac"]
    if is_openai:
        body = {"model": "embed", "input": "x"}
        rows = [{"custom_id": e["id"], "url": "/v1/embeddings", "body": body} for e in rows]
    dataset = Dataset(write(tmp_path / "in.jsonl", rows))
    duplicate = list(dataset)[2]
    assert duplicate == Broken(3, None, "the id 'a' is already used in line 1")
    failures = [failure(3, id=duplicate.id), failure(4, id="c")]
    if is_openai:
        failures = [{"custom_id": each["id"], "id": f"{each['line']}"} for each in failures]
    errors = write(tmp_path / "e.jsonl", failures)
    dataset = Dataset(tmp_path / "in.jsonl", retry_failed=errors)
    assert lines(dataset) == ([4] if is_openai else [3, 4])
    assert bool(dataset.not_found) == is_openai


def test_rows_that_cannot_be_read_do_not_keep_others_from_being_tried_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "in.jsonl").write_text("not JSON\nnor this\n" + '{"text": "x"}\n' * 9)
    errors = write(tmp_path / "e.jsonl", [failure(1), failure(2), failure(7)])
    rows = begin_reading(Dataset(tmp_path / "in.jsonl", retry_failed=errors), lambda: False)
    assert [(row.line, isinstance(row, Record)) for row in rows] == [(1, 0), (2, 0), (7, 1)]


@pytest.mark.parametrize("name", ["e.jsonl", "e.jsonl.gz"])
def test_last_failure_needs_no_line_end(tmp_path: Path, source: Path, name: str) -> None:
    text = "\n".join(json.dumps(failure(line)) for line in (2, 4)).encode()
    errors = tmp_path / name
    errors.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert lines(Dataset(source, retry_failed=errors)) == [2, 4]
    errors.write_bytes(errors.read_bytes()[:-9])
    found = [2] if name == "e.jsonl" else []  # A member of gzip is there as a whole or not.
    with nullcontext() if found else pytest.raises(DatasetError, match="no failures"):
        assert lines(Dataset(source, retry_failed=errors)) == found


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([{"custom_id": "a", "response": {"status_code": 200}, "error": None}], "no file of fail"),
        ([], "no failures"),
        ([{"id": 1, "line": 1, "result": 5}], "no file of failures"),
        ([failure(1, file="another")], "is it of another input"),
    ],
    ids=["answers", "empty", "results", "another"],
)
def test_file_in_another_form_is_refused(
    tmp_path: Path, source: Path, entries: list[Any], why: str
) -> None:
    errors = write(tmp_path / "e.jsonl", entries)
    with pytest.raises(DatasetError, match=why):
        lines(Dataset(source, retry_failed=errors))


def test_file_of_failures_must_exist_and_is_not_overwritten(tmp_path: Path, source: Path) -> None:
    with pytest.raises(DatasetError, match="no such file of failures"):
        Dataset(source, retry_failed=tmp_path / "none")
    errors = write(tmp_path / "out.errors.jsonl", [failure(1)])
    with pytest.raises(DatasetError, match=r"out\.errors\.jsonl: this is the input"):
        Output(Dataset(source, retry_failed=errors), tmp_path / "out.jsonl", overwrite=True)


def test_pattern_gives_sorted_files_without_empty_ones(tmp_path: Path) -> None:
    for name, text in (("b.txt", "two\n"), ("a.txt", "one\n"), ("c.txt", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.txt").mkdir()
    dataset = Dataset(str(tmp_path / "*.txt"))
    assert [each.path.name for each in dataset.sources] == ["a.txt", "b.txt"]
    assert list(dataset) == [
        Record(1, f"{tmp_path}/a.txt:1", "one", 0),
        Record(1, f"{tmp_path}/b.txt:1", "two", 1),
    ]
    assert dataset.total == 2


def test_repeated_id_in_another_file_is_found(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"id": 1, "text": "x"}])
    second = write(tmp_path / "b.jsonl", [{"id": 2, "text": "x"}, {"id": 1, "text": "y"}])
    *_, last = Dataset([first, second])
    assert last == Broken(2, None, f"the id 1 is already used in {first}, line 1", 1)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no input"),
        (["*.nothing"], "no file matches"),
        (["in.txt", "./in.txt"], "in.txt: named twice"),
        (["in.txt", "-"], "cannot be read together"),
    ],
    ids=["none", "no-match", "twice", "stdin"],
)
def test_invalid_combination_of_sources_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], why: str
) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(DatasetError, match=why):
        Dataset(names)


def test_input_of_only_empty_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(DatasetError, match="empty; there is nothing to submit"):
        Dataset(str(tmp_path / "*.txt"))

"""The files of a run: what is refused, what is written, and what a second process goes on with."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from batchery import DatasetError
from batchery_producer.files import output as output_module
from batchery_producer.files.dataset import Dataset, Record
from batchery_producer.files.journal import Journal
from batchery_producer.files.output import Output
from batchery_producer.files.rows import MAX_LINE_BYTES


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("one\ntwo\nthree\n")
    return Dataset("in.txt")


def journal(source: Dataset) -> Journal:
    return Journal.of(source.sources, {})


def record(row: int, id_: Any = None) -> Record:
    return Record(0, row, row, id_ or f"row-{row}")


def write(source: Dataset, name: str, *rows: int, complete: bool = True, **options: Any) -> Output:
    with Output(source, name, **options) as output:
        output.open(journal(source))
        for row in rows:
            output.result(record(row), f"text {row}")
        output.finish(complete=complete)
    return output


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_results_and_failures_go_to_different_files(source: Dataset) -> None:
    with Output(source, "out.jsonl") as output:
        output.open(journal(source))
        output.result(record(1, "a"), {"vector": [1.0]})
        output.failure(Record(0, 2, 5, 2), "ValueError", "größer")
        output.flush()
    assert lines("out.jsonl") == [{"id": "a", "row": 1, "result": {"vector": [1.0]}}]
    assert lines("out.errors.jsonl") == [
        {"id": 2, "row": 2, "line": 5, "error": {"type": "ValueError", "message": "größer"}}
    ]
    assert output.first_failure == "in.txt, line 5: ValueError: größer"


@pytest.mark.parametrize("id_", ["a", "\ud800", b"\x00", None], ids=repr)
def test_arrays_are_written_as_lists_with_few_digits(source: Dataset, id_: Any) -> None:
    vector = np.array([0.1, -2.0], np.float32)
    with Output(source, "out.jsonl") as output:
        output.open(journal(source))
        output.result(record(1, id_), {"tokens": 1, "vector": vector})
        output.flush()
    (line,) = lines("out.jsonl")
    assert line["row"] == 1
    digits = [0.10000000149011612, -2.0] if id_ == "\ud800" else [0.1, -2.0]
    assert line["result"] == {"tokens": 1, "vector": digits}


def test_run_without_failures_has_no_file_of_failures(source: Dataset) -> None:
    Path("out.errors.jsonl").write_text("old\n")
    write(source, "out.jsonl", overwrite=True)
    assert Path("out.jsonl").exists()
    assert not Path("out.errors.jsonl").exists()


@pytest.mark.parametrize(
    ("results", "errors"),
    [
        ("out.parquet", "out.errors.jsonl"),
        ("-", "in.errors.jsonl"),
    ],
)
def test_failures_are_named_after_the_output_or_the_input(
    source: Dataset, results: str, errors: str
) -> None:
    assert Output(source, results).errors.path == Path(errors)


@pytest.mark.parametrize(
    ("results", "errors", "why"),
    [
        ("nowhere/out.jsonl", None, "there is no directory"),
        ("in.jsonl", None, "this is the input"),
        ("link.jsonl", None, "this is the input"),
        ("folder", None, "a directory"),
        ("full.jsonl", None, "already there.*--overwrite"),
        ("out.jsonl", "full.jsonl", "already there; name another file with --errors, or use"),
        ("out.jsonl", "in.jsonl", "this is the input"),
        ("out.jsonl", "out.jsonl", "a file each"),
        ("out.csv", None, r"out.csv: cannot be written as .csv, but as .jsonl, .ndjson, .parquet"),
        ("out.jsonl.gz", None, "cannot be written as .gz, but"),
        ("s3://bucket/out.jsonl", None, "a file of this machine"),
        ("out.jsonl", "bad.csv", "failures are JSON lines"),
        pytest.param("x" * 300, None, "cannot be written: File name too long", id="long"),
        pytest.param("out.jsonl", "x" * 300, "cannot be written: File name too long", id="errors"),
    ],
)
def test_output_that_cannot_be_written_is_refused_at_once(
    source: Dataset, results: str, errors: str | None, why: str
) -> None:
    Path("folder").mkdir()
    Path("full.jsonl").write_text("something\n")
    Path("in.txt").rename("in.jsonl")
    Path("link.jsonl").symlink_to("in.jsonl")
    with pytest.raises(DatasetError, match=why):
        Output(Dataset("in.jsonl", format="text"), results, errors=errors)


def test_output_may_replace_an_empty_file_or_with_overwrite_any_but_the_input(
    source: Dataset,
) -> None:
    Path("empty.jsonl").touch()
    Path("full.jsonl").write_text("something\n")
    Output(source, "empty.jsonl")
    write(source, "full.jsonl", overwrite=True)
    assert Path("full.jsonl").read_text() == ""


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_output_of_another_program_or_a_complete_one_is_kept_by_resume(
    source: Dataset, name: str
) -> None:
    Path(name).write_text("something")
    with pytest.raises(DatasetError, match="already there; complete, or of another program"):
        Output(source, name, resume=True)
    Path(name).unlink()
    Path("out.errors.jsonl").write_text("of another run\n")
    with pytest.raises(DatasetError, match=r"out.errors.jsonl: already there"):
        Output(source, name, resume=True)


def test_streams_and_devices_cannot_be_resumed(source: Dataset) -> None:
    for given, name in ((Dataset("-"), "out.jsonl"), (source, "-"), (source, "/dev/null")):
        with pytest.raises(DatasetError, match="cannot be resumed"):
            Output(given, name, errors="e.jsonl", resume=True)
    with pytest.raises(DatasetError, match="choose one"):
        Output(source, "out.jsonl", resume=True, overwrite=True)


def test_output_that_a_stream_overwrites_cannot_be_gone_on_with_as_that_of_a_file(
    source: Dataset,
) -> None:
    write(source, "out.jsonl", complete=False)
    os.mkfifo("pipe.txt")
    write(Dataset("pipe.txt"), "out.jsonl", 1, overwrite=True)
    assert not Output(source, "out.jsonl", overwrite=True).is_begun


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_output_is_begun_gone_on_with_and_complete(source: Dataset, name: str) -> None:
    begun = write(source, name, 2, complete=False)
    assert begun.journal is not None
    with pytest.raises(DatasetError, match=r"out\..*: begun and not finished; --resume"):
        Output(source, name)
    with Output(source, name, resume=True) as output:
        assert output.open(journal(source)).run == begun.journal.run
        assert [row.row for row in source if (row.source, row.row) not in output.done] == [1, 3]
        for row in (1, 3):
            output.result(record(row), f"text {row}")
        output.finish(complete=True)
    assert output.names == (name, "")
    expected = [{"id": f"row-{n}", "row": n, "result": f"text {n}"} for n in (2, 1, 3)]
    if name.endswith(".parquet"):
        assert pyarrow.parquet.read_table(name).to_pylist() == expected
    else:
        assert lines(name) == expected
    assert [each.name for each in Path().iterdir() if each.suffix in (".part", ".journal")] == []
    with pytest.raises(DatasetError, match="already there; complete, or of another program"):
        Output(source, name, resume=True)


def test_first_failure_is_that_of_the_first_process(source: Dataset) -> None:
    for row, resume in ((3, False), (1, True)):
        with Output(source, "out.jsonl", resume=resume) as output:
            output.open(journal(source))
            output.failure(record(row), "ValueError", f"row {row}")
            output.flush()
    assert output.first_failure == "in.txt, line 3: ValueError: row 3"


def test_output_whose_library_is_missing_is_refused_at_once(
    source: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"pyarrow is missing.*'batchery\[datasets\]'"):
        Output(source, "o.parquet")


def test_output_that_cannot_be_written_leaves_its_part(
    source: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError("not yours")

    monkeypatch.setattr(output_module, "write_parquet", refuse)
    with pytest.raises(DatasetError, match=r"cannot be written: not yours; .* in out.parquet.part"):
        write(source, "out.parquet", 1)
    assert [row["row"] for row in lines("out.parquet.part")] == [1]
    assert not Path("out.parquet").exists()


def test_results_and_failures_longer_than_a_line_are_refused_or_cut(source: Dataset) -> None:
    with Output(source, "out.jsonl") as output:
        output.open(journal(source))
        refused = output.result(record(1), "x" * MAX_LINE_BYTES)
        assert "the maximum is 16,777,216" in str(refused)
        assert output.result(record(1), "x") == ""
        output.failure(record(2), "ValueError", "no good: " + "\ud800" * MAX_LINE_BYTES)
        output.failure(record(3, "\ud800" * (MAX_LINE_BYTES // 4)), "ValueError", "no")
        output.flush()
    one, other = lines("out.errors.jsonl")
    assert one["error"]["message"].startswith("no good: ")
    assert (other["row"], other["id"], other["error"]["type"]) == (3, None, "ValueError")

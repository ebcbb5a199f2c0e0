import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import BUFFER_BYTES, Journal, JsonLines
from batchery_producer.files.records import Record
from batchery_producer.files.rows import MAX_LINE_BYTES
from batchery_producer.run.output import Output


@pytest.fixture
def source(tmp_path: Path) -> Dataset:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    return Dataset(path)


def journal(source: Dataset) -> Journal:
    return Journal.of(source.sources, "embed", {}, 16)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_and_failures_go_to_different_files(tmp_path: Path, source: Dataset) -> None:
    with Output(source, tmp_path / "out.jsonl") as output:
        output.open(journal(source))
        output.result(Record(1, "a", None), {"vector": [1.0]})
        output.failure(Record(2, 2, None), "ValueError", "größer")
        output.flush()
    assert lines(tmp_path / "out.jsonl") == [{"id": "a", "line": 1, "result": {"vector": [1.0]}}]
    assert lines(tmp_path / "out.errors.jsonl") == [
        {"id": 2, "line": 2, "error": {"type": "ValueError", "message": "größer"}}
    ]


def test_run_without_failures_has_no_file_of_failures(tmp_path: Path, source: Dataset) -> None:
    stale = tmp_path / "out.errors.jsonl"
    stale.write_text("old\n")
    with Output(source, tmp_path / "out.jsonl", overwrite=True) as output:
        output.open(journal(source))
        output.flush()
    assert (tmp_path / "out.jsonl").exists()
    assert not stale.exists()


def test_gzip_output_can_be_read_after_every_flush(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "out.jsonl.gz")
    file.open()
    for number in range(3):
        file.write({"n": number})
        file.flush()
        unpacked = gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes())
        assert len(unpacked.splitlines()) == number + 1
    file.close()


def test_failures_of_a_gzip_output_are_not_compressed(tmp_path: Path, source: Dataset) -> None:
    assert Output(source, tmp_path / "out.jsonl.gz").errors.path == tmp_path / "out.errors.jsonl"


def test_failures_of_standard_output_are_named_after_the_input(source: Dataset) -> None:
    assert Output(source, "-").errors.path == Path("in.errors.jsonl")
    assert Output(Dataset("-"), "-").errors.path == Path("stdin.errors.jsonl")


def test_lone_surrogate_is_written_as_its_escape(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "out.jsonl")
    file.write({"id": "\ud83d"})
    file.flush()
    file.close()
    assert lines(tmp_path / "out.jsonl") == [{"id": "\ud83d"}]


def test_lines_above_the_buffer_size_are_written_without_a_flush(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "out.jsonl")
    file.write({"text": "x" * BUFFER_BYTES})
    assert (tmp_path / "out.jsonl").stat().st_size > BUFFER_BYTES
    file.close()


@pytest.mark.parametrize(
    ("results", "errors", "why"),
    [
        ("nowhere/out.jsonl", None, "there is no directory"),
        ("in.txt", None, "this is the input"),
        ("link.txt", None, "this is the input"),
        ("folder", None, "a directory"),
        ("full.jsonl", None, "already there.*--overwrite"),
        ("out.jsonl", "full.jsonl", "already there; name another with --errors, or use"),
        ("out.jsonl", "in.txt", "this is the input"),
        ("out.jsonl", "out.jsonl", "a file each"),
        ("out.xlsx", None, r"out.xlsx: cannot be written as .xlsx, but as .jsonl, .*.csv, .*arrow"),
        ("out.npy.gz", None, "cannot be written as .npy"),
        ("out.json", None, "cannot be written as .json, but"),
        ("out.jsonl", "bad.csv", "cannot be written as .csv, but as .jsonl, .ndjson$"),
        pytest.param("x" * 300, None, "cannot be written: File name too long", id="long"),
        pytest.param("x" * 250, None, "cannot be written: File name too long", id="journal"),
        pytest.param("out.jsonl", "x" * 300, "cannot be written: File name too long", id="errors"),
    ],
)
def test_output_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, source: Dataset, results: str, errors: str | None, why: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "full.jsonl").write_text("something\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "in.txt")
    with pytest.raises(DatasetError, match=why):
        Output(source, tmp_path / results, tmp_path / errors if errors else None)


def test_output_may_replace_an_empty_file_or_with_overwrite_any(
    tmp_path: Path, source: Dataset
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "full.jsonl").write_text("something\n")
    Output(source, tmp_path / "empty.jsonl")
    with Output(source, tmp_path / "full.jsonl", overwrite=True) as output:
        output.open(journal(source))
        assert (tmp_path / "full.jsonl").read_text() == ""


def test_output_that_is_the_input_is_refused(tmp_path: Path, source: Dataset) -> None:
    with pytest.raises(DatasetError, match="this is the input"):
        Output(source, tmp_path / "in.txt", overwrite=True)


@pytest.mark.parametrize(
    ("pattern", "results", "errors"),
    [
        ("*.jsonl", "out.csv", None),
        ("./*.jsonl", "out.jsonl", "bad.ndjson"),
        ("**/*.jsonl", "deep/out.csv", "deep/bad.jsonl"),
        ("i*", "in.jsonl", "bad.jsonl"),
    ],
)
def test_output_that_the_run_would_read_when_it_goes_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, results: str, errors: str | None
) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("in.txt", "one.jsonl"):
        (tmp_path / name).write_text('"one"\n')
    monkeypatch.chdir(tmp_path)
    for form in (pattern, tmp_path / pattern):
        with pytest.raises(DatasetError, match=r"would read it.*name another"):
            Output(Dataset(form), results, errors)
    Output(Dataset(pattern), "deep/out.csv", "bad.ndjson")
    Output(Dataset(pattern), "-", errors)  # Nobody can resume it.


@pytest.mark.parametrize(
    ("name", "content"),
    [("out", b'{"notes": "in one line"}'), ("out.jsonl.gz", b"no gzip"), ("out.jsonl", b"\xff")],
)
def test_file_of_another_program_is_not_truncated_by_resume(
    tmp_path: Path, source: Dataset, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    with Output(source, tmp_path / name, resume=True) as output:
        output.open(journal(source))
        with pytest.raises(DatasetError, match="no journal"):
            list(output.missing(source))
    assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("results", ["out.jsonl", "out.csv"])
def test_failures_of_another_run_are_not_removed_by_resume(
    tmp_path: Path, source: Dataset, results: str
) -> None:
    errors = tmp_path / "out.errors.jsonl"
    errors.write_text("of another run\n")
    with pytest.raises(DatasetError, match=r"already there; name another with --errors"):
        Output(source, tmp_path / results, resume=True)
    assert errors.exists()


def test_output_that_a_stream_overwrites_cannot_be_gone_on_with_as_that_of_a_file(
    tmp_path: Path, source: Dataset
) -> None:
    with Output(source, tmp_path / "out.jsonl") as output:
        output.open(journal(source))
    os.mkfifo(tmp_path / "pipe.txt")
    stream = Dataset(tmp_path / "pipe.txt")
    with Output(stream, tmp_path / "out.jsonl", overwrite=True) as output:
        output.open(journal(stream))
        output.result(Record(1, 1, None), "of the stream")
        output.finish(complete=True)
    assert not Output(source, tmp_path / "out.jsonl", resume=True).is_begun


def test_full_disk_fails_with_one_error() -> None:
    file = JsonLines(Path("/dev/full"))
    file.open()
    file.write({"n": 1})
    with pytest.raises(DatasetError, match="/dev/full: cannot be written: No space left"):
        file.flush()
    file.close()


def test_result_longer_than_a_line_is_refused(tmp_path: Path, source: Dataset) -> None:
    with Output(source, tmp_path / "out.jsonl") as output:
        output.open(journal(source))
        refused = output.result(Record(1, 1, None), "x" * MAX_LINE_BYTES)
        assert refused is not None
        assert "the maximum is 16,777,216" in refused
        assert output.result(Record(1, 1, None), "x") is None


def test_failure_longer_than_a_line_is_shortened(tmp_path: Path, source: Dataset) -> None:
    with Output(source, tmp_path / "out.jsonl") as output:
        output.open(journal(source))
        output.failure(Record(1, 1, None), "ValueError", "no good: " + "\ud800" * MAX_LINE_BYTES)
        output.failure(Record(2, "\ud800" * (MAX_LINE_BYTES // 4), None), "ValueError", "no")
        output.flush()
    one, other = lines(tmp_path / "out.errors.jsonl")
    assert one["error"]["message"].startswith("no good: ")
    assert (other["line"], other["error"]["type"]) == (2, "ValueError")

import math
import resource
import signal
from datetime import UTC, date, datetime
from decimal import Decimal
from errno import ENOLCK
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchery import DatasetError
from batchery_producer.files.json_lines import (
    BUFFER_BYTES,
    JsonLines,
    encoded,
    read_lines,
)
from batchery_producer.files.rows import MAX_LINE_BYTES


def write(path: Path, *flushes: list[Any]) -> None:
    file = JsonLines(path)
    file.open()
    for entries in flushes:
        for entry in entries:
            file.write(entry)
        file.flush()
    file.close()


def entries(path: Path) -> list[Any]:
    return [entry for entry, _ in read_lines(path)]


def test_file_torn_anywhere_keeps_whole_lines_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    flushes: list[list[Any]] = [[{"n": 1}, {"n": 2}], [{"n": 3, "text": "größer\u2028"}]]
    write(path, *flushes)
    whole, all_entries = path.read_bytes(), flushes[0] + flushes[1]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        file = JsonLines(path)
        before = list(file.resume())
        assert before == all_entries[: len(before)]
        file.write({"n": 4})
        file.flush()
        file.close()
        assert entries(path) == [*before, {"n": 4}]
    assert len(before) == 3


def test_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    first, second = JsonLines(tmp_path / "out.jsonl"), JsonLines(tmp_path / "out.jsonl")
    first.open()
    first.write({"n": 1})
    first.flush()
    with pytest.raises(DatasetError, match=r"out\.jsonl: cannot be written: another process"):
        second.open()
    with pytest.raises(DatasetError, match="another process is writing it"):
        list(second.resume())
    first.close()
    assert list(second.resume()) == [{"n": 1}]
    second.close()


def test_file_is_written_where_a_filesystem_knows_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    write(tmp_path / "out.jsonl", [{"n": 1}])
    assert entries(tmp_path / "out.jsonl") == [{"n": 1}]


def test_file_ending_in_zeros_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"n": 1}\n' + bytes(100))
    file = JsonLines(path)
    assert list(file.resume()) == [{"n": 1}]
    file.close()
    assert path.read_bytes() == b'{"n": 1}\n'


@pytest.mark.parametrize("line", ["no JSON", "[1]", ""], ids=["text", "list", "blank"])
def test_file_in_another_form_is_refused_and_not_changed(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"n": 1}}\n{line}\n{{"n": 2}}\n')
    before = path.read_bytes()
    file = JsonLines(path)
    with pytest.raises(DatasetError, match="line 2: not a line that was written"):
        list(file.resume())
    file.close()
    assert path.read_bytes() == before


def test_line_longer_than_the_maximum_is_refused(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "out.jsonl")
    assert f"the maximum is {MAX_LINE_BYTES:,}" in file.write({"text": "x" * MAX_LINE_BYTES})
    file.write({"n": 1})
    file.flush()
    file.close()
    assert entries(tmp_path / "out.jsonl") == [{"n": 1}]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([0.5, math.nan, {"a": -math.inf}], '[0.5, null, {"a": null}]'),
        ({"größer": "\ud800", "b": math.inf}, r'{"gr\u00f6\u00dfer": "\ud800", "b": null}'),
        (b"\x00\xff", '"AP8="'),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), '"2026-01-02T03:00:00+00:00"'),
        ([Decimal("1.50"), date(2026, 1, 2)], '["1.50", "2026-01-02"]'),
        (np.array([1.0, math.nan]), "[1.0, null]"),
    ],
    ids=["nan", "surrogate", "bytes", "time", "decimal", "numpy"],
)
def test_results_that_json_lacks_have_a_form_in_it(result: Any, text: str) -> None:
    assert encoded({"result": result}) == f'{{"result": {text}}}'.encode()


def test_file_that_was_removed_fails_the_next_flush(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "out.jsonl")
    file.open()
    (tmp_path / "out.jsonl").unlink()
    file.write({"n": 1})
    with pytest.raises(DatasetError, match=r"out\.jsonl: cannot be written: the file was removed"):
        file.flush()
    file.close()


def test_flush_on_a_full_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    path, filler = tmp_path / "out.jsonl", {"text": "x" * 5000}
    file = JsonLines(path)
    file.open()
    file.write({"n": 1})
    file.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signalled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        file.write(filler)
        with pytest.raises(DatasetError, match=r"out.jsonl: cannot be written: File too large"):
            file.flush()
        size_bytes = path.stat().st_size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, signalled)
    assert size_bytes == len('{"n": 1}\n')
    file.flush()
    file.close()
    assert entries(path) == [{"n": 1}, filler]


def test_lines_above_the_buffer_size_are_written_without_a_flush(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "out.jsonl")
    file.write({"text": "x" * BUFFER_BYTES})
    assert (tmp_path / "out.jsonl").stat().st_size > BUFFER_BYTES
    file.close()

"""Traces: what a line may say, and what is told of a broken one."""

from pathlib import Path

import pytest

from batchery import DatasetError
from batchery_worker.job import Lane
from batchery_worker.simulator.workload import Arrival, read_trace

CLASSES = ("high", "normal", "low")

#: A broken line -> what is told of it.
BROKEN = {
    "{": "not JSON: ",
    "[1]": "[1] is no JSON object",
    '{"time_s": 6, "tenent": "a"}': "no field 'tenent'; there are time_s, task, class, tenant",
    "{}": "no time_s; give the seconds since any moment",
    '{"time_s": "6"}': 'time_s is "6"; it must be a number of seconds',
    '{"time_s": true}': "time_s is true; it must be a number of seconds",
    '{"time_s": -1}': "time_s is -1; it must be at least 0",
    '{"time_s": NaN}': "time_s is NaN; it must be at least 0",
    '{"time_s": 1' + 400 * "0" + "}": "it must be at least 0",
    '{"time_s": 6, "class": "urgent"}': "no class 'urgent'; there are high, normal, low",
    '{"time_s": 6, "class": 3}': "class is 3; it must be a text",
    '{"time_s": 6, "items": 0}': "items is 0; it must be a whole number of at least 1",
    '{"time_s": 6, "items": 1.5}': "items is 1.5; it must be a whole number of at least 1",
    '{"time_s": 6, "tokens": -1}': "tokens is -1; it must be a whole number of at least 0",
    '{"time_s": 6, "deadline_s": "soon"}': 'deadline_s is "soon"; it must be a number of seconds',
    '{"time_s": 6, "task": ["' + 100 * "a" + '"]}': "aaaa...; it must be a text",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_every_field_is_read_and_time_begins_at_the_first_job(path: Path) -> None:
    path.write_text(
        '{"time_s": 1700000000.5}\n\n'
        '{"time_s": 1700000001, "task": "embed", "class": "low", "tenant": "acme", "items": 3,'
        ' "tokens": 90, "deadline_s": 2}\n'
    )
    assert read_trace(path, CLASSES) == [
        Arrival(0.0, "task", Lane("high")),
        Arrival(0.5, "embed", Lane("low", "acme"), 3, 90, 2.0),
    ]


def test_lines_may_be_in_any_order_and_those_of_one_time_stay_in_theirs(path: Path) -> None:
    rows = [(7.5, "c"), (5.0, "a"), (9.0, "d"), (5.0, "b")]
    path.write_text("".join(f'{{"time_s": {at}, "task": "{name}"}}\n' for at, name in rows))
    assert [(job.time_s, job.task) for job in read_trace(path, CLASSES)] == [
        (0.0, "a"),
        (0.0, "b"),
        (2.5, "c"),
        (4.0, "d"),
    ]


def test_a_trace_may_be_empty(path: Path) -> None:
    path.write_text("\n")
    assert read_trace(path, CLASSES) == []


def test_a_trace_may_be_written_on_windows(path: Path) -> None:
    path.write_bytes(b'\xef\xbb\xbf{"time_s": 5}\r\n{"time_s": 6}\r\n')
    assert [job.time_s for job in read_trace(path, CLASSES)] == [0.0, 1.0]


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_told_with_file_number_and_problem(path: Path, line: str) -> None:
    path.write_text(f'{{"time_s": 5}}\n{line}\n')
    with pytest.raises(DatasetError) as caught:
        read_trace(path, CLASSES)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert BROKEN[line] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_told(path: Path) -> None:
    path.write_bytes(b'{"time_s": 5}\n\xff\xfe\n')
    with pytest.raises(DatasetError, match=r"is no text in UTF-8"):
        read_trace(path, CLASSES)


def test_a_file_that_is_not_there_is_told(path: Path) -> None:
    with pytest.raises(DatasetError, match=r"trace\.jsonl: cannot be read: No such file"):
        read_trace(path, CLASSES)

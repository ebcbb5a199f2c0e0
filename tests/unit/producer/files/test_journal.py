import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import FinishedLines, Journal
from batchery_producer.files.source import find_sources


def begin(*paths: Path, **changes: Any) -> Journal:
    given: dict[str, Any] = {"task": "embed", "settings": {"field": None}, "window": 16, **changes}
    return Journal.of(Dataset(list(paths)).sources, **given)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    return path


def test_journal_is_read_as_it_was_written(tmp_path: Path, path: Path) -> None:
    journal = begin(path)
    journal.write(tmp_path / "j")
    assert Journal.read(tmp_path / "j") == journal
    assert Journal.read(tmp_path / "none") is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.txt", "j"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"v": 2}', '{"v": 1, "run": "x"}'])
def test_journal_in_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "j").write_text(content)
    with pytest.raises(DatasetError, match="j: cannot be used to resume"):
        Journal.read(tmp_path / "j")


def test_journal_continues_its_run_with_the_larger_window(path: Path) -> None:
    journal = begin(path)
    again = journal.continued_by(begin(path, window=99))
    assert (again.run, again.window) == (journal.run, 99)
    assert journal.continued_by(begin(path, window=1)).window == 16


def test_journal_continues_after_the_input_was_moved(tmp_path: Path, path: Path) -> None:
    journal = begin(path)
    path.rename(tmp_path / "moved.txt")
    assert journal.continued_by(begin(tmp_path / "moved.txt")).files == journal.files


@pytest.mark.parametrize("value", [(1, 2), {1: "one"}, date(2026, 1, 2), Decimal("1.50")])
def test_journal_continues_with_keywords_that_json_lacks(
    tmp_path: Path, path: Path, value: Any
) -> None:
    settings = {"kwargs": {"given": value}}
    begin(path, settings=settings).write(tmp_path / "j")
    journal = Journal.read(tmp_path / "j")
    assert journal is not None
    assert journal.continued_by(begin(path, settings=settings)).run == journal.run
    with pytest.raises(DatasetError, match="kwargs: "):
        journal.continued_by(begin(path, settings={"kwargs": {"given": 5}}))


def test_journal_refuses_another_format(path: Path) -> None:
    one, other = (Dataset(path, format=name) for name in ("text", "csv"))
    journal = begin(path, settings=one.settings)
    assert journal.continued_by(begin(path, settings=Dataset(path).settings)).run == journal.run
    with pytest.raises(
        DatasetError, match=r"formats: \['csv'\] now, \['text'\] when the run began"
    ):
        journal.continued_by(begin(path, settings=other.settings))


def test_journal_refuses_other_files(tmp_path: Path, path: Path) -> None:
    journal = begin(path)
    (tmp_path / "more.txt").write_text("two\n")
    with pytest.raises(DatasetError, match=r"files \(.*more\.txt is new\): 2 now, 1"):
        journal.continued_by(begin(path, tmp_path / "more.txt"))
    path.write_text("One\n")
    with pytest.raises(DatasetError, match=r"in\.txt: has changed"):
        journal.continued_by(begin(path))


def test_fingerprint_covers_every_byte_or_blocks_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(bytes(100))
    monkeypatch.setattr("batchery_producer.files.source.BLOCK_BYTES", 10)

    def changed_by(position: int) -> bool:
        before = find_sources(path, None)[0].fingerprint()
        with open(path, "r+b") as file:
            file.seek(position)
            file.write(b"x")
        return find_sources(path, None)[0].fingerprint() != before

    assert all(changed_by(position) for position in (0, 50, 99, 100))
    monkeypatch.setattr("batchery_producer.files.source.FINGERPRINT_BYTES", 60)
    assert changed_by(25)
    assert not changed_by(15)
    assert changed_by(200)


@given(
    places=st.lists(
        st.tuples(st.integers(0, (1 << 24) - 1), st.integers(1, (1 << 36) - 1)), unique=True
    )
)
def test_task_ids_are_different_uuids_that_the_pattern_finds(places: list[tuple[int, int]]) -> None:
    journal = Journal("0123456789abcdef", "embed", {}, [], [], 1)
    other = Journal("fedcba9876543210", "embed", {}, [], [], 1)
    ids = [journal.task_id(*place) for place in places]
    assert len(set(ids)) == len(ids)
    text = json.dumps([*ids, *(other.task_id(*place) for place in places)]).encode()
    assert [found.decode() for found in journal.pattern.findall(text)] == ids
    assert all(len(each) == 36 and each[14] == "8" and each[19] in "89ab" for each in ids)


@given(lines=st.sets(st.tuples(st.integers(0, 1), st.integers(1, 5000))))
def test_line_is_done_once_it_was_noted(lines: set[tuple[int, int]]) -> None:
    names = ["a.txt", "b.txt"]
    done = FinishedLines(names)
    for source, line in lines:
        assert done.note({"file": names[source], "line": line, "result": 1})
        assert not done.note({"file": names[source], "line": line, "error": {}})
    assert {
        (source, line) for source in (0, 1) for line in range(5001) if (source, line) in done
    } == lines
    assert (done.succeeded, done.failed, len(done)) == (len(lines), 0, len(lines))


@pytest.mark.parametrize(
    "entry",
    [{}, {"line": "1"}, {"line": -1}, {"line": True}, {"line": 1, "file": "other"}],
    ids=str,
)
def test_entry_of_no_line_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="not a line that this run wrote"):
        FinishedLines(["a.txt"]).note(entry)

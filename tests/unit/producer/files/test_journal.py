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
from batchery_producer.files.journal import FinishedRows, Journal


def begin(*paths: Path, **changes: Any) -> Journal:
    return Journal.of(Dataset(list(paths)).sources, {"task": "embed", "field": None, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("one\n")
    return path


def test_journal_is_read_as_it_was_written(tmp_path: Path, path: Path) -> None:
    journal = begin(path)
    journal.write(tmp_path / "j")
    assert Journal.read(tmp_path / "j") == journal
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.txt", "j"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"v": 1}', '{"v": 3, "run": "x"}'])
def test_journal_in_another_form_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "j").write_text(content)
    with pytest.raises(DatasetError, match="j: cannot be used to resume"):
        Journal.read(tmp_path / "j")


def test_journal_is_gone_on_with_after_the_input_was_moved(tmp_path: Path, path: Path) -> None:
    journal = begin(path)
    journal.check(begin(path))
    path.rename(tmp_path / "moved.txt")
    journal.check(begin(tmp_path / "moved.txt"))


@pytest.mark.parametrize("value", [(1, 2), {1: "one"}, date(2026, 1, 2), Decimal("1.50")])
def test_journal_continues_with_keywords_that_json_lacks(
    tmp_path: Path, path: Path, value: Any
) -> None:
    kwargs = {"given": value}
    begin(path, kwargs=kwargs).write(tmp_path / "j")
    journal = Journal.read(tmp_path / "j")
    journal.check(begin(path, kwargs=kwargs))
    with pytest.raises(DatasetError, match="kwargs: "):
        journal.check(begin(path, kwargs={"given": 5}))


def test_journal_refuses_another_task_format_or_file(tmp_path: Path, path: Path) -> None:
    one, other = (Dataset(path, format=name) for name in ("text", "csv"))
    journal = begin(path, **one.settings)
    journal.check(begin(path, **Dataset(path).settings))
    (tmp_path / "more.txt").write_text("two\n")
    for now, why in [
        (begin(path, **other.settings), r"formats: \['csv'\] now, \['text'\] when the run"),
        (begin(path, **one.settings, task="other"), "task: 'other' now, 'embed' when"),
        (begin(path, tmp_path / "more.txt", **one.settings), "number of files: 2 now"),
    ]:
        with pytest.raises(DatasetError, match=why):
            journal.check(now)
    path.write_text("One\n")
    with pytest.raises(DatasetError, match=r"in\.txt: has changed"):
        journal.check(begin(path, **one.settings))


@given(
    places=st.lists(
        st.tuples(st.integers(0, (1 << 24) - 1), st.integers(1, (1 << 36) - 1)), unique=True
    )
)
def test_task_ids_are_different_uuids_that_the_pattern_finds(places: list[tuple[int, int]]) -> None:
    journal = Journal("0123456789abcdef", {}, [], [])
    other = Journal("fedcba9876543210", {}, [], [])
    ids = [journal.task_id(*place) for place in places]
    assert len(set(ids)) == len(ids)
    text = json.dumps([*ids, *(other.task_id(*place) for place in places)]).encode()
    assert [found.decode() for found in journal.pattern.findall(text)] == ids
    assert all(len(each) == 36 and each[14] == "8" and each[19] in "89ab" for each in ids)


@given(rows=st.sets(st.tuples(st.integers(0, 1), st.integers(1, 5000))))
def test_row_is_done_once_it_was_noted(rows: set[tuple[int, int]]) -> None:
    names = ["a.txt", "b.txt"]
    done = FinishedRows(names)
    for source, row in rows:
        done.note({"file": names[source], "row": row, "result": 1}, "out")
        done.note({"file": names[source], "row": row, "error": {}}, "out")
    assert {
        (source, row) for source in (0, 1) for row in range(5001) if (source, row) in done
    } == rows
    assert (done.count, done.failed) == (len(rows), 0)


@pytest.mark.parametrize(
    "entry", [{}, {"row": "1"}, {"row": -1}, {"row": True}, {"row": 1, "file": "other"}], ids=str
)
def test_entry_of_no_row_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="out: id None: is of another input"):
        FinishedRows(["a.txt"]).note(entry, "out")

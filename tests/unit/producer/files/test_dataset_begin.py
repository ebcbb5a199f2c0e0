"""What is noticed before anything is sent: wrong fields, formats, encodings, later files."""

from pathlib import Path

import pytest

from batchery import DatasetError
from batchery.retry import Interrupted
from batchery_producer.files.dataset import FIRST_ROWS, Dataset, Record
from batchery_producer.files.run import Feed


def begin(dataset: Dataset, *, stop: bool = False) -> list[Record]:
    """Reads as a run does, up to its first row; then to the end."""
    feed = Feed(dataset.checked(), 1000)
    feed.begin(lambda: stop)
    rows = list[Record]()
    while not feed.exhausted:
        rows += feed.take(1000, 60)
    return rows


def test_reading_begins_if_one_of_the_first_rows_has_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"no": 1}\n' * (FIRST_ROWS - 1) + '{"text": "a", "key": null}\n{"no": 2}\n')
    rows = begin(Dataset(path, field="text", id_field="key"))
    assert [row.line for row in rows] == list(range(1, FIRST_ROWS + 2))


@pytest.mark.parametrize(
    ("field", "id_field", "why"),
    [
        ("txt", None, "no field 'txt', the nearest is text; fields: 'text', 'key'"),
        ("text", "keys", "no field 'keys', the nearest is key; fields: 'text', 'key'"),
    ],
)
def test_reading_does_not_begin_without_a_field_that_the_caller_names(
    tmp_path: Path, field: str, id_field: str | None, why: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "key": "b"}\n' * (FIRST_ROWS + 1))
    with pytest.raises(DatasetError, match=rf"{why}; none of the first 100 rows can be used"):
        begin(Dataset(path, field=field, id_field=id_field))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("in.jsonl", b"not JSON\nnor this\n", "line 1: not JSON: .*; none of the first 2 rows"),
        ("in.jsonl", b'[{"text": "a"}]\n', "line 1: a JSON list; .*jq .* makes lines of a list"),
        ("in.csv", b"id;text\n1;gr\xfc\xdfe\n2;\xfcber\n", "line 2: not UTF-8, .*iconv"),
        ("in.txt", "one\n".encode("utf-16"), "UTF-16; convert it to UTF-8"),
        ("in.csv", b'id,text\n1,"a\n2,"b\n', "line 2: not CSV: .*check --format"),
        (
            "in.csv",
            b"question; long, or not\nHow?\nWhy?\n",
            "line 2: 1 columns; .*the header of a CSV",
        ),
    ],
)
def test_reading_does_not_begin_if_none_of_the_first_rows_can_be_read(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=why):
        begin(Dataset(path))


def test_reading_begins_if_one_of_the_first_rows_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("not JSON\nnor this\n" + '{"text": "a"}\n{"no": 1}\n')
    rows = begin(Dataset(path))
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_reading_does_not_begin_without_a_row_or_when_asked_to_stop(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("\n\n")
    with pytest.raises(DatasetError, match="empty; there is nothing"):
        begin(Dataset(path))
    path.write_text("a\n")
    with pytest.raises(DatasetError, match="a bare string; it has no fields"):
        begin(Dataset(path, field="text"))
    with pytest.raises(Interrupted):
        begin(Dataset(path), stop=True)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("b.jsonl", b'{"one": "a", "two": "b"}\n', "no field 'text' in the first row"),
        (
            "b.jsonl",
            b'{"custom_id": "a", "url": "/v1", "method": "POST", "body": {}}\n',
            "takes OpenAI's batch files",
        ),
        ("b.csv", b"id,id\n1,2\n", "names a column twice"),
        ("b.csv", "id,text\n".encode("utf-16"), "UTF-16"),
        ("b.parquet", b"no table at all, but long enough to be one", "cannot be read"),
        ("b.txt", b"\x1f\x8bgarbage", "cannot be read"),
    ],
)
def test_reading_does_not_begin_if_a_later_file_would_end_it(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    rows = "".join(f'{{"text": "a", "id": {number}}}\n' for number in range(FIRST_ROWS))
    (tmp_path / "a.jsonl").write_text(f"not JSON\n{rows}")
    (tmp_path / name).write_bytes(content)
    names = [tmp_path / "a.jsonl", tmp_path / name]
    with pytest.raises(DatasetError, match=why):
        begin(Dataset(names))
    # A part of the rows may need none of it.
    assert len(begin(Dataset(names, limit=2))) == 2


def test_files_of_several_formats_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1}\n')
    (tmp_path / "b.txt").write_text("one\n")
    dataset = Dataset([tmp_path / "a.jsonl", tmp_path / "b.txt"])
    assert [row.id for row in begin(dataset)] == [1, f"{tmp_path}/b.txt:1"]
    assert "the item is 'text', the id is 'id'" in dataset.description
    assert dataset.total == 2

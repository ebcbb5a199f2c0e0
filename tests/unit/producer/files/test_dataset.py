"""Files become records: formats, ids, numbers of rows, and rows that are dirty."""

import gzip
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset, Record, choose_field
from batchery_producer.files.rows import (
    MAX_LINE_BYTES,
    find_delimiter,
    read_csv,
    read_json,
    read_text,
    split_lines,
)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, **options: Any) -> list[Record]:
    return list(Dataset(path, **options))


def good(rows: list[Record]) -> list[tuple[int, Any, Any]]:
    """Number, id and item of the rows that can be sent."""
    return [(row.row, row.id, row.item) for row in rows if not row.broken]


def bad(rows: list[Record]) -> list[tuple[int, Any, str]]:
    return [(row.row, row.id, row.broken) for row in rows if row.broken]


ROWS = [{"id": "a", "text": "first"}, {"id": "b", "text": "zweite, größer"}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = 'id,text\na,first\nb,"zweite, größer"\n'
TSV = "id\ttext\na\tfirst\nb\tzweite, größer\n"


@pytest.mark.parametrize("name", ["d.jsonl", "d.csv", "d.tsv"])
def test_input_in_every_format_gives_the_same_records(tmp_path: Path, name: str) -> None:
    content = {"d.jsonl": JSONL, "d.csv": CSV, "d.tsv": TSV}[name]
    assert good(read(write(tmp_path / name, content))) == [
        (1, "a", "first"),
        (2, "b", "zweite, größer"),
    ]


def test_gzip_is_recognised_whatever_the_file_is_called(tmp_path: Path) -> None:
    assert good(read(write(tmp_path / "d.txt", gzip.compress(b"one\n")))) == [(1, 1, "one")]
    assert good(read(write(tmp_path / "d.txt.gz", "one\n"))) == [(1, 1, "one")]


def test_text_lines_keep_spaces_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "d.txt", "\ufeff one \r\n\n  \ntwo"))
    assert good(rows) == [(1, 1, " one "), (2, 2, "two")]
    assert [row.line for row in rows] == [1, 4]


def test_rows_have_numbers_to_join_by_whatever_lines_they_take(tmp_path: Path) -> None:
    content = 'id,text\na,"two\nlines"\n\nb,"also\n\ntwo"\n"c"d,broken\ne,end\n'
    rows = read(write(tmp_path / "d.csv", content))
    assert [(row.row, row.id, row.line) for row in rows] == [
        *[(1, "a", 2), (2, "b", 5), (3, None, 8), (4, "e", 9)],
    ]


def test_format_is_named_or_follows_the_extension(tmp_path: Path) -> None:
    path = write(tmp_path / "d.data", "one\n")
    assert good(read(path, format="text")) == [(1, 1, "one")]
    with pytest.raises(DatasetError, match=r"\.data tells no format.*--format"):
        Dataset(path)
    with pytest.raises(DatasetError, match="format 'xml': unknown"):
        Dataset(path, format="xml")


def test_item_is_a_string_a_field_a_path_or_the_only_text(tmp_path: Path) -> None:
    assert good(read(write(tmp_path / "a.jsonl", '"one"\n"two"\n'))) == [
        (1, 1, "one"),
        (2, 2, "two"),
    ]
    rows = [{"body": {"input": "inner"}}, {"body.input": "flat", "body": {"input": "inner"}}]
    path = write(tmp_path / "b.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert [item for _, _, item in good(read(path, field="body.input"))] == ["inner", "flat"]
    assert choose_field({"id": "7", "body": "b", "size": 3}, id_field="id") == "body"
    assert choose_field({"a": "1", "text": "t"}) == "text"
    path = write(tmp_path / "d.csv", "title,body\na,b\n")
    with pytest.raises(DatasetError, match=r"d\.csv: .*--field: fields: 'title', 'body'"):
        read(path)


@pytest.mark.parametrize("id_", [7, "7", 1.5, True, ["a", 1], {"a": 1}])
def test_ids_keep_their_type(tmp_path: Path, id_: Any) -> None:
    path = write(tmp_path / "d.jsonl", json.dumps({"custom_id": id_, "text": "t"}))
    assert good(read(path)) == [(1, id_, "t")]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "d.jsonl",
            '{"id": "a", "text": 1}\n{"id": null, "text": 2}\n{"text": 3}\n{"id": "", "text": 4}',
        ),
        ("d.csv", "id,text\na,1\n,2\n ,3\n,4\n"),
    ],
)
def test_row_without_an_id_among_rows_with_ids_runs_and_has_none(
    tmp_path: Path, name: str, content: str, named: bool
) -> None:
    rows = read(write(tmp_path / name, content), id_field="id" if named else None)
    assert [(row, id_, str(item)) for row, id_, item in good(rows)] == [
        *[(1, "a", "1"), (2, None, "2"), (3, None, "3"), (4, None, "4")],
    ]


def test_broken_first_row_takes_no_id_from_a_good_one(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "d.jsonl", '{broken\n{"id": 1, "text": "t"}\n'))
    assert [(row.row, row.id, bool(row.broken)) for row in rows] == [(1, None, True), (2, 1, False)]
    rows = read(write(tmp_path / "e.jsonl", '{broken\n{"text": "t"}\n{broken\n'))
    assert [(row.row, row.id) for row in rows] == [(1, None), (2, 2), (3, 3)]


def test_broken_json_line_fails_alone(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": ',
        b"[1, 2]",
        b'{"text": "\xff"}',
        b'{"other": 1}',
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"text": "also good"}',
    ]
    rows = read(write(tmp_path / "d.jsonl", b"\n".join(lines)))
    assert good(rows) == [(1, 1, "good"), (8, 8, "also good")]
    expected = ["not JSON", "a JSON list", "not UTF-8", "no field 'text'", "not JSON", "not JSON"]
    for want, (_, _, reason) in zip(expected, bad(rows), strict=True):
        assert want in reason


def test_broken_csv_row_fails_alone(tmp_path: Path) -> None:
    content = b'text,n\ngood,1\n"a"b,2\nonly\n\xff,3\n"two\nlines",4\nend,5\n'
    rows = read(write(tmp_path / "d.csv", content), field="text")
    assert [item for _, _, item in good(rows)] == ["good", "two\nlines", "end"]
    assert bad(rows) == [
        (2, 2, "not CSV: ',' expected after '\"'"),
        (3, 3, "1 columns; the header has 2"),
        (4, 4, "not UTF-8, into which iconv converts other encodings"),
    ]


@pytest.mark.parametrize(
    ("delimiter", "content"),
    [
        (",", 'id,text\n1,"a; b; c"\n2,"d; e"\n'),
        (",", "text\nOne; two; three.\nFour; five.\n"),
        (",", 'id,"text; in German"\n1,a; b\n2,c\n'),
        (",", 'id,"a;b"\n1,x;y\n2,x;y\n'),
        (",", "text\n"),
        (";", "id;text\n1;Hello, world\n2;Bye, all\n"),
        (";", '"id";"text"\n"1";"a;b"\n'),
        (";", "id;text, long;n\n1;a;1,5\n2;b, c;2,5\n"),
        (";", '\ufeff"a;b";text\n1;"two\nlines; or, three"\n'),
        ("\t", "id\ttext\n1\tHello, world; bye\n"),
        ("|", "id|text\n1|Hello, world\n"),
        (",", ""),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_delimiter_of_a_csv_divides_its_header(delimiter: str, content: str, line_end: str) -> None:
    assert find_delimiter(content.replace("\n", line_end).encode()) == delimiter


def test_delimiter_is_described(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "id;text\n1;Hello, world\n")
    dataset = Dataset(path)
    assert good(list(dataset)) == [(1, "1", "Hello, world")]
    expected = f"{path}: the item is 'text', the id is 'id'; columns are divided by ';'"
    assert dataset.description == expected


def test_description_says_what_an_item_is(tmp_path: Path) -> None:
    found = []
    for name, content in [("d.txt", "a\n"), ("d.jsonl", '{"question": "a"}\n')]:
        dataset = Dataset(write(tmp_path / name, content))
        list(dataset)
        found.append(dataset.description.partition(": ")[2])
    expected = "the item is 'question', the id is the number of the row"
    assert found == ["each line is an item", expected]


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl", "d.csv"])
def test_what_is_not_utf_8_fails_and_says_what_to_do(tmp_path: Path, name: str) -> None:
    text = {"d.txt": "größer\n", "d.jsonl": '{"text": "größer"}\n', "d.csv": "text,n\ngrößer,1\n"}
    path = write(tmp_path / name, text[name].encode("latin-1"))
    ((_, _, reason),) = bad(read(path, field=None))
    assert reason.startswith("not UTF-8, into which iconv converts other encodings")


def test_csv_whose_header_is_unusable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="twice: text, text"):
        read(write(tmp_path / "d.csv", "text,text\na,b\n"))
    with pytest.raises(DatasetError, match=r"old Mac line ends; .*tr '\\r' '\\n'"):
        read(write(tmp_path / "d.csv", b"id,text\r1,a\r"))


def test_csv_cell_of_half_a_megabyte_is_read(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "d.csv", "text\n" + "x" * 500_000 + "\n"))
    assert good(rows) == [(1, 1, "x" * 500_000)]


@pytest.mark.parametrize("read_rows", [read_text, read_json, read_csv])
def test_line_longer_than_the_maximum_fails_alone(read_rows: Any) -> None:
    huge, longest = b"x" * (2 * MAX_LINE_BYTES + 5), b'"%s"\n' % (b"x" * (MAX_LINE_BYTES - 3))
    lines = split_lines(io.BytesIO(longest + huge + b'\n"next"\n'))
    *_, (number, invalid), (_, row) = read_rows(lines)
    assert (number, str(invalid)) == (2, "longer than 16777216 bytes")
    assert "next" in str(row)


def test_gzip_that_is_torn_gives_its_rows_and_then_a_broken_row(tmp_path: Path) -> None:
    lines = "".join(f"{os.urandom(20).hex()}\n" for _ in range(20_000)).encode()
    compressed = gzip.compress(lines)
    rows = read(write(tmp_path / "d.txt.gz", compressed[: len(compressed) // 2]))
    assert len(rows) > 1000
    ((number, _, reason),) = bad(rows)
    assert number == len(rows)
    assert "cannot be read from here on" in reason
    with pytest.raises(DatasetError, match=r"d.txt: cannot be read"):
        read(write(tmp_path / "d.txt", b"\x1f\x8bgarbage"))


@pytest.mark.parametrize(
    ("name", "content"),
    [("d.txt", ""), ("d.txt", "\n\n"), ("d.txt", gzip.compress(b"")), ("d.csv", "id,text\n")],
    ids=["nothing", "blank", "gzip", "header"],
)
def test_empty_input_is_refused(tmp_path: Path, name: str, content: str | bytes) -> None:
    with pytest.raises(DatasetError, match="empty"):
        read(write(tmp_path / name, content))


def test_limit_counts_rows_and_the_total_is_exact_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", "".join(f"line {n:04}\n" for n in range(1000)))
    dataset = Dataset(path)
    assert dataset.total is None
    records = iter(dataset)
    for _ in range(100):
        next(records)
    assert dataset.total is not None
    assert 100 <= dataset.total <= 1000
    assert len(list(records)) == 900
    assert dataset.total == 1000
    assert len(read(path, limit=10)) == 10


def test_named_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("one\ntwo\n",))
    writer.start()
    dataset = Dataset(path)
    assert len(list(dataset)) == 2
    writer.join()

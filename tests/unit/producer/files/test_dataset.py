import gzip
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.records import Broken, Record, choose_field
from batchery_producer.files.rows import (
    MAX_LINE_BYTES,
    CsvRows,
    JsonRows,
    Lines,
    TextRows,
    find_delimiter,
)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path: Path, **options: Any) -> list[Record | Broken]:
    return list(Dataset(path, **options))


ROWS = [{"id": "a", "text": "first"}, {"id": "b", "text": "zweite, größer"}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = 'id,text\na,first\nb,"zweite, größer"\n'
TSV = "id\ttext\na\tfirst\nb\tzweite, größer\n"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("name", "content"), [("d.jsonl", JSONL), ("d.csv", CSV), ("d.tsv", TSV)])
def test_input_in_every_format_gives_the_same_records(
    tmp_path: Path, name: str, content: str, compressed: bool
) -> None:
    data = gzip.compress(content.encode()) if compressed else content.encode()
    records = read(write(tmp_path / (name + (".gz" if compressed else "")), data))
    assert [(each.id, each.item) for each in records if isinstance(each, Record)] == [
        ("a", "first"),
        ("b", "zweite, größer"),
    ]


def test_gzip_is_recognised_whatever_the_file_is_called(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", gzip.compress(b"one\ntwo\n"))
    assert read(path) == [Record(1, 1, "one"), Record(2, 2, "two")]


def test_plain_content_with_a_gzip_name_is_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "d.txt.gz", "one\n")) == [Record(1, 1, "one")]


def test_text_lines_keep_spaces_and_skip_blank_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", "\ufeff one \r\n\n  \ntwo")
    assert read(path) == [Record(1, 1, " one "), Record(4, 4, "two")]


def test_format_is_named_or_follows_the_extension(tmp_path: Path) -> None:
    path = write(tmp_path / "d.data", "one\n")
    assert read(path, format="text") == [Record(1, 1, "one")]
    with pytest.raises(DatasetError, match=r"\.data tells no format.*--format"):
        Dataset(path)
    with pytest.raises(DatasetError, match="format 'xml': unknown"):
        Dataset(path, format="xml")


def test_strings_as_json_lines_are_items(tmp_path: Path) -> None:
    assert read(write(tmp_path / "d.jsonl", '"one"\n"two"\n')) == [
        Record(1, 1, "one"),
        Record(2, 2, "two"),
    ]


def test_dotted_field_is_a_path_unless_a_key_has_that_name(tmp_path: Path) -> None:
    rows = [{"body": {"input": "inner"}}, {"body.input": "flat", "body": {"input": "inner"}}]
    path = write(tmp_path / "d.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert [each.item for each in read(path, field="body.input") if isinstance(each, Record)] == [
        "inner",
        "flat",
    ]


def test_only_string_besides_the_id_is_the_item() -> None:
    assert choose_field({"id": "7", "body": "b", "size": 3}, id_field="id") == "body"
    assert choose_field({"a": "1", "text": "t"}) == "text"


def test_unclear_item_field_is_refused_with_the_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "title,body\na,b\n")
    with pytest.raises(DatasetError, match=r"d\.csv: .*--field: fields: 'title', 'body'"):
        read(path)


@pytest.mark.parametrize("id_", [7, "7", 1.5, True, ["a", 1], {"a": 1}])
def test_ids_keep_their_type(tmp_path: Path, id_: Any) -> None:
    path = write(tmp_path / "d.jsonl", json.dumps({"custom_id": id_, "text": "t"}))
    assert read(path) == [Record(1, id_, "t")]


def test_row_without_id_among_rows_with_ids_has_none_unless_the_id_field_is_named(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "d.jsonl", '{"id": "a", "text": "t"}\n{"id": null, "text": "u"}\n')
    assert read(path)[1] == Record(2, None, "u")
    broken = read(path, id_field="id")[1]
    assert isinstance(broken, Broken)
    assert "no id in field 'id'" in broken.reason


def test_repeated_id_fails_and_names_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "id,text\na,1\nb,2\na,3\n")
    assert read(path)[2] == Broken(4, None, "the id 'a' is already used in line 2")


def test_ids_of_different_types_are_different(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"id": 1, "text": "t"}\n{"id": "1", "text": "u"}\n')
    assert all(isinstance(each, Record) for each in read(path))


def test_broken_json_line_fails_alone(tmp_path: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": ',
        b"[1, 2]",
        b'{"text": "\xff"}',
        b'{"other": 1}',
        b"[" * 100_000,
        b'{"text": "also good"}',
    ]
    records = read(write(tmp_path / "d.jsonl", b"\n".join(lines)))
    assert records[0] == Record(1, 1, "good")
    assert records[6] == Record(7, 7, "also good")
    reasons = [each.reason for each in records[1:6] if isinstance(each, Broken)]
    expected = ["not JSON", "a JSON list", "not UTF-8", "no field 'text'", "not JSON"]
    assert [
        want for want, reason in zip(expected, reasons, strict=True) if want not in reason
    ] == []


def test_broken_csv_row_fails_alone(tmp_path: Path) -> None:
    content = b'text,n\ngood,1\n"a"b,2\nonly\n\xff,3\n"two\nlines",4\nend,5\n'
    records = read(write(tmp_path / "d.csv", content), field="text")
    assert records[0] == Record(2, 2, "good")
    assert records[4:] == [Record(6, 6, "two\nlines"), Record(8, 8, "end")]
    assert [(each.line, each.reason) for each in records[1:4] if isinstance(each, Broken)] == [
        (3, "not CSV: ',' expected after '\"'"),
        (4, "1 columns; the header has 2"),
        (5, "not UTF-8; name its encoding, such as --encoding latin-1"),
    ]


@pytest.mark.parametrize(
    ("delimiter", "content"),
    [
        (",", 'id,text\n1,"a; b; c"\n2,"d; e"\n'),
        (",", "text\nOne; two; three.\nFour; five.\n"),
        (",", 'id,"text; in German"\n1,a; b\n2,c\n'),
        (",", 'id,"a;b"\n1,x;y\n2,x;y\n'),
        (",", "question; long\nHow?\nWhy?\n"),
        (",", "id,text\n"),
        (",", "text\n"),
        (";", "id;text\n1;Hello, world\n2;Bye, all\n"),
        (";", '"id";"text"\n"1";"a;b"\n'),
        (";", "id;text, long;n\n1;a;1,5\n2;b, c;2,5\n"),
        (";", "id;text\n1;a; b\n2;c\n"),
        (";", '\ufeff"a;b";text\n1;"two\nlines; or, three"\n'),
        (";", "id;text\n"),
        ("\t", "id\ttext\n1\tHello, world; bye\n"),
        ("|", "id|text\n1|Hello, world\n"),
        (",", ""),
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_delimiter_of_a_csv_divides_header_and_rows(
    delimiter: str, content: str, line_end: str
) -> None:
    sample = content.replace("\n", line_end).encode()
    assert find_delimiter(sample, "utf-8") == delimiter
    whole = sample + b"1,2;3"  # The end of a sample may be cut.
    assert find_delimiter(whole, "utf-8") == delimiter


def test_unclear_delimiter_is_refused_and_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "id; text\n1; a\nb\n2; c\nd\n")
    with pytest.raises(DatasetError, match=r"d.csv: the delimiter is unclear: ';' is in .* 2 of"):
        read(path)
    assert len(read(path, delimiter=",")) == 4
    tabs = write(tmp_path / "tabs.csv", "id\ttext\n1\ta\n")
    assert read(tabs, delimiter="\\t") == [Record(2, "1", "a")]
    for wrong in ("", "::", '"', "\n"):
        with pytest.raises(DatasetError, match="must be one character"):
            Dataset(path, delimiter=wrong)
    with pytest.raises(DatasetError, match="is no CSV, so it has no delimiter"):
        Dataset(write(tmp_path / "d.txt", "a"), delimiter=";")


@pytest.mark.parametrize("compressed", [False, True])
def test_csv_with_semicolons_is_read_and_described(tmp_path: Path, compressed: bool) -> None:
    content = "id;text\n1;Hello, world\n2;größer\n".encode()
    path = write(tmp_path / "d.csv", gzip.compress(content) if compressed else content)
    dataset = Dataset(path)
    assert list(dataset) == [Record(2, "1", "Hello, world"), Record(3, "2", "größer")]
    expected = f"{path}: the item is 'text', the id is 'id'; columns are divided by ';'"
    assert dataset.description == expected


def test_description_says_what_an_item_is(tmp_path: Path) -> None:
    found = []
    for name, content in [("d.txt", "a\n"), ("d.jsonl", '{"question": "a"}\n')]:
        dataset = Dataset(write(tmp_path / name, content))
        list(dataset)
        found.append(dataset.description.partition(": ")[2])
    assert found == ["each line is an item", "the item is 'question', the id is the line number"]


@pytest.mark.parametrize("name", ["d.txt", "d.jsonl", "d.csv"])
def test_encoding_can_be_named_and_the_error_says_how(tmp_path: Path, name: str) -> None:
    text = {"d.txt": "größer\n", "d.jsonl": '{"text": "größer"}\n', "d.csv": "text,n\ngrößer,1\n"}
    path = write(tmp_path / name, text[name].encode("latin-1"))
    (broken,) = read(path, field=None)
    assert isinstance(broken, Broken)
    assert broken.reason.startswith("not UTF-8")
    assert broken.reason.endswith("; name its encoding, such as --encoding latin-1")
    (record,) = read(path, encoding="latin-1")
    assert isinstance(record, Record)
    assert record.item == "größer"


def test_encoding_that_cannot_be_read_by_lines_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", "a\n")
    for wrong in ("utf-16", "latin-99", "rot13", "hex"):
        with pytest.raises(DatasetError, match=f"encoding '{wrong}': unknown, or not read line"):
            Dataset(path, encoding=wrong)
    (broken,) = read(write(tmp_path / "d.csv", b"text,n\n\x81,1\n"), encoding="cp932")
    assert isinstance(broken, Broken)
    assert broken.reason == "not CP932"


def test_csv_header_with_duplicate_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="twice: text, text"):
        read(write(tmp_path / "d.csv", "text,text\na,b\n"))


def test_csv_with_old_mac_line_ends_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,text\r1,a\r")
    with pytest.raises(DatasetError, match=r"old Mac line ends; .*tr '\\r' '\\n'"):
        list(Dataset(tmp_path / "in.csv"))


def test_csv_cell_of_half_a_megabyte_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "d.csv", "text\n" + "x" * 500_000 + "\n")
    assert read(path) == [Record(2, 2, "x" * 500_000)]


@pytest.mark.parametrize("rows_class", [TextRows, JsonRows, CsvRows])
def test_line_longer_than_the_maximum_fails_alone(
    rows_class: type[TextRows | JsonRows | CsvRows],
) -> None:
    huge = b"x" * (2 * MAX_LINE_BYTES + 5)
    rows = rows_class(Lines(io.BytesIO(b'"text"\n' + huge + b'\n"next"\n')))
    if rows_class is not CsvRows:
        next(rows)
    with pytest.raises(ValueError, match="longer than 16777216 bytes"):
        next(rows)
    assert "next" in str(next(rows))


def test_gzip_that_is_torn_gives_its_rows_and_then_a_broken_row(tmp_path: Path) -> None:
    lines = "".join(f"{os.urandom(20).hex()}\n" for _ in range(20_000)).encode()
    compressed = gzip.compress(lines)
    records = read(write(tmp_path / "d.txt.gz", compressed[: len(compressed) // 2]))
    assert len(records) > 1000
    last = records[-1]
    assert isinstance(last, Broken)
    assert "cannot be read from here on" in last.reason


def test_gzip_with_invalid_content_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read"):
        read(write(tmp_path / "d.txt", b"\x1f\x8bgarbage"))


def test_utf_16_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="UTF-16; convert it"):
        read(write(tmp_path / "d.txt", "one\n".encode("utf-16")))


@pytest.mark.parametrize(
    "content", ["", "\n\n", gzip.compress(b"")], ids=["nothing", "blank", "gzip"]
)
def test_empty_input_is_refused(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(DatasetError, match="empty"):
        read(write(tmp_path / "d.jsonl", content))


def test_csv_with_only_a_header_is_refused_as_empty(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="empty"):
        read(write(tmp_path / "d.csv", "id,text\n"))


def test_missing_file_and_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="No such file"):
        Dataset(tmp_path / "none.jsonl")
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    with pytest.raises(DatasetError, match="a directory"):
        Dataset(folder)


def test_limit_counts_rows_and_the_total_is_exact_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path / "d.txt", "".join(f"line {n:04}\n" for n in range(1000)))
    dataset = Dataset(path)
    records = iter(dataset)
    for _ in range(100):
        next(records)
    assert dataset.total == 1000
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


def test_line_numbers_as_ids_never_meet_an_id_of_the_caller(tmp_path: Path) -> None:
    rows = '{"id": 2, "text": "t"}\n{"text": "u"}\n{"id": 3, "text": "v"}\n'
    assert [row.id for row in read(write(tmp_path / "d.jsonl", rows))] == [2, None, 3]
    assert [row.id for row in read(write(tmp_path / "e.jsonl", '"a"\n"b"\n'))] == [1, 2]
    rows = '"a"\n{"id": 1, "text": "t"}\n{"id": 3, "text": "u"}\n'
    first, clash, last = read(write(tmp_path / "f.jsonl", rows))
    assert (first.id, last.id) == (1, 3)
    assert isinstance(clash, Broken)
    assert clash.reason == "the id 1 is the number of an earlier line, which has no id"

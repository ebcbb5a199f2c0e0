"""Rows of Parquet and Arrow files; results as a Parquet file."""

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.output import WRITE_ROWS, write_parquet
from batchery_producer.files.rows import READ_ROWS

ROWS = [{"id": n, "text": f"text {n}"} for n in range(READ_ROWS * 2 + 5)]


def write(path: Path, rows: list[dict[str, Any]], format_: str = "parquet") -> Path:
    table = pyarrow.Table.from_pylist(rows)
    if format_ == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif format_ == "file":
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=700)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    return path


@pytest.mark.parametrize(
    ("name", "format_"),
    [("d.parquet", "parquet"), ("d.arrow", "file"), ("d.feather", "file"), ("d.arrow", "stream")],
)
def test_table_gives_rows_with_their_numbers(tmp_path: Path, name: str, format_: str) -> None:
    dataset = Dataset(write(tmp_path / name, ROWS, format_))
    assert [(each.row, each.id, each.item) for each in dataset] == [
        (number, row["id"], row["text"]) for number, row in enumerate(ROWS, 1)
    ]
    assert dataset.total == len(ROWS)


TIMES = {
    "nanoseconds": pyarrow.array([1, 1_700_000_000_123_456_789], pyarrow.timestamp("ns")),
    "nanoseconds of a day": pyarrow.array([1, 2], pyarrow.time64("ns")),
    "durations": pyarrow.array([1, 2], pyarrow.duration("ns")),
    "years after 9999": pyarrow.array([1, 1 << 40], pyarrow.timestamp("s")),
    "a zone that nobody knows": pyarrow.array([1, 2], pyarrow.timestamp("us", tz="Mars/Phobos")),
}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES.keys())
def test_times_that_python_lacks_end_no_run(tmp_path: Path, times: Any) -> None:
    table = pyarrow.table({"id": times, "text": ["a", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    one, other = Dataset(tmp_path / "d.parquet")
    assert (one.item, other.item) == ("a", "b")
    assert one.id != other.id


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_file_that_is_no_table_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no table at all, but long enough to be looked at")
    with pytest.raises(DatasetError, match=rf"{name}: cannot be read: "):
        list(Dataset(tmp_path / name))


def test_table_that_is_damaged_ends_with_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=READ_ROWS)
    data = bytearray(path.read_bytes())
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)
    *good, last = Dataset(path)
    assert len(good) == READ_ROWS
    assert (last.row, last.broken[:27]) == (READ_ROWS + 1, "cannot be read from here on")


def written(results: list[Any]) -> list[Any]:
    rows = [{"id": n, "row": n, "result": result} for n, result in enumerate(results)]
    file = io.BytesIO()
    write_parquet(lambda: rows, file)
    table = pyarrow.parquet.read_table(io.BytesIO(file.getvalue()))
    assert table.column_names == ["id", "row", "result"]
    assert [row["row"] for row in table.to_pylist()] == list(range(len(results)))
    return [row["result"] for row in table.to_pylist()]


@pytest.mark.parametrize(
    "results",
    [
        ["a", "größer"],
        [1, 2.5, None],
        [{"tokens": 3, "vector": [0.5, 1.0]}, {"tokens": 4, "vector": [1.0, 2.0]}],
        [[1], []],
        [True],
        [None],
        [],
    ],
    ids=["texts", "numbers", "embeddings", "lists", "bool", "nothing", "empty"],
)
def test_results_of_one_type_have_it_in_a_table(results: list[Any]) -> None:
    assert written(results) == results


def test_integers_that_no_float_has_stay_exact_beside_floats() -> None:
    """They come in parts, each of which has one type."""
    some = [[2**53 + 1]] * WRITE_ROWS, [[0.5]] * WRITE_ROWS
    for results in ([*some[0], *some[1]], [*some[1], *some[0]]):
        assert written(results) == [json.dumps(each) for each in results]


def test_results_with_different_fields_fit_one_column() -> None:
    assert written([{"a": 1}] * 5000 + [{"b": "x"}])[-1] == {"a": None, "b": "x"}


@pytest.mark.parametrize(
    "results",
    [["a", 1], [1] * 5000 + ["a"], [1, 2**70], [{}, {}], [[1], {"a": 1}], [{"a": {}}]],
    ids=["text-number", "late", "huge", "objects-of-nothing", "list-object", "nested"],
)
def test_results_of_no_common_type_are_json_texts(results: list[Any]) -> None:
    expected = [each if isinstance(each, str) else json.dumps(each) for each in results]
    assert written(results) == expected


def test_lone_surrogates_are_escaped_in_a_table() -> None:
    assert written(["a\ud800"]) == [r"a\ud800"]
    assert written([{"a": "\ud800"}]) == [r'{"a": "\ud800"}']

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import zstandard

from batchery import DatasetError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Record
from batchery_producer.run.output import Final, Output


def part_of(path: Path, entries: list[dict[str, Any]]) -> Path:
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return part


def entry(line: int, result: Any, **more: Any) -> dict[str, Any]:
    return {"id": f"row-{line}", **more, "line": line, "result": result}


def test_ordered_output_has_the_order_of_the_input(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    entries = [entry(line, line, file=file) for file in ("b", "a") for line in (900, 7, 30)]
    Final(path, ordered=True).write(part_of(path, entries), ["a", "b"])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rows] == [
        (file, line) for file in ("a", "b") for line in (7, 30, 900)
    ]


@pytest.mark.parametrize("name", ["out.csv", "out.tsv.gz", "out.csv.zst"])
def test_csv_output_has_texts_as_they_are_and_other_results_as_json(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    entries = [entry(1, 'a "b"\n,\tc'), entry(2, {"label": "größer"}), entry(3, None)]
    entries += [entry(4, "ü\ud800"), entry(5, ["\ud800"])]
    entries += [entry(6, "a\rb"), entry(7, "")]
    Final(path).write(part_of(path, entries), ["in"])
    data = path.read_bytes()
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    if name.endswith(".zst"):
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    rows = list(
        csv.reader(io.StringIO(data.decode(), newline=""), delimiter="\t" if "tsv" in name else ",")
    )
    assert rows == [
        ["id", "line", "result"],
        ["row-1", "1", 'a "b"\n,\tc'],
        ["row-2", "2", '{"label": "größer"}'],
        ["row-3", "3", "null"],
        ["row-4", "4", r"ü\ud800"],
        ["row-5", "5", r'["\ud800"]'],
        ["row-6", "6", "a\rb"],
        ["row-7", "7", ""],
    ]


def test_table_without_rows_has_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    Final(path).write(path.with_name("out.csv.part"), ["in"])
    assert path.read_text() == "id,line,result\n"


def test_compressed_parquet_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="parquet is compressed in itself"):
        Final(tmp_path / "out.parquet.gz")


@pytest.mark.parametrize(("name", "library"), [("o.parquet", "pyarrow"), ("o.zst", "zstandard")])
def test_output_whose_library_is_missing_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(DatasetError, match=rf"need {library}: pip install 'batchery\[datasets\]'"):
        Output(Dataset(tmp_path / "in.txt"), tmp_path / name)


def test_output_that_cannot_be_written_leaves_its_part(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    part = part_of(path, [entry(1, "a")])
    (tmp_path / "out.csv.new").mkdir()
    with pytest.raises(DatasetError, match=r"out\.csv: cannot be written: .*results are in .*part"):
        Final(path).write(part, ["in"])
    assert part.exists()
    assert not path.exists()


def test_part_is_resumed_and_the_output_written_when_complete(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\nb\n")
    source, path = Dataset(tmp_path / "in.txt"), tmp_path / "out.parquet"
    journal = Journal.of(source.sources, "embed", {}, 4)
    with Output(source, path) as output:
        output.open(journal)
        output.result(Record(2, 2, None), "B")
        output.finish(complete=False)
    assert not path.exists()
    with pytest.raises(DatasetError, match=r"out\.parquet: begun and not finished; --resume"):
        Output(source, path)
    with Output(source, path, resume=True) as output:
        assert output.open(Journal.of(source.sources, "embed", {}, 4)) == journal
        assert (0, 2) in output.done
        output.result(Record(1, 1, None), "A")
        output.finish(complete=True)
    assert pyarrow.parquet.read_table(path).to_pylist() == [
        {"id": 2, "line": 2, "result": "B"},
        {"id": 1, "line": 1, "result": "A"},
    ]
    assert sorted(each.name for each in tmp_path.iterdir() if "out" in each.name) == ["out.parquet"]
    with pytest.raises(DatasetError, match=r"out\.parquet: complete, or of another program"):
        Output(source, path, resume=True)


def test_only_a_complete_output_is_written_to_a_url(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\nb\n")
    source, path = Dataset(tmp_path / "in.txt"), tmp_path / "out.parquet"
    with Output(source, f"file://{path}") as output:
        output.open(Journal.of(source.sources, "embed", {}, 4))
        output.finish(complete=False)
        assert output.names == ("", "")
        output.result(Record(1, 1, None), "A")
        output.finish(complete=False)
        part = Path(output.names[0])
    assert part.stat().st_mode & 0o777 == 0o600  # Others may read the folder.
    assert json.loads(part.read_text())["result"] == "A"
    assert not path.exists()
    part.unlink()
    with Output(source, f"file://{path}") as output:
        output.open(Journal.of(source.sources, "embed", {}, 4))
        output.finish(complete=True)
        assert output.names == (f"file://{path}", "")
        part = output.results.path or part
    assert path.exists()
    assert not part.exists()

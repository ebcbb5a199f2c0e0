import sys
from pathlib import Path

import pytest

from batchery import DatasetError
from batchery_producer import Ending, Summary
from batchery_producer.files.dataset import Dataset
from batchery_producer.run.report import Report
from support.report_page import ReportPage

EVIL = '</td><script>alert("1")</script><img src=x onerror=alert(2)>&amp;'


@pytest.fixture
def source(tmp_path: Path) -> Dataset:
    path = tmp_path / "in<b>.jsonl"
    path.write_text('{"text": "a"}\n')
    return Dataset(path)


def written(report: Report, summary: Summary, task: str = "embed") -> ReportPage:
    report.write(task, summary)
    return ReportPage(report.path)


def test_report_has_no_external_references_and_escapes_names(
    tmp_path: Path, source: Dataset
) -> None:
    report = Report(tmp_path / "report.html", source, "out<i>.jsonl", None)
    report.figures.failed(0.5, f"line {EVIL}", EVIL, EVIL)
    page = written(report, Summary(Ending.GAVE_UP, 1, 0, 1, 0, 2.0, "q", EVIL), task=EVIL)
    assert page.outside == []
    assert page.rows("failures")[EVIL] == ["1", f"line {EVIL}", EVIL]
    assert page.text.count(EVIL) >= 5
    assert source.name in page.text
    assert "out<i>.jsonl" in page.text


def test_report_tables_have_the_summary_and_the_figures(tmp_path: Path, source: Dataset) -> None:
    report = Report(tmp_path / "report.html", source, "-", None)
    figures = report.figures
    figures.read(["x" * 10, "x" * 30])
    figures.sent(0.0, ["a", "b"])
    for task_id in ("a", "b"):
        figures.ended(0.5, task_id, 64)
        figures.succeeded(0.5)
    summary = Summary(Ending.SUCCEEDED, 1234, 1200, 34, 0, 2.0, "q", before=10_000)
    page = written(report, summary)
    assert page.rows("summary") == {
        "ended": ["succeeded"],
        "rows with a result": ["1,200"],
        "rows that failed": ["34"],
        "rows that were done before": ["10,000"],
        "rows in total": ["11,234"],
        "jobs sent": ["1,234"],
        "time": ["0:02"],
        "rows per second": ["617.0"],
    }
    assert page.rows("distributions") == {
        "": ["known of", "minimum", "mean", "half up to", "90 % up to", "99 % up to", "maximum"],
        "seconds from sending to result": ["2", *["0.5"] * 6],
        "characters of a text": ["2", "10", "20", "10", "30", "30", "30"],
        "items in the batch of a job": ["2", *["64"] * 6],
    }
    assert "results in" not in page.text


def test_report_of_a_run_without_jobs_is_written(tmp_path: Path, source: Dataset) -> None:
    report = Report(tmp_path / "report.html", source, "out.jsonl", None)
    page = written(report, Summary(Ending.INTERRUPTED, 0, 0, 0, 0, 0.0, "q", "interrupted"))
    assert page.text.count("no data") == 3
    assert len(page.tables["distributions"]) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("report.txt", "a report is a page; name it report.html"),
        ("none/report.html", "there is no directory"),
        ("folder.html", "a directory; name a file"),
        ("out.html", "the report needs a file of its own"),
        ("errors.html", "the report needs a file of its own"),
        (f"{'x' * 250}.html", "cannot be written: File name too long"),
        (f"{'x' * 300}.html", "cannot be written: File name too long"),
    ],
    ids=["suffix", "parent", "directory", "output", "errors", "long", "longer"],
)
def test_report_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, source: Dataset, name: str, why: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DatasetError, match=why):
        Report(tmp_path / name, source, tmp_path / "out.html", tmp_path / "errors.html")
    assert sorted(tmp_path.iterdir()) == before


def test_report_replaces_an_older_one_as_a_whole(tmp_path: Path, source: Dataset) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before")
    report = Report(path, source, "out.jsonl", None)
    assert path.read_text() == "the one before"
    written(report, Summary(Ending.SUCCEEDED, 0, 0, 0, 0, 0.0, "q"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in<b>.jsonl", "report.html"]


def test_report_without_its_library_is_refused(
    tmp_path: Path, source: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DatasetError, match=r"reports need matplotlib: pip install 'batchery\[rep"):
        Report(tmp_path / "report.html", source, "out.jsonl", None)

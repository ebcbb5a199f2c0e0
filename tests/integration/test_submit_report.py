"""`batchery submit --report`: a page whose figures agree with what was done."""

import json
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchery import DatasetError
from batchery_producer import Ending, Snapshot, Summary, submit_file
from support.bulk_runs import APP, QUEUE, Command, read_rows, write_rows
from support.harness import Worker
from support.patience import patient
from support.report_page import ReportPage
from support.roles import acting_as

LATENCY = "seconds from sending to result"
LENGTH = "characters of a text"
BATCH = "items in the batch of a job"


def counts(page: ReportPage) -> dict[str, int]:
    """The rows of the summary that are numbers."""
    cells = {name: cell.replace(",", "") for name, (cell,) in page.rows("summary").items()}
    return {name: int(cell) for name, cell in cells.items() if cell.isdigit()}


def run(folder: Path, app: Celery, task: str, **options: Any) -> tuple[Summary, ReportPage]:
    summary = submit_file(
        folder / "in.jsonl",
        f"{APP}.{task}",
        folder / "out.jsonl",
        app=app,
        queue=QUEUE,
        timeout_s=patient(60),
        report=folder / "report.html",
        **options,
    )
    return summary, ReportPage(folder / "report.html")


def test_its_figures_are_those_of_the_run(tmp_path: Path, client: Celery, worker: Worker) -> None:
    write_rows(tmp_path / "in.jsonl", 300)
    summary, page = run(tmp_path, client, "shout", window=64)
    assert counts(page) == {"rows with a result": 300, "rows that failed": 0, "jobs sent": 300}
    assert summary.succeeded == 300
    known = page.rows("distributions")
    assert known[LATENCY][0] == known[LENGTH][0] == known[BATCH][0] == "300"
    assert (known[LENGTH][1], known[LENGTH][-1]) == ("6", "8")
    assert 1 <= float(known[BATCH][1]) <= float(known[BATCH][-1]) <= 64
    # Shown with three digits.
    assert 0 < float(known[LATENCY][1]) <= float(known[LATENCY][-1]) <= summary.seconds * 1.01
    assert "failures" not in page.tables
    assert page.outside == []


def test_failures_are_counted_by_kind(tmp_path: Path, client: Celery, worker: Worker) -> None:
    rows: list[Any] = [
        *[{"item": {"answer": "failed", "why": f"<b>{number}</b>"}} for number in range(3)],
        *[{"item": {"answer": "failed-exception", "why": "lost"}} for _ in range(2)],
        {"item": {"answer": "value", "value": 7}},
        {"nothing": True},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(text)
    seen: list[Snapshot] = []
    summary, page = run(tmp_path, client, "moody", field="item", progress=seen.append)
    assert seen[-1].kinds == {"ItemFailed": 3, "LookupError": 2, "InvalidLine": 1}
    assert seen[-1].batch_size >= 1
    assert (summary.succeeded, summary.failed) == (1, 6)
    assert counts(page) == {"rows with a result": 1, "rows that failed": 6, "jobs sent": 6}
    failures = page.rows("failures")
    assert {name: cells[0] for name, cells in failures.items()} == {
        "kind": "rows",
        "ItemFailed": "3",
        "LookupError": "2",
        "InvalidLine": "1",
    }
    assert failures["ItemFailed"][2] in ("<b>0</b>", "<b>1</b>", "<b>2</b>")
    assert failures["InvalidLine"][1].endswith("in.jsonl, line 7")
    written = [row["error"]["type"] for row in read_rows(tmp_path / "out.errors.jsonl")]
    assert len(written) == 6


def test_a_run_that_is_resumed_adds_what_was_done_before(
    tmp_path: Path, client: Celery, worker: Worker
) -> None:
    write_rows(tmp_path / "in.jsonl", 2000)
    seen: list[Snapshot] = []

    def stop() -> bool:
        return bool(seen) and seen[-1].done > 0

    first, page = run(tmp_path, client, "shout", window=100, progress=seen.append, stop=stop)
    assert first.ending is Ending.INTERRUPTED
    assert page.rows("summary")["ended"] == ["interrupted"]
    assert counts(page)["rows with a result"] == first.succeeded
    assert counts(page).get("jobs still in flight", 0) == first.in_flight
    with acting_as(client, "operator"):
        second, page = run(tmp_path, client, "shout", window=100, resume=True)
    assert second.ending is Ending.SUCCEEDED
    assert second.before == first.succeeded
    expected = {
        "rows with a result": second.succeeded,
        "rows that failed": 0,
        "rows that were done before": first.succeeded,
        "rows in total": 2000,
        "jobs sent": second.submitted,
    }
    assert counts(page) == expected
    # Of jobs that the first run had sent nobody knows when.
    assert page.rows("distributions")[LATENCY][0] == f"{second.submitted:,}"
    assert page.rows("distributions")[BATCH][0] == f"{second.succeeded:,}"


def test_packs_count_each_of_their_texts(tmp_path: Path, client: Celery, worker: Worker) -> None:
    rows = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "none", "input": ["a", "bcd"]},
        }
        for number in range(4)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary, page = run(tmp_path, client, "shout")
    # No model computes them; which is another matter.
    assert summary.succeeded + summary.failed == 4
    assert page.rows("distributions")[LENGTH] == ["8", "1", "2", "1", "3", "3", "3"]


def test_a_page_that_cannot_be_written_is_said_before_the_first_job(
    tmp_path: Path, redis_url: str, worker: Worker
) -> None:
    write_rows(tmp_path / "in.jsonl", 3)
    arguments = ["in.jsonl", "-A", APP, "--task", f"{APP}.shout", "-o", "out.jsonl"]
    arguments += ["--queue", QUEUE, "--report"]
    for extra in ([], ["--dry-run"]):
        command = Command(tmp_path, redis_url, *arguments, "none/report.html", *extra)
        code, _, stderr = command.end()
        assert (code, stderr.count("\n")) == (2, 1), stderr
        assert "none/report.html: there is no directory none" in stderr
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]
    code, _, stderr = Command(tmp_path, redis_url, *arguments, "report.html").end()
    assert (code, counts(ReportPage(tmp_path / "report.html"))["jobs sent"]) == (0, 3), stderr


def test_a_page_that_cannot_be_written_any_more_costs_no_result(
    tmp_path: Path, client: Celery, worker: Worker
) -> None:
    write_rows(tmp_path / "in.jsonl", 20)
    blocked = tmp_path / "report.html.new"

    def block(_: Snapshot) -> None:
        blocked.mkdir(exist_ok=True)

    with pytest.raises(DatasetError, match="the report cannot be written: Is a directory"):
        run(tmp_path, client, "shout", progress=block)
    assert len(read_rows(tmp_path / "out.jsonl")) == 20
    assert not (tmp_path / "out.jsonl.journal").exists()

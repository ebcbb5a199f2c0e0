"""`batchery submit` against a real Redis and real workers: what comes out."""

import json
from pathlib import Path

import redis
from celery import Celery

from batchery_producer import Ending, Snapshot, submit_file
from support.bulk_runs import APP, QUEUE, read_rows, wait_idle, write_rows
from support.harness import Worker, wait_for
from support.patience import patient


def test_every_row_gets_its_own_result_and_nothing_stays_behind(
    tmp_path: Path, client: Celery, redis_url: str, worker: Worker, store: "redis.Redis"
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 500)
    wait_idle(redis_url)
    before = set(store.scan_iter("celery-task-meta-*"))
    # Clients of earlier tests in this process may still listen: only this run's count.
    listened_before = set(store.pubsub_channels("*celery-task-meta*"))
    seen: list[Snapshot] = []
    summary = submit_file(
        source,
        f"{APP}.shout",
        tmp_path / "out.jsonl",
        app=client,
        queue=QUEUE,
        window=64,
        timeout_s=patient(30),
        progress=seen.append,
    )
    assert summary.ending is Ending.SUCCEEDED
    assert (summary.submitted, summary.succeeded, summary.failed) == (500, 500, 0)
    rows = read_rows(tmp_path / "out.jsonl")
    assert {row["id"]: (row["row"], row["result"]) for row in rows} == {
        f"row-{n}": (n + 1, f"TEXT {n}") for n in range(500)
    }
    assert not (tmp_path / "out.errors.jsonl").exists()
    assert max(each.in_flight for each in seen) <= 64
    assert seen[-1].total == seen[-1].done == 500
    assert set(store.scan_iter("celery-task-meta-*")) == before
    wait_for(
        lambda: set(store.pubsub_channels("*celery-task-meta*")) <= listened_before,
        "nobody listens any more",
    )


def test_failures_and_bad_lines_are_told_with_line_and_reason(
    tmp_path: Path, client: Celery, worker: Worker
) -> None:
    source = tmp_path / "in.jsonl"
    rows = [
        {"id": 1, "item": {"answer": "value", "value": 7}},
        {"id": "two", "item": {"answer": "failed-exception", "why": "lost"}},
        {"id": 4},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    summary = submit_file(
        source,
        f"{APP}.moody",
        tmp_path / "out.jsonl",
        app=client,
        queue=QUEUE,
        field="item",
        timeout_s=patient(30),
    )
    assert summary.ending is Ending.SOME_FAILED
    assert (summary.submitted, summary.succeeded, summary.failed) == (2, 1, 3)
    assert read_rows(tmp_path / "out.jsonl") == [{"id": 1, "row": 1, "result": 7}]
    failures = {row["line"]: row for row in read_rows(tmp_path / "out.errors.jsonl")}
    assert failures[2] == {
        "id": "two",
        "row": 2,
        "line": 2,
        "error": {"type": "LookupError", "message": "lost"},
    }
    assert failures[3]["error"]["message"] == "no field 'item'; fields: 'id'"
    assert failures[4]["error"]["message"].startswith("not JSON")
    assert failures[4]["error"]["type"] == "InvalidLine"

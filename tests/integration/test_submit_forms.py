"""`batchery submit`: tables, parts of them, and a look before the leap."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import redis
from celery import Celery

from batchery.transport.redis_schema import find_tenant_list
from batchery_producer import Ending, submit_file
from batchery_producer.files.run import PROBE_S
from support.bulk_runs import APP, QUEUE, Command, read_rows, wait_idle, write_rows
from support.harness import SEP, Worker, wait_for
from support.patience import patient


def test_a_cell_of_a_table_that_no_message_can_have_fails_alone(
    tmp_path: Path, client: Celery, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery.transport.dead_letters.MAX_MESSAGE_BYTES", 8 << 20)
    sizes = {"small": "x", "huge": "x" * (8 << 20), "large": "\u00e4" * 100_000}
    columns = {"id": list(sizes), "text": list(sizes.values()), "took": [timedelta(seconds=1)] * 3}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    for field, failed in (("took", ["small", "huge", "large"]), ("text", ["huge"])):
        output = tmp_path / f"{field}.jsonl"
        summary = submit_file(
            tmp_path / "in.parquet",
            f"{APP}.shout",
            output,
            app=client,
            queue=QUEUE,
            field=field,
            timeout_s=patient(60),
        )
        assert (summary.succeeded, summary.failed) == (3 - len(failed), len(failed))
        errors = read_rows(tmp_path / f"{field}.errors.jsonl")
        assert [(each["id"], each["error"]["type"]) for each in errors] == [
            (id_, "InvalidLine") for id_ in failed
        ]


def test_failures_can_be_tried_again(tmp_path: Path, client: Celery, worker: Worker) -> None:
    source = tmp_path / "in.jsonl"
    items = ["one", "raise", "two", "raise"]
    source.write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    options: dict[str, Any] = {"app": client, "queue": QUEUE, "timeout_s": patient(30)}
    first = submit_file(source, f"{APP}.nasty", tmp_path / "a.jsonl", **options)
    assert (first.succeeded, first.failed) == (2, 2)
    again = submit_file(
        source,
        f"{APP}.shout",
        tmp_path / "b.jsonl",
        retry_failed=tmp_path / "a.errors.jsonl",
        **options,
    )
    assert (again.ending, again.submitted) == (Ending.SUCCEEDED, 2)
    rows = sorted(read_rows(tmp_path / "b.jsonl"), key=lambda row: row["row"])
    assert [(row["row"], row["result"]) for row in rows] == [(2, "RAISE"), (4, "RAISE")]
    source.write_text("".join(json.dumps({"text": item}) + "\n" for item in items[:2]))
    options["retry_failed"] = tmp_path / "a.errors.jsonl"
    less = submit_file(source, f"{APP}.shout", tmp_path / "c.jsonl", **options)
    assert (less.ending, less.submitted) == (Ending.SOME_FAILED, 1)
    assert '1 of 2 failures are of no row of the input, such as {"id": 4}; is it' in less.message


@pytest.mark.parametrize("bad", ['{"id": 3}', '{"text": "raise"}'], ids=["line", "job"])
def test_the_first_failure_can_end_the_run(
    tmp_path: Path, redis_url: str, worker: Worker, bad: str
) -> None:
    source = tmp_path / "in.jsonl"
    good = '{"text": "fine"}\n'
    source.write_text(good * 2 + bad + "\n" + good * 2000)
    arguments = [str(source), "-A", APP, "--task", f"{APP}.nasty", "-o", "out.jsonl"]
    command = Command(tmp_path, redis_url, *arguments, "--on-error", "stop", "--window", "8")
    code, _, stderr = command.end()
    assert code == 1
    assert f"stopped at {source}, line 3: " in stderr
    assert "--resume goes on from here" in stderr
    assert len(read_rows(tmp_path / "out.errors.jsonl")) == 1
    assert len(read_rows(tmp_path / "out.jsonl")) < 2000
    code, _, stderr = Command(tmp_path, redis_url, *arguments, "--resume").end()
    assert code == 1, stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == 2002


def test_a_dry_run_writes_nothing_and_says_how_long_it_takes(
    tmp_path: Path, redis_url: str, worker: Worker, store: "redis.Redis"
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 2000)
    source.write_text(source.read_text().replace('text 7"', 'raise"') + "{broken\n")
    arguments = [str(source), "-A", APP, "--task", f"{APP}.nasty", "-o", "out.jsonl", "--dry-run"]
    wait_idle(redis_url)
    before = set(store.scan_iter("celery-task-meta-*"))
    code, _, stderr = Command(tmp_path, redis_url, *arguments).end()
    assert code == 1
    assert "2,000 rows can be sent, 1 cannot" in stderr
    assert f"{source}, line 2001: not JSON" in stderr
    assert "probe: 512 jobs in" in stderr
    assert "1 of them failed; all rows would take about" in stderr
    assert f"the first failure: {source}, line 8: KeyError: " in stderr
    code, stdout, _ = Command(tmp_path, redis_url, *arguments, "--json").end()
    report = json.loads(stdout)
    assert (code, report["ending"]) == (1, "some_failed")
    assert f"{source}: 2,000 rows can be sent, 1 cannot" in report["findings"]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert set(store.scan_iter("celery-task-meta-*")) == before


def test_a_dry_run_without_a_worker_says_why_and_its_jobs_expire(
    tmp_path: Path, redis_url: str, worker: Worker, store: "redis.Redis"
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 3)
    task = ["-A", APP, "--task", f"{APP}.shout", "--queue", "nobody"]
    task += ["--priority", "6", "--tenant", "acme"]
    queue = f"{find_tenant_list('nobody', SEP, 'acme')}{SEP}6"

    def probe() -> str:
        """What it says; nothing if the worker did not answer in time."""
        store.delete(queue)
        command = Command(tmp_path, redis_url, str(source), *task, "-o", "out.jsonl", "--dry-run")
        code, _, said = command.end()
        assert code == Ending.GAVE_UP.value, said
        return said if worker.name in said else ""

    before = datetime.now(UTC)
    stderr = wait_for(probe, "the worker answers in time", patient(60))
    said = re.search(r"probe: no result within (\d\d) s: 3 waiting in queue 'nobody'; ", stderr)
    assert said
    assert 10 <= int(said[1]) <= (datetime.now(UTC) - before).total_seconds() + 1
    assert "answers, but consumes another queue" in stderr
    assert "start a worker with `-Q nobody`" in stderr
    messages = [json.loads(each) for each in store.lrange(queue, 0, -1)]
    assert len(messages) == 3
    for message in messages:
        assert message["headers"]["batchery_tenant"] == "acme"
        expires = datetime.fromisoformat(message["headers"]["expires"])
        left_s = (expires - before).total_seconds()
        assert PROBE_S < left_s < PROBE_S + patient(90)

"""`batchery submit`: rows that fail alone, and a failure that ends the run."""

from datetime import timedelta
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from celery import Celery

from batchery_producer import submit_file
from support.bulk_runs import APP, QUEUE, read_rows
from support.harness import Worker
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

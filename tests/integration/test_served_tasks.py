"""Which tasks workers serve: listed, refused where there are none; stock workers undisturbed."""

from pathlib import Path

import pytest
import redis
from celery import Celery

from batchery import SettingsError
from batchery_producer import submit_file
from batchery_producer.diagnosis import check_task
from support.bulk_runs import APP, Command, write_rows
from support.harness import Worker
from support.patience import patient


def test_a_task_that_nobody_has_is_refused_with_those_that_there_are(
    tmp_path: Path,
    client: Celery,
    worker: Worker,
    store: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchery_producer.diagnosis.ASK_S", patient(2))
    source = write_rows(tmp_path / "in.jsonl", 3)
    with pytest.raises(
        SettingsError, match=r"no worker that answers has a task 'apps\.shop\.shot': did you mean"
    ):
        submit_file(source, f"{APP}.shot", tmp_path / "out.jsonl", app=client)
    assert not store.exists(f"{APP}.shot")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_task_whose_worker_is_yet_to_come_needs_its_queue(client: Celery, worker: Worker) -> None:
    check_task(client, "later", "its_queue")
    check_task(client, f"{APP}.shout", None)


def test_ctrl_c_names_resume(tmp_path: Path, redis_url: str, worker: Worker) -> None:
    write_rows(tmp_path / "in.jsonl", 5)
    options = ("--task", "yet.to.come", "--queue", "nobody", "--timeout", "0.5")
    command = Command(tmp_path, redis_url, "in.jsonl", "-A", APP, "-o", "out.jsonl", *options)
    code, _, err = command.end()
    assert code == 3
    assert "the same command with --resume goes on from here" in err

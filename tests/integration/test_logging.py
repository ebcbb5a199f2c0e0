"""What batch functions log and print goes where the worker's log goes."""

import re
from pathlib import Path

import pytest

from apps import ledger, speaking
from batchery import WrongLength
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import patient


@pytest.fixture(scope="module")
def own_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own") / "own.log"


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str, own_log: Path) -> Worker:
    speaking.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.speaking", env={"OWN_LOG": str(own_log)})


def lines_of(own_log: Path, end: str) -> list[list[str]]:
    """The lines of the app's own handler, once the last of them is there."""
    wait_for(lambda: end in own_log.read_text(), f"{end!r} in the log")
    return [line.split("|") for line in own_log.read_text().splitlines() if line.count("|") == 5]


def test_a_batch_function_logs_through_the_handlers_of_its_worker(
    worker: Worker, own_log: Path
) -> None:
    job = speaking.batch.delay("one")
    assert job.get(timeout=patient(30)) == "one"
    lines = [line for line in lines_of(own_log, "end one") if line[4] == job.id]
    assert [(line[0], line[1], line[5]) for line in lines] == [
        ("speaking.plain", "DEBUG", "debug one"),
        ("celery.redirected", "WARNING", "printed one"),
        ("speaking.plain", "ERROR", "caught"),
        ("speaking.plain", "INFO", "end one"),
    ]
    assert {tuple(line[2:4]) for line in lines} == {("device cpu", "batch")}
    # The worker's own handlers have them, too. Those of Celery's task loggers have the task's name.
    assert f"INFO/device cpu] batch[{job.id}]: info one" in worker.log
    assert "ValueError: one" in worker.log
    assert "not to be seen" not in worker.log
    # A text that cannot be made costs its own line.
    assert "a line of speaking.plain cannot be logged" in worker.log


def test_a_line_names_the_first_jobs_of_a_large_batch(worker: Worker, own_log: Path) -> None:
    jobs = speaking.batch.submit_many(["many"] * 8)
    assert jobs.get(timeout=patient(30)) == ["many"] * 8

    def ids() -> set[str]:
        return {line[4] for line in lines_of(own_log, "end many") if line[5] == "end many"}

    wait_for(lambda: " of batch: 8 items" in worker.log or len(ids()) > 1, "a line per batch")
    assert max(len(each.split(", ")) for each in ids()) <= 3


def test_one_line_says_what_each_batch_was_like(worker: Worker) -> None:
    speaking.batch.delay("size").get(timeout=patient(30))
    line = r"Batch b\d+ of batch: 1 item, waited \d+\.\d ms, forward \d+\.\d ms on cpu"
    wait_for(lambda: re.search(line, worker.log), "a line of a batch")


def test_the_last_words_before_a_crash_are_logged(worker: Worker, own_log: Path) -> None:
    job = speaking.crash.delay("it")
    assert job.get(timeout=patient(60), propagate=False) is not None
    assert any(line[5] == "last words of it" for line in lines_of(own_log, "last words of it"))


def test_traceback_of_a_fault_is_logged_once_for_a_batch(
    start_module_worker: StartWorker, redis_url: str
) -> None:
    ledger.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    # They are in the queue before the worker is, so that they share a batch.
    jobs = ledger.answering.submit_many(range(8), {"answer": [1]}, queue="faults")
    worker = start_module_worker("apps.ledger", "-Q", "faults", ready=False)
    for job in jobs:
        with pytest.raises(WrongLength):
            job.get(timeout=patient(90))
    ids = {job.id for job in jobs.results or []}
    pattern = r"answering\[(\S+)\] raised unexpected: WrongLength\(.*\)"
    wait_for(lambda: set(re.findall(pattern, worker.log)) == ids, "a line for each job")
    assert worker.log.count("Traceback (most recent call last)") == 1

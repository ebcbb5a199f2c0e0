"""`batchery submit --resume` after the producer, a worker or Redis was killed."""

import json
import resource
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import redis
from celery import Celery

from batchery_producer import Ending, Snapshot, Summary, submit_file
from conftest import StartWorker
from support.bulk_runs import Command, read_rows, write_rows
from support.harness import Worker, unsettled, wait_for
from support.patience import patient

APP = "apps.tally"
TASK = f"{APP}.tally"
#: A batch task has a queue of its name.
QUEUE = TASK


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker) -> Worker:
    return start_module_worker(APP)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def assert_each_row_once(output: Path, count: int, *more: str) -> None:
    """Those of `write_rows`, and then some texts."""
    texts = [*(f"text {number}" for number in range(count)), *more]
    expected = [(n + 1, f"row-{n}", text.upper()) for n, text in enumerate(texts)]
    assert sorted((row["row"], row["id"], row["result"]) for row in read_rows(output)) == expected


def recomputed(trace: Path) -> int:
    return sum(count - 1 for count in Counter(trace.read_text().splitlines()).values())


def kill(command: Command) -> None:
    command.process.kill()
    command.end()


def resume(folder: Path, redis_url: str, arguments: Sequence[str]) -> None:
    code, _, stderr = Command(folder, redis_url, *arguments).end()
    assert (code, "done before: " in stderr) == (0, True), stderr


def go_on(
    client: Celery, source: Path, task: str, folder: Path, progress: Callable[[Snapshot], None]
) -> Summary:
    """Takes a run up again, whose output and trace are in a folder."""
    return submit_file(
        source,
        task,
        folder / "out.jsonl",
        app=client,
        queue=QUEUE if task == TASK else "celery",
        keywords={"path": str(folder / "trace")},
        resume=True,
        timeout_s=patient(60),
        progress=progress,
    )


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_killed_producer_s_run_is_finished_and_nothing_is_computed_twice(
    tmp_path: Path, redis_url: str, worker: Worker, store: "redis.Redis", name: str
) -> None:
    count = 1500
    source, output = write_rows(tmp_path / "in.jsonl", count), tmp_path / name
    trace, gate = tmp_path / "trace", tmp_path / "gate"
    # The last row waits, so that the run is not over before it is killed.
    with source.open("a") as file:
        file.write(json.dumps({"id": f"row-{count}", "text": str(gate)}) + "\n")
    arguments = [
        *[str(source), "-A", APP, "--task", TASK, "--queue", QUEUE, "-o", str(output)],
        *["--option", f'path="{trace}"', "--option", "pause_s=0.02", "--window", "128", "--resume"],
    ]
    first = Command(tmp_path, redis_url, *arguments)
    written = output if name == "out.jsonl" else tmp_path / f"{name}.part"
    wait_for(lambda: lines_of(trace) > 0.3 * count and written.stat().st_size, "30 %")
    kill(first)
    gate.touch()
    resume(tmp_path, redis_url, arguments)
    assert_each_row_once(output, count, str(gate))
    assert recomputed(trace) == 0
    assert not (tmp_path / f"{name}.journal").exists()
    # Once more: it is not begun anew.
    code, _, stderr = Command(tmp_path, redis_url, *arguments).end()
    assert (code, f"{name}: already there; complete" in stderr) == (2, True), stderr
    assert recomputed(trace) == 0


def test_jobs_that_wait_for_a_tenant_are_not_sent_again(
    tmp_path: Path, redis_url: str, client: Celery, worker: Worker, store: "redis.Redis"
) -> None:
    count = 500
    source, output = write_rows(tmp_path / "in.jsonl", count), tmp_path / "out.jsonl"
    trace = tmp_path / "trace"
    arguments = [str(source), "-A", APP, "--task", TASK, "--queue", QUEUE, "-o", str(output)]
    arguments += ["--option", f'path="{trace}"', "--option", f"pause_s={patient(0.2)}"]
    arguments += ["--tenant", "acme", "--resume"]
    first = Command(tmp_path, redis_url, *arguments)
    wait_for(lambda: output.exists() and output.stat().st_size, "the first results")
    assert not store.llen(QUEUE)
    kill(first)
    resume(tmp_path, redis_url, arguments)
    assert_each_row_once(output, count)
    assert recomputed(trace) == 0


def test_a_full_disk_loses_nothing(tmp_path: Path, redis_url: str, worker: Worker) -> None:
    count = 400
    source, output = write_rows(tmp_path / "in.jsonl", count), tmp_path / "out.jsonl"
    gate, trace = tmp_path / "gate", tmp_path / "trace"
    arguments = [str(source), "-A", APP, "--task", TASK, "--queue", QUEUE, "-o", str(output)]
    arguments += ["--option", f'path="{trace}"', "--window", "64", "--option", f'gate="{gate}"']
    command = Command(tmp_path, redis_url, *arguments)
    wait_for(output.exists, "the run to begin")
    resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (3000, 3000))
    gate.touch()
    code, _, stderr = command.end()
    assert code == 2
    assert "out.jsonl: cannot be written: File too large" in stderr
    assert stderr.count("\n") <= 2, stderr
    assert len(read_rows(output)) < count
    code, _, stderr = Command(tmp_path, redis_url, *arguments, "--resume").end()
    assert code == 0, stderr
    assert_each_row_once(output, count)
    assert recomputed(trace) == 0


def test_jobs_that_wait_run_or_have_ended_are_not_sent_again(
    tmp_path: Path, redis_url: str, client: Celery, worker: Worker, store: "redis.Redis"
) -> None:
    gate, trace, output = tmp_path / "gate", tmp_path / "trace", tmp_path / "out.jsonl"
    source = tmp_path / "in.txt"
    source.write_text(f"{gate}\n" + "".join(f"text {n}\n" for n in range(99)))
    arguments = [str(source), "-A", APP, "--task", TASK, "--queue", QUEUE, "-o", str(output)]
    first = Command(tmp_path, redis_url, *arguments, "--option", f'path="{trace}"')
    wait_for(lambda: str(gate) in (trace.read_text() if trace.exists() else ""), "a busy device")
    wait_for(lambda: unsettled(redis_url) + int(store.llen(QUEUE)) == 100, "the jobs to be sent")
    kill(first)
    seen: list[int] = []

    def open_gate(run: Snapshot) -> None:
        seen.append(run.in_flight)
        if run.in_flight == 100:
            gate.touch()

    summary = go_on(client, source, TASK, tmp_path, open_gate)
    assert (summary.ending, summary.submitted, summary.succeeded) == (Ending.SUCCEEDED, 0, 100)
    assert recomputed(trace) == 0
    assert sorted(row["row"] for row in read_rows(output)) == list(range(1, 101))


def test_an_ordinary_task_s_jobs_are_found_where_they_run(
    tmp_path: Path, redis_url: str, client: Celery, worker: Worker, store: "redis.Redis"
) -> None:
    """Stock tasks are acknowledged before they run: while they do, no queue knows them."""
    gate, trace, output = tmp_path / "gate", tmp_path / "trace", tmp_path / "out.jsonl"
    source = tmp_path / "in.txt"
    source.write_text(f"{gate}\n")
    task = f"{APP}.plainly"
    arguments = [str(source), "-A", APP, "--task", task, "--queue", "celery", "-o", str(output)]
    first = Command(tmp_path, redis_url, *arguments, "--option", f'path="{trace}"')
    wait_for(trace.exists, "the job to run")
    kill(first)

    def open_gate(run: Snapshot) -> None:
        if run.in_flight:
            gate.touch()

    summary = go_on(client, source, task, tmp_path, open_gate)
    assert (summary.submitted, summary.succeeded) == (0, 1)

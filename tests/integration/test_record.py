"""`batchery stats --record` on real workers, and `batchery simulate` on what it has written."""

import json
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from apps import shop
from batchery_worker.job import Lane
from batchery_worker.simulator.workload import read_trace
from conftest import StartWorker
from support.commands import TIMEOUT_S, run, start
from support.harness import Worker, wait_for
from support.redis_places import with_database

CLASSES = ("high", "normal", "low")

#: Starts a recording into a file, and returns when it goes on.
StartRecording = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def worker(redis_url: str, start_worker: StartWorker) -> Worker:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_worker("apps.shop")


@pytest.fixture
def record(redis_url: str) -> Iterator[StartRecording]:
    with ExitStack() as stack:

        def begin(path: Path, *options: str) -> "subprocess.Popen[str]":
            command = ("batchery", "stats", "-A", "apps.shop", "--record", str(path), *options)
            process = stack.enter_context(start(redis_url, *command))
            stack.callback(process.kill)
            assert process.stderr is not None
            told = []
            for line in process.stderr:
                told.append(line)
                if line.startswith("recording the jobs of "):
                    return process
            raise AssertionError("".join(told))

        yield begin


def end(
    process: "subprocess.Popen[str]", path: Path, jobs: int, signum: int = signal.SIGINT
) -> str:
    """Ends a recording by Ctrl-C once it has so many jobs; returns what it says."""
    # Its last look may find a worker that does not answer in time.
    wait_for(lambda: path.read_text().count("\n") == jobs, "the jobs are in the trace")
    process.send_signal(signum)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return out


def test_sigterm_ends_a_recording_as_ctrl_c_does(
    worker: Worker, record: StartRecording, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    process = record(path)
    shop.shout.delay("one").get(timeout=TIMEOUT_S)
    assert "1 job recorded in " in end(process, path, 1, signal.SIGTERM)


def test_recorded_jobs_can_be_simulated(
    worker: Worker, redis_url: str, record: StartRecording, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    process = record(path)
    began_s = time.time()
    jobs = [shop.shout.delay("one"), shop.double.delay(2)]
    options: Any = {"priority": 4, "tenant": "acme", "deadline_s": 20}
    jobs.append(shop.shout.apply_async(("two",), **options))
    jobs.append(shop.app.send_task("apps.shop.shout", ("by name",), priority=9))
    many = shop.read_batch.submit_many(range(300))
    for job in jobs:
        job.get(timeout=TIMEOUT_S)
    many.get(timeout=TIMEOUT_S)
    # Each is a batch, until so many were there that their cost is learned.
    for number in range(20):
        shop.shout.delay(f"alone {number}").get(timeout=TIMEOUT_S)
    took_s = time.time() - began_s
    out = end(process, path, 323)
    assert "323 jobs recorded in " in out
    assert "no job missed" in out

    trace = read_trace(path, CLASSES)
    # The ordinary task is none of them.
    tasks = {"apps.shop.shout": 23, "apps.shop.read_batch": 300}
    assert Counter(job.task for job in trace) == tasks
    by_lane = {job.lane: job for job in trace if job.task == "apps.shop.shout"}
    assert by_lane.keys() == {Lane("high"), Lane("normal", "acme"), Lane("low")}
    assert by_lane[Lane("normal", "acme")].deadline_s == pytest.approx(20, abs=0.1)
    assert by_lane[Lane("high")].deadline_s is None
    assert 0 <= trace[-1].time_s <= took_s + 0.1
    first_s = min(json.loads(line)["time_s"] for line in path.read_text().splitlines())
    assert began_s - 0.1 <= first_s <= began_s + took_s

    (command,) = (line for line in out.splitlines() if line.startswith("try it: "))
    words = shlex.split(command.removeprefix("try it: "))
    assert words[:4] == ["batchery", "simulate", "--trace", str(path)]
    assert {"--devices", "--max-batch-size", "--cost"} <= set(words)
    code, out, err = run(redis_url, *words, "--json", "-")
    assert code == 0, err
    assert [each["done"] for each in json.loads(out)["policies"]] == [323, 323]


def test_the_time_of_a_job_is_when_it_was_sent_and_not_when_a_worker_took_it(
    worker: Worker, record: StartRecording, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    process = record(path)
    shop.app.control.cancel_consumer("celery", destination=[worker.name], reply=True, timeout=30)
    before_s = time.time()
    jobs = [shop.shout.delay("sent"), shop.app.send_task("apps.shop.shout", ("stock",))]
    sent_by_s = time.time()
    wait_for(lambda: time.time() > sent_by_s + 0.5, "they wait in their queue")
    after_s = time.time()
    shop.app.control.add_consumer("celery", destination=[worker.name], reply=True, timeout=30)
    for job in jobs:
        job.get(timeout=TIMEOUT_S)
    end(process, path, 2)
    # A stock client does not say it: `send_task` is Celery's own.
    sent_s, taken_s = (json.loads(line)["time_s"] for line in path.read_text().splitlines())
    assert before_s - 0.01 <= sent_s <= sent_by_s + 0.01
    assert taken_s >= after_s - 0.01


def test_several_recordings_take_nothing_from_each_other(
    worker: Worker, record: StartRecording, tmp_path: Path
) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    processes = [record(path, "--json") for path in paths]
    shop.shout.submit_many([f"text {number}" for number in range(100)]).get(timeout=TIMEOUT_S)
    reports = [
        json.loads(end(process, path, 100)) for process, path in zip(processes, paths, strict=True)
    ]
    for path, report in zip(paths, reports, strict=True):
        assert (report["jobs"], report["missed"], report["gaps"]) == (100, 0, [])
        assert (report["tasks"], report["devices"]) == ({"apps.shop.shout": 100}, 1)
        assert report["command"].startswith(f"batchery simulate --trace {path} --devices 1 ")
    assert paths[0].read_text() == paths[1].read_text()


def test_a_worker_that_is_killed_is_named(
    worker: Worker, record: StartRecording, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    process = record(path)
    shop.shout.delay("before").get(timeout=TIMEOUT_S)
    wait_for(lambda: path.read_text().count("\n") == 1, "the job is in the trace")
    worker.kill()
    shop.shout.delay("nobody takes it")
    out = end(process, path, 1)
    assert "1 job recorded in " in out
    assert f"{worker.name} no longer answers; its last jobs may be missing" in out
    assert "no worker has taken 1 job that the queues hold; the trace lacks them" in out


def test_where_no_worker_answers_it_says_so(redis_url: str, tmp_path: Path) -> None:
    url = with_database(redis_url, 7)
    path = tmp_path / "trace.jsonl"
    with start(url, "batchery", "stats", "-A", "apps.shop", "--record", str(path)) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("no worker with devices answers yet;")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert out.startswith(
        "no worker with devices answered; start one: celery -A APP worker\n0 jobs"
    )
    assert "try it" not in out


def test_a_file_that_is_there_is_replaced_only_if_asked(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("precious\n")
    code, out, err = run(redis_url, "batchery", "stats", "-A", "apps.shop", "--record", str(path))
    assert (code, out) == (2, "")
    assert (
        err == f"batchery: error: {path}: is there already; name another file, or use --overwrite\n"
    )
    assert path.read_text() == "precious\n"
    command = ("batchery", "stats", "-A", "apps.shop", "--record", str(path), "--overwrite")
    with start(redis_url, *command) as process:
        wait_for(lambda: path.read_text() == "", "it is replaced")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1


def test_a_full_disk_ends_a_recording_with_one_line(worker: Worker, record: StartRecording) -> None:
    process = record(Path("/dev/full"), "--overwrite")
    shop.shout.delay("a").get(timeout=TIMEOUT_S)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2
    why = "cannot be written: No space left on device; it has the jobs until now"
    assert err == f"batchery: error: /dev/full: {why}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--record", "absent/trace.jsonl"), "absent/trace.jsonl: cannot be written: No such file"),
        (("--record", "."), ".: is there already"),
        (("--record", ".", "--overwrite"), ".: cannot be written: Is a directory"),
        (("--record", "trace", "--once"), "--record goes on until Ctrl-C; leave out --once"),
        (("--overwrite",), "--overwrite is for --record FILE"),
    ],
)
def test_what_cannot_be_recorded_is_one_line_at_the_start(
    redis_url: str, options: tuple[str, ...], words: str
) -> None:
    code, out, err = run(redis_url, "batchery", "stats", "-A", "apps.shop", *options)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]

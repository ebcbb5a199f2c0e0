"""What is chosen when a worker is started or stopped: queues, beat, detached, by remote control."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from apps import mapped, more
from conftest import StartWorker
from support.harness import PYTHONPATH, START_S, open_redis, queue_length, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(autouse=True)
def _more(redis_url: str) -> None:
    more.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def trace(redis_url: str) -> list[dict[str, Any]]:
    """What the tasks have written down."""
    with open_redis(redis_url) as redis:
        return [json.loads(line) for line in redis.lrange(more.TRACE, 0, -1)]


def is_ready(log: Path) -> bool:
    """Whether a detached worker has written that it consumes."""
    return log.exists() and " ready." in log.read_text()


def test_the_worker_is_shut_down_by_remote_control(start_worker: StartWorker) -> None:
    worker = start_worker("apps.more")
    # Once it has answered, it hears commands that ask for no answer.
    worker.inspect(more.app, "ping")
    more.app.control.shutdown([worker.name])
    assert worker.wait_exit() == 0, worker.log


def test_queues_are_chosen_and_left_out_on_the_command_line(
    start_worker: StartWorker, redis_url: str
) -> None:
    start_worker("apps.more", "-Q", "one,two")
    left_out = more.echo.apply_async(("waits",), queue="celery")
    for queue in ("one", "two"):
        job = more.echo.apply_async((queue,), queue=queue)
        assert job.get(timeout=TIMEOUT_S) == queue
    assert queue_length(redis_url, "celery") == 1
    start_worker("apps.more", "-X", "one,two")
    assert left_out.get(timeout=TIMEOUT_S) == "waits"


def test_a_queue_of_a_model_is_left_out(start_worker: StartWorker, redis_url: str) -> None:
    mapped.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.mapped", "-X", "doubles")
    consumed = worker.inspect(mapped.app, "active_queues")
    names = {queue["name"] for queue in consumed}
    assert "celery" in names
    assert "doubles" not in names


def test_beat_runs_in_the_same_worker(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    worker = start_worker("apps.more", "-B", "-s", str(tmp_path / "schedule"))

    def ticks() -> list[str]:
        assert {line["kind"] for line in trace(redis_url)} <= {"tick"}
        return [item for line in trace(redis_url) for item in line["items"]]

    wait_for(lambda: len(ticks()) >= 2, "two ticks")
    assert set(ticks()) == {"tick"}
    assert worker.stop() == 0


def test_jobs_of_a_higher_priority_go_first(start_worker: StartWorker, redis_url: str) -> None:
    low = [more.one_by_one.apply_async((f"low {n}",), priority=9) for n in range(3)]
    high = [more.one_by_one.apply_async((f"high {n}",), priority=0) for n in range(3)]
    worker = start_worker("apps.more")
    for job in [*low, *high]:
        job.get(timeout=TIMEOUT_S)
    received = re.findall(r"\[([\w-]+)\] received", worker.log)
    assert received == [job.id for job in [*high, *low]]
    # In the worker they share the device, by the time that each has taken.
    assert trace(redis_url)[0]["items"][0].startswith("high")


@pytest.mark.usefixtures("start_worker")
def test_celery_multi_starts_and_stops_detached_workers(redis_url: str, tmp_path: Path) -> None:
    def multi(*arguments: str) -> str:
        celery = str(Path(sys.executable).with_name("celery"))
        command = [celery, "multi", *arguments, "-A", "apps.more"]
        done = subprocess.run(
            [*command, "--pidfile=%n.pid", "--logfile=%n.log", "-l", "INFO"],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "PYTHONWARNINGS": "ignore",
                "CELERY_BROKER_URL": redis_url,
                "CELERY_RESULT_BACKEND": redis_url,
            },
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    nodes = [f"{tmp_path.name}-{number}" for number in (1, 2)]
    assert "OK" in multi("start", *nodes)
    pids: list[int] = []
    try:
        for node in nodes:
            wait_for(partial(is_ready, tmp_path / f"{node}.log"), node, START_S)
            pids.append(int((tmp_path / f"{node}.pid").read_text()))
        assert more.echo.delay("both").get(timeout=TIMEOUT_S) == "both"
    finally:
        multi("stopwait", *nodes)
    # A node takes its pid file away, which `stopwait` waits for, just before it ends.
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), "both nodes' ends")

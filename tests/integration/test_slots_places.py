"""Where step models run: beside other tasks, in a test's own process, eagerly; and where not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apps import slots
from conftest import StartWorker
from support.harness import TESTS
from support.patience import TIMEOUT_S


@pytest.mark.parametrize("arguments", [("-c", "2"), ("-c", "1", "-P", "solo")])
def test_step_model_runs_beside_batches_and_ordinary_tasks(
    start_worker: StartWorker, redis_url: str, arguments: tuple[str, ...]
) -> None:
    slots.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.slots", "-Q", "countdown,upper,double", *arguments)
    assert len(worker.devices()) == 2
    begun = [
        (slots.countdown.delay(5), slots.upper.delay("text"), slots.double.delay(number))
        for number in range(20)
    ]
    for number, jobs in enumerate(begun):
        counted, text, doubled = (job.get(timeout=TIMEOUT_S) for job in jobs)
        assert (counted["most"] <= 4, text, doubled) == (True, "TEXT", 2 * number)
    devices = worker.inspect(slots.app, "stats")["pool"]["devices"]
    assert set(devices) == {"cpu", "cpu/countdown"}
    assert worker.stop() == 0


#: In a process of its own: a worker leaves its marks on the one that it was in.
IN_PROCESS = f"""
import os, sys
from celery.contrib.testing.worker import start_worker
from apps.slots import app, countdown
app.conf.update(broker_url=sys.argv[1], result_backend=sys.argv[1])
options = {{"perform_ping_check": False, "shutdown_timeout": {TIMEOUT_S}}}
jobs = [countdown.delay(number % 5 + 1) for number in range(20)]
with start_worker(app, queues=["countdown"], **options):
    answers = [job.get(timeout={TIMEOUT_S}, disable_sync_subtasks=False) for job in jobs]
    assert {{answer["pid"] for answer in answers}} == {{os.getpid()}}
    assert max(answer["most"] for answer in answers) > 1
    assert countdown.apply((3,)).get()["most"] == 1
print("done")
"""


def test_step_model_runs_on_a_thread_of_a_test_and_eagerly(redis_url: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IN_PROCESS, redis_url],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.stdout.endswith("done\n"), ran.stderr


def test_step_model_given_by_path_must_come_with_its_slots(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "bare.py").write_text(
        "from celery import Celery\nfrom batchery import install, register\n"
        'app = install(Celery("bare"))\nregister(app, "bare", "apps.slots:Countdown")\n'
    )
    env = {"PYTHONPATH": f"{tmp_path}:{TESTS}"}
    worker = start_worker("bare", "-c", "1", ready=False, env=env)
    assert worker.wait_exit() == 2
    assert re.search(r"model 'bare': a Countdown is a StepModel.*slots=", worker.log)

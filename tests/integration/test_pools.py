"""The same tasks on pools of green threads: batches of one; and our pool where no broker is."""

import importlib.util
import os
import subprocess
import sys

import pytest

from apps import shop
from conftest import StartWorker
from support.harness import TESTS

TIMEOUT_S = 30


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_green_threads_run_batches_of_one(
    start_worker: StartWorker, redis_url: str, pool: str
) -> None:
    if importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.shop", "-P", pool, "-c", "8")
    assert "one job at a time" in worker.log
    assert worker.devices() == []
    results = shop.batch_of.submit_many(range(8), {"pause_s": 0.1}).get(timeout=TIMEOUT_S)
    assert [each["mates"] for each in results] == [[number] for number in range(8)]
    assert shop.asynchronous.submit_many(["ab"] * 8).get(timeout=TIMEOUT_S) == ["ba"] * 8
    slow = shop.lazy_asynchronous.submit_many([0.1] * 8)
    assert slow.get(timeout=TIMEOUT_S) == [0.1] * 8
    assert (shop.increment.s(1) | shop.increment.s()).delay().get(timeout=TIMEOUT_S) == 3


#: Runs in a process of its own: a worker leaves its marks on the one that it was in.
WITHOUT_A_BROKER = f"""
import os
from celery.contrib.testing.worker import start_worker
from apps.memory import app, mates
options = {{"concurrency": 2, "perform_ping_check": False, "shutdown_timeout": 60}}
with start_worker(app, pool="threads", **options):
    jobs = mates.submit_many(range(200))
    together = jobs.get(timeout={TIMEOUT_S}, disable_sync_subtasks=False)
    assert all(job.id in each for job, each in zip(jobs, together, strict=True))
    print(max(map(len, together)), flush=True)
    os._exit(0)  # Celery's own loop for such brokers takes four seconds to end
"""


def test_a_worker_in_one_process_with_its_caller_batches_without_any_broker() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_BROKER],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert int(ran.stdout.split()[-1]) > 1

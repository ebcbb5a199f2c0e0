"""Devices beside green threads, and our pool where no broker is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apps import shop
from conftest import StartWorker
from support.harness import PYTHONPATH, wait_for
from support.patience import TIMEOUT_S, patient


@pytest.fixture(params=["gevent", "eventlet"])
def green_threads(request: pytest.FixtureRequest, redis_url: str) -> str:
    """Name of the pool."""
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return str(request.param)


def test_green_threads_have_devices_beside_them(
    start_worker: StartWorker, green_threads: str
) -> None:
    worker = start_worker("apps.shop", "-P", green_threads, "-c", "8")
    # With green threads, the worker consumes before the first turn of what starts its devices.
    wait_for(lambda: len(worker.devices()) == 1, "its device")
    results = shop.read_batch.submit_many(range(8), {"pause_s": 0.1}).get(timeout=TIMEOUT_S)
    # While the first batch runs, the others become one.
    assert max(len(each["mates"]) for each in results) > 1
    assert shop.asynchronous.submit_many(["ab"] * 8).get(timeout=TIMEOUT_S) == ["ba"] * 8
    assert (shop.increment.s(1) | shop.increment.s()).delay().get(timeout=TIMEOUT_S) == 3
    with pytest.raises(KeyError):
        shop.nasty.delay("raise").get(timeout=TIMEOUT_S)
    assert worker.stop() == 0


def test_green_threads_keep_their_connections(
    start_worker: StartWorker, green_threads: str, store: Any
) -> None:
    start_worker("apps.green", "-P", green_threads, "-c", "1")

    def count_connections() -> int:
        return int(store.info("stats")["total_connections_received"])

    before = count_connections()
    for number in range(20):
        assert shop.increment.delay(number).get(timeout=TIMEOUT_S) == number + 1
    # Far more than the worker may hold at a time.
    results = [shop.double.delay(number) for number in range(100)]
    assert [each.get(timeout=TIMEOUT_S) for each in results] == list(range(0, 200, 2))
    # Usually Celery connects anew for each job, which over TLS takes longer than the job.
    assert count_connections() - before < 60


#: Runs in a process of its own: a worker leaves its marks on the one that it was in.
WITHOUT_A_BROKER = f"""
import json
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
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        timeout=patient(150),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert int(ran.stdout.split()[-1]) > 1


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_consumer_pool_and_requests_of_ordinary_tasks_are_celerys_own(
    start_worker: StartWorker, redis_url: str, tmp_path: Path, pool: str
) -> None:
    """Of kombu's transport little differs: where an odd message or a full Redis ends a worker."""
    path = tmp_path / "parts"
    worker = start_worker("apps.plain_parts", "-P", pool, "-c", "1", env={"PARTS": str(path)})
    wait_for(lambda: path.exists() and path.read_text(), "its parts")
    parts = json.loads(path.read_text())
    assert [parts[each] for each in ("consumer", "pool", "request")] == [[], [], []]
    assert parts["qos"] == ["_remove_from_indices", "append", "restore_visible"]
    assert parts["transport"] == ["Channel", "establish_connection"]
    taking = {"_brpop_read", "_get", "basic_consume"}
    naming = {
        "_delete",
        "_has_queue",
        "_purge",
        "_put",
        "_queue_bind",
        "_refresh_bindings",
        "_size",
    }
    connecting = {"QoS", "_connparams", "_create_client", "queue_declare"}
    assert {*parts["channel"]} == taking | naming | connecting
    assert worker.stop() == 0

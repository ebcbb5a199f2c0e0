"""An upgrade to another layout of Redis: not side by side, and no job is lost."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest
from celery import Celery

from batchery.transport.redis_schema import Keys
from conftest import StartWorker, flush
from support.harness import TESTS, Worker, open_redis, queue_length, unsettled, wait_for
from support.patience import patient

ROOT = TESTS.parent

#: The last version whose layout was another one, by its commit.
BEFORE = "d15d46b9"

TIMEOUT_S = patient(120)

APP = """
import time

import batchery
from celery import Celery
from support.patience import patient

app = batchery.install(Celery("moving", set_as_current=False))
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}
app.conf.worker_hijack_root_logger = False
VERSION = "before" if "/before/" in batchery.__file__ else "now"


@app.task(shared=False, base=batchery.BatchTask, max_batch_size=4)
def where(items):
    time.sleep(0.1)
    return [VERSION for _ in items]


@app.task(shared=False)
def plain(item):
    return VERSION
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the version before, from git."""
    packed = subprocess.run(
        ["git", "archive", BEFORE, "common", "producer", "worker"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        pytest.skip(f"this checkout has no commit {BEFORE[:7]}: {packed.stderr.decode()}")
    folder = tmp_path_factory.mktemp("upgrade") / "before"
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_workers_of_two_layouts_never_work_side_by_side_and_no_job_is_lost(
    redis_url: str, before: Path, start_worker: StartWorker, tmp_path: Path
) -> None:
    flush(redis_url)
    (tmp_path / "moving.py").write_text(APP)
    packages = [str(before / name) for name in ("common", "producer", "worker")]

    def start(*, is_before: bool, ready: bool = True) -> Worker:
        path = [*packages, str(tmp_path), str(TESTS)] if is_before else [str(tmp_path), str(TESTS)]
        environment = {"PYTHONPATH": os.pathsep.join(path)}
        return start_worker("moving", "-c", "1", env=environment, ready=ready)

    client = Celery(broker=redis_url, backend=redis_url, set_as_current=False)
    first, second = start(is_before=True), start(is_before=True)
    jobs = [client.send_task("moving.where", [n]) for n in range(200)]
    jobs += [client.send_task("moving.plain", [n]) for n in range(20)]
    wait_for(lambda: sum(job.ready() for job in jobs) >= 20, "some are done", TIMEOUT_S)
    refused = start(is_before=False, ready=False)
    assert refused.wait_exit() != 0
    assert "workers of an older Batchery live on this Redis" in refused.log
    # One ends in order, and one is lost with what it holds.
    assert first.stop() == 0
    second.kill()
    jobs += [client.send_task("moving.where", [n]) for n in range(10)]
    with open_redis(redis_url) as store:
        expiry_s = patient(1.5)
        wait_for(
            lambda: (
                not (beats := store.zrange(Keys().workers, 0, -1, withscores=True))
                or store.time()[0] - beats[0][1] / 1e3 > expiry_s
            ),
            "the leases of the killed one have expired",
            TIMEOUT_S,
        )
    now = start(is_before=False)
    ran = [job.get(timeout=TIMEOUT_S) for job in jobs]
    assert set(ran) == {"before", "now"}
    wait_for(lambda: unsettled(redis_url) == queue_length(redis_url) == 0, "no job left")
    late = start(is_before=True, ready=False)
    assert late.wait_exit() != 0
    assert "update the worker" in late.log
    assert now.stop() == 0
    with open_redis(redis_url) as store:
        assert not store.exists(Keys().dead, Keys().workers, Keys().worker_info)


def test_a_worker_does_not_touch_what_a_newer_version_has_written(
    redis_url: str, start_worker: StartWorker
) -> None:
    with open_redis(redis_url) as store:
        store.set(Keys().schema, 99)
        store.lpush("apps.shop.shout", "of the future")
        worker = start_worker("apps.shop", ready=False)
        assert worker.wait_exit() != 0
        assert "their layout is 99, and this worker knows 2; update the worker" in worker.log
        assert store.lrange("apps.shop.shout", 0, -1) == [b"of the future"]
        assert not store.exists(Keys().workers)

"""A rolling upgrade under load: both versions on one Redis, each runs the jobs of the other."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from batchery.transport.redis_schema import Keys
from conftest import StartWorker, flush
from support.gateway import GatewayProcess
from support.harness import TESTS, Worker, kill_all, open_redis, queue_length, unsettled, wait_for
from support.patience import patient

ROOT = TESTS.parent

#: The version before, by its commit.
BEFORE = "4bd36fdb0c254edd4020f42f7a0036b48ade173c"

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


@app.task(shared=False, base=batchery.BatchTask, max_batch_size=16)
def where(items):
    time.sleep(0.02)
    return [[item, VERSION] for item in items]


# Acknowledged late, as a job that runs in a worker that is killed would be lost else, by Celery's
# own rule.
@app.task(shared=False, acks_late=True)
def plain(item):
    return [item, VERSION]
"""

# Sends jobs in every way, and awaits them, until there is a file; says after each round who ran
# how many of them.
LOAD = """
import json, os, sys
from collections import Counter
from batchery import Client
from moving import VERSION, app, plain, where

name, end = sys.argv[1:]
versions, number = Counter(), 0
with Client(app) as client:
    while not os.path.exists(end):
        items = [f"{name}-{number + n}" for n in range(40)]
        number += len(items)
        found = where.submit_many(items).get(timeout=120)
        found += [job.get(timeout=120) for job in [plain.delay(item) for item in items[:10]]]
        found += list(client.task("moving.where").map(items))
        expected = items + items[:10] + items
        assert sorted(item for item, _ in found) == sorted(expected), (items, found)
        versions.update(version for _, version in found)
        with open(f"{name}.new", "w") as file:
            json.dump(versions, file)
        os.replace(f"{name}.new", f"{name}.json")
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


def print_log(gateway: GatewayProcess) -> None:
    """Shown where the test fails."""
    print(gateway.log)


class Versions:
    """Both versions, in a folder with an app that each of them can run."""

    def __init__(self, folder: Path, before: Path, url: str) -> None:
        self.folder, self._before, self.url = folder, before, url
        (folder / "moving.py").write_text(APP)

    def environment(self, *, is_before: bool) -> dict[str, str]:
        """That of a process of a version."""
        packages = ("common", "producer", "worker") if is_before else ()
        path = [str(self._before / name) for name in packages]
        return {"PYTHONPATH": os.pathsep.join([*path, str(self.folder), str(TESTS)])}

    def start_load(self, name: str, *, is_before: bool) -> "subprocess.Popen[bytes]":
        """Starts a client."""
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", LOAD, name, "end"],
            cwd=self.folder,
            env={
                **os.environ,
                **self.environment(is_before=is_before),
                "CELERY_BROKER_URL": self.url,
                "CELERY_RESULT_BACKEND": self.url,
            },
        )

    def count(self, name: str) -> Counter[str]:
        """How many jobs of a client each version has run."""
        path = self.folder / f"{name}.json"
        return Counter(json.loads(path.read_text())) if path.exists() else Counter()


@pytest.fixture
def versions(tmp_path: Path, before: Path, redis_url: str) -> Versions:
    flush(redis_url)
    return Versions(tmp_path, before, redis_url)


@pytest.mark.timeout(400)
def test_a_rolling_upgrade_under_load_loses_nothing(
    versions: Versions, start_worker: StartWorker
) -> None:
    def start(*, is_before: bool) -> Worker:
        environment = versions.environment(is_before=is_before)
        return start_worker("moving", "-P", "threads", "-c", "2", env=environment)

    def wait_progress(by: str, what: str) -> None:
        seen = {name: versions.count(name)[by] for name in ("old", "new")}
        wait_for(
            lambda: all(versions.count(name)[by] > seen[name] + 200 for name in seen),
            f"both clients have jobs run by {by}: {what}",
            TIMEOUT_S,
        )

    first, second = start(is_before=True), start(is_before=True)
    loads = [versions.start_load(name, is_before=name == "old") for name in ("old", "new")]
    try:
        wait_progress("before", "at first")
        # One leaves in order, one is lost with what it holds.
        third = start(is_before=False)
        assert first.stop() == 0
        fourth = start(is_before=False)
        second.kill()
        wait_progress("now", "the upgrade is over")
        # And back, as where the new version has to be taken away again.
        fifth = start(is_before=True)
        third.kill()
        assert fourth.stop() == 0
        wait_progress("before", "it was taken back")
        with open_redis(versions.url) as store:
            wait_for(lambda: store.zcard(Keys().workers) == 1, "the dead are forgotten", TIMEOUT_S)
        (versions.folder / "end").touch()
        assert [load.wait(TIMEOUT_S) for load in loads] == [0, 0]
        # One that stood still was taken for dead: what it had comes twice.
        wait_for(lambda: unsettled(versions.url) == queue_length(versions.url) == 0, "no job left")
        assert fifth.stop() == 0
    finally:
        for load in loads:
            kill_all(load)
    assert unsettled(versions.url) == queue_length(versions.url) == 0
    with open_redis(versions.url) as store:
        assert not store.exists(Keys().dead, Keys().workers, Keys().worker_info)
        assert store.get(Keys().schema) == b"1"


@pytest.mark.timeout(300)
def test_gateways_of_both_versions_know_each_others_tasks(
    versions: Versions, start_worker: StartWorker, tmp_path: Path
) -> None:
    start_worker("moving", env=versions.environment(is_before=False))
    with ExitStack() as stack:
        gateways = []
        for is_before in (True, False):
            made = GatewayProcess(
                versions.folder,
                versions.url,
                *("-A", "moving"),
                models={},
                environment={
                    # Settings that both versions have.
                    "BATCHERY_GATEWAY": json.dumps({"tasks": ["moving.*"]}),
                    **versions.environment(is_before=is_before),
                    "CELERY_BROKER_URL": versions.url,
                    "CELERY_RESULT_BACKEND": versions.url,
                },
            )
            stack.callback(print_log, made)
            stack.callback(kill_all, made.process)
            gateways.append(made.wait_ready())
        for asked, other in (gateways, gateways[::-1]):
            task = asked.post("/tasks/moving.where", {"item": "a"}).json()
            answer = other.get(f"/tasks/{task['id']}?wait_s=60").json()
            assert (answer["status"], answer["result"]) == ("SUCCESS", ["a", "now"])


def test_a_worker_does_not_touch_what_a_newer_version_has_written(
    redis_url: str, start_worker: StartWorker
) -> None:
    with open_redis(redis_url) as store:
        store.set(Keys().schema, 99)
        store.lpush("celery", "of the future")
        worker = start_worker("apps.shop", ready=False)
        assert worker.wait_exit() != 0
        assert "their layout is 99, and this worker knows 1; update the worker" in worker.log
        assert store.lrange("celery", 0, -1) == [b"of the future"]
        assert not store.exists(Keys().workers)

"""Redis is away, hangs, refuses or forgets: devices wait, lose nothing, and run nothing twice."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from celery import Celery
from redis import Redis
from redis.exceptions import RedisError

from apps.leases import EXPIRY_S
from apps.ledger import executions
from benchmarks.chaos.proxy import Proxy
from support.harness import Worker, wait_for
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S, patient

TASK = "apps.leases.batch"


class Place:
    """A Redis, a worker beside it, and what the worker's jobs have done."""

    def __init__(self, redis: OwnRedis, folder: Path) -> None:
        self.redis = redis
        self.book, self.gate = folder / "book", folder / "gate"
        self.folder = folder
        self._workers: list[Worker] = []

    def start(self, *arguments: str, **env: str) -> Worker:
        options = arguments or ("-Q", TASK)
        env = {"CELERY_RESULT_BACKEND": self.redis.url, **env}
        worker = Worker(self.folder, self.redis.url, "apps.leases", *options, env=env)
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        for each in self._workers:
            each.kill()

    def send(self, *items: int, is_held: bool = False, url: str = "") -> list[str]:
        """Sends jobs; they wait for the gate if they are held."""
        options = {"book": str(self.book)} | ({"gate": str(self.gate)} if is_held else {})
        with Celery("sender", broker=url or self.redis.url, set_as_current=False) as app:
            return [app.send_task(TASK, [item], options, queue=TASK).id for item in items]

    def hold(self) -> list[str]:
        """Has a batch run until the gate opens, with jobs behind it."""
        ids = self.send(0, is_held=True)
        wait_for(lambda: executions(self.book) == ["0"], "a job runs", TIMEOUT_S)
        return ids + self.send(*range(1, 30))

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        with contextlib.closing(Redis.from_url(self.redis.url)) as made:
            yield made

    def finish(self, ids: list[str]) -> None:
        """Waits for a result of each job."""
        self.gate.touch()

        def are_there() -> bool:
            with self.client() as client, contextlib.suppress(RedisError):
                found = client.mget([f"celery-task-meta-{each}" for each in ids])
                return all(found) and {json.loads(each)["status"] for each in found} == {"SUCCESS"}
            return False

        wait_for(are_there, "all jobs are answered", TIMEOUT_S)
        with self.client() as client:
            wait_for(lambda: not client.keys("batchery:lease:*"), "no lease is left", TIMEOUT_S)


@pytest.fixture
def place(own_redis: OwnRedis, tmp_path: Path) -> Iterator[Place]:
    made = Place(own_redis, tmp_path)
    yield made
    made.end()


def find_devices(worker: Worker) -> list[psutil.Process]:
    return wait_for(worker.devices, "the device's process", TIMEOUT_S)


def test_a_worker_that_starts_without_redis_serves_when_it_is_there(place: Place) -> None:
    place.redis.kill()
    worker = place.start()
    line = "ERROR/device cpu] Cannot connect to "
    wait_for(lambda: line in worker.log, "it says so", TIMEOUT_S)
    (device,) = find_devices(worker)
    used = device.cpu_times()
    time.sleep(patient(5))
    # It does not look all the time, and says so no more.
    assert sum(device.cpu_times()[:2]) - sum(used[:2]) < patient(5) / 4
    assert worker.log.count(line) == 1
    place.redis.start()
    place.finish(place.send(1, 2, 3))
    assert worker.devices() == [device]
    assert worker.stop() == 0
    assert "Traceback" not in worker.log


def kill(place: Place) -> None:
    place.redis.kill()
    place.gate.touch()
    time.sleep(patient(4))
    place.redis.start()


def hang(place: Place) -> None:
    with place.redis.hanging():
        place.gate.touch()
        time.sleep(patient(4))


def cut(place: Place) -> None:
    for _ in range(20):
        with place.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        time.sleep(0.05)


def forget_scripts(place: Place) -> None:
    with place.client() as client:
        client.script_flush()


def be_replica(place: Place) -> None:
    with place.client() as client:
        # Of nobody: it keeps its data.
        client.replicaof("127.0.0.1", 1)
        client.client_kill_filter(_type="normal", skipme=True)
        place.gate.touch()
        time.sleep(patient(3))
        client.replicaof("NO", "ONE")


def be_full(place: Place) -> None:
    with place.client() as client:
        client.config_set("maxmemory", "1")
        place.gate.touch()
        time.sleep(patient(3))
        client.config_set("maxmemory", "0")


def fail_to_save(place: Place) -> None:
    with place.client() as client:
        # It writes what it saves beside the file, which cannot be a folder.
        blocker = place.folder / "redis" / client.config_get("dbfilename")["dbfilename"]
        blocker.mkdir()
        client.config_set("save", "3600 1")
        client.bgsave()
        has_failed = "rdb_last_bgsave_status", "err"
        wait_for(lambda: has_failed in client.info("persistence").items(), "it fails")
        with pytest.raises(RedisError, match="MISCONF"):
            client.set("more", "x")
        place.gate.touch()
        time.sleep(patient(3))
        blocker.rmdir()
        client.bgsave()


def change_password(place: Place) -> None:
    with place.client() as client:
        client.config_set("requirepass", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
        place.gate.touch()
        time.sleep(patient(3))
        client.config_set("requirepass", "")


@pytest.mark.parametrize(
    "happen",
    [kill, hang, cut, forget_scripts, be_replica, be_full, fail_to_save, change_password],
    ids=lambda each: each.__name__,
)
def test_what_redis_suffers_costs_no_job_and_repeats_none(
    place: Place, happen: Callable[[Place], None]
) -> None:
    worker = place.start().wait_ready()
    (device,) = worker.devices()
    ids = place.hold()
    happen(place)
    place.finish(ids)
    place.finish(place.send(30))
    assert sorted(map(int, executions(place.book))) == list(range(31))
    assert worker.devices() == [device]
    assert worker.stop() == 0
    assert "its leases were handed on" not in worker.log


@pytest.mark.parametrize("arguments", [("-E",), ("-l", "WARNING")], ids=["events", "plain"])
def test_an_outage_costs_nothing_whoever_listens(place: Place, arguments: tuple[str, ...]) -> None:
    worker = place.start("-Q", TASK, *arguments)
    with place.client() as client:
        wait_for(lambda: client.zcard("batchery:workers"), "it is there", TIMEOUT_S)
    ids = place.hold()
    kill(place)
    place.finish(ids + place.send(30))
    assert sorted(map(int, executions(place.book))) == list(range(31))
    assert worker.stop() == 0
    assert "Traceback" not in worker.log


def test_a_worker_ends_while_redis_is_away(place: Place) -> None:
    worker = place.start().wait_ready()
    wait_for(lambda: "device cpu is ready" in worker.log, "its device is there", TIMEOUT_S)
    place.redis.kill()
    wait_for(lambda: worker.log.count("Cannot connect to ") >= 2, "both say so", TIMEOUT_S)
    assert worker.stop() == 0


class TearingProxy(Proxy):
    """Breaks the connections over which the first answers with jobs come: half of each arrives."""

    left = 4

    def _pump(self, source: Any, sink: Any, pair: Any) -> None:
        if source is pair[1]:
            source = SimpleNamespace(recv=partial(self._receive, source, sink))
        super()._pump(source, sink, pair)

    def _receive(self, source: Any, sink: Any, count: int) -> bytes:
        data: bytes = source.recv(count)
        if TASK.encode() in data and self.left:
            self.left -= 1
            sink.sendall(data[: len(data) // 2])
            return b""
        return data


def test_jobs_whose_answer_is_torn_run_once(place: Place) -> None:
    with TearingProxy(place.redis.port) as proxy:
        url = place.redis.url.replace(f":{place.redis.port}", f":{proxy.port}")
        worker = place.start(CELERY_BROKER_URL=url).wait_ready()
        for number in range(8):
            place.finish(place.send(number))
        assert not proxy.left
        assert sorted(map(int, executions(place.book))) == list(range(8))
        assert worker.stop() == 0


def test_a_device_whose_worker_stood_still_joins_again_with_it(place: Place) -> None:
    worker = place.start().wait_ready()
    ids = place.hold()
    os.kill(worker.pid, signal.SIGSTOP)
    second = place.start("-Q", "nothing")
    with place.client() as client:
        wait_for(lambda: client.llen(TASK) == 30, "its jobs are back", TIMEOUT_S)
        time.sleep(2 * EXPIRY_S)
        # Nobody would beat for it.
        assert client.zcard("batchery:workers") == 1
        os.kill(worker.pid, signal.SIGCONT)
        place.finish(ids)
        wait_for(lambda: client.zcard("batchery:workers") == 2, "it has joined")
    assert worker.log.count("its leases were handed on") == 1
    assert "Restarting" not in worker.log
    assert [each.stop() for each in (worker, second)] == [0, 0]


def test_a_device_whose_leases_are_lost_drops_what_waits(place: Place) -> None:
    worker = place.start().wait_ready()
    place.hold()
    with place.client() as client:
        client.flushall()
        wait_for(lambda: "its leases were handed on" in worker.log, "it knows", TIMEOUT_S)
    place.gate.touch()
    place.finish(place.send(30))
    # The jobs of the next batch may have been on the device.
    assert len(executions(place.book)) < 20
    assert worker.stop() == 0

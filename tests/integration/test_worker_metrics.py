"""A worker's own port: its counters agree with what ran, and its health with how it is."""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from celery import Celery

from apps import shop
from batchery.gateway_settings import JOBS_QUEUE
from benchmarks.redis_cluster import find_lasting_port
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.metrics_port import Samples, ask_port, read_samples, scrape
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S, patient


class Watched(NamedTuple):
    """A worker with a port."""

    worker: Worker
    port: int

    def says(self, path: str) -> tuple[int, str]:
        """The status and the text of `/livez` or `/readyz`."""
        return ask_port(self.port, path)

    def is_well(self, path: str) -> bool:
        return self.says(path) == (200, "ok")

    def scrape(self) -> str:
        return scrape(self.port, patient(60))

    def samples(self) -> Samples:
        """By name and the values of the labels, but for the worker's name."""
        return read_samples(self.scrape(), without="worker")


StartWatched = Callable[..., Watched]


def start(start_worker: StartWorker, app: str, **variables: str) -> Watched:
    """Starts a worker with a port, and does not wait until it is ready."""
    port = find_lasting_port()
    env = {"BATCHERY_METRICS__PORT": str(port), **variables}
    return Watched(start_worker(app, "-c", "1", ready=False, env=env), port)


@pytest.fixture(autouse=True)
def _on_this_redis(redis_url: str) -> None:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)


@pytest.fixture(scope="module")
def watched(start_module_worker: StartWorker, redis_url: str) -> Watched:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    made = start(start_module_worker, "apps.shop")
    made.worker.wait_ready().wait_answers(shop.app)
    # It has ordinary tasks, too, and so does not wait for its devices.
    wait_for(lambda: made.is_well("/readyz"), "it is ready", patient(60))
    return made


def test_counters_agree_with_what_ran(watched: Watched) -> None:
    task = shop.shout.name
    before = watched.samples()

    def gained(*key: str) -> float:
        after = watched.samples()
        return after.get(key, 0.0) - before.get(key, 0.0)

    shop.shout.submit_many([f"text {n}" for n in range(300)]).get(timeout=TIMEOUT_S)
    failed = [shop.nasty.delay("raise") for _ in range(3)]
    for job in failed:
        with pytest.raises(KeyError):
            job.get(timeout=TIMEOUT_S)
    wait_for(lambda: gained("batchery_jobs_total", "succeeded", task) >= 300, "all are counted")
    wait_for(lambda: gained("batchery_jobs_total", "failed", shop.nasty.name) >= 3, "so are these")
    after = watched.samples()
    assert gained("batchery_jobs_total", "succeeded", task) == 300
    assert gained("batchery_jobs_total", "failed", shop.nasty.name) == 3
    assert gained("batchery_items_total", task) == 300
    batches = gained("batchery_batches_total", task)
    assert 300 / 64 <= batches <= 300
    assert gained("batchery_batch_size_count", task) == batches
    assert gained("batchery_batch_size_bucket", "64.0", task) == batches
    assert gained("batchery_queue_wait_seconds_count", task) == 300
    assert 0 < gained("batchery_queue_wait_seconds_sum", task) < 300 * TIMEOUT_S
    assert gained("batchery_failures_total", "KeyError") == 3
    assert gained("batchery_tracer_jobs_total", "a failure") == 3
    assert gained("batchery_redis_round_trips_total") > 1
    assert gained("batchery_redis_script_seconds_count", "fetch") > 1
    assert (after["batchery_worker_live",], after["batchery_worker_ready",]) == (1, 1)
    assert after["batchery_device_ready", "cpu"] == 1
    wait_for(lambda: watched.samples()["batchery_leases_held",] == 0, "all are acknowledged")


def test_readers_that_do_not_read_hold_up_neither_others_nor_the_worker(watched: Watched) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", watched.port)))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert watched.is_well("/livez")
        assert watched.scrape()
        # No task whose jobs are counted elsewhere: a result is there before its job is counted.
        assert shop.increment.delay(1).get(timeout=TIMEOUT_S) == 2


def test_port_that_is_taken_ends_the_worker_with_one_line(
    watched: Watched, start_worker: StartWorker
) -> None:
    env = {"BATCHERY_METRICS__PORT": str(watched.port)}
    worker = start_worker("apps.shop", ready=False, env=env)
    assert worker.wait_exit() == 2
    (line,) = [line for line in worker.log.splitlines() if "metrics:" in line]
    assert f"cannot listen on 127.0.0.1:{watched.port}" in line
    assert "Traceback" not in worker.log


def test_worker_is_live_while_it_loads_and_ready_when_it_has_loaded(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    variables = {"GATE_FOLDER": str(tmp_path)}
    watched = start(start_worker, "apps.slow_start", **variables)
    wait_for(lambda: watched.is_well("/livez"), "it lives", patient(60))
    status, why = watched.says("/readyz")
    assert (status, "not ready" in why or "not started" in why) == (503, True)
    assert watched.samples()["batchery_worker_ready",] == 0
    (tmp_path / "gate").touch()
    wait_for(lambda: watched.is_well("/readyz"), "it is ready", patient(60))
    assert watched.samples()["batchery_worker_ready",] == 1
    watched.worker.stop()
    assert watched.says("/livez")[0] == 0


def test_worker_without_batch_tasks_is_watched_too(start_worker: StartWorker) -> None:
    watched = start(start_worker, "apps.ordinary")
    wait_for(lambda: watched.is_well("/readyz"), "it is ready", patient(60))
    assert watched.samples()["batchery_worker_live",] == 1


@pytest.fixture
def on_own_redis(tmp_path: Path, own_redis: OwnRedis) -> Iterator[Watched]:
    """A worker on a Redis that the test may stop, with a limit for devices that hang."""
    port, gate = find_lasting_port(), tmp_path / "gate"
    gate.touch()
    env = {"BATCHERY_METRICS__PORT": str(port), "BATCHERY_MAX_PASS_S": str(patient(5))}
    env["GATE_FOLDER"] = str(tmp_path)
    worker = Worker(tmp_path, own_redis.url, "apps.slow_start", "-c", "1", env=env)
    try:
        yield Watched(worker.wait_ready(), port)
    finally:
        worker.kill()


def test_stopped_device_turns_livez_and_its_jobs_go_on(
    on_own_redis: Watched, own_redis: OwnRedis, tmp_path: Path
) -> None:
    watched, gate = on_own_redis, tmp_path / "gate"
    # The replacement of the device waits for it.
    gate.unlink()
    (device,) = watched.worker.devices()
    device.send_signal(signal.SIGSTOP)
    # It has nothing to do, and so it may be silent.
    assert watched.is_well("/livez")
    with Celery(broker=own_redis.url, backend=own_redis.url, set_as_current=False) as client:
        job = client.send_task("slow", ["a"], queue="slow")

        def are_replacing() -> bool:
            said = [watched.says(path) for path in ("/livez", "/readyz")]
            return all(status == 503 and "hung" in why for status, why in said)

        wait_for(are_replacing, "it is not live while its device is replaced")
        gate.touch()
        assert job.get(timeout=TIMEOUT_S) != device.pid
        backend: Any = client.backend
        backend.result_consumer.stop()
    wait_for(lambda: watched.is_well("/livez") and watched.is_well("/readyz"), "it is well again")
    assert watched.samples()["batchery_device_restarts_total",] >= 1
    assert watched.worker.process.poll() is None


def test_lost_redis_turns_readyz_and_not_livez(on_own_redis: Watched, own_redis: OwnRedis) -> None:
    watched = on_own_redis
    wait_for(lambda: watched.is_well("/readyz"), "it is ready")
    for lose in (own_redis.hanging(), gone(own_redis)):
        with lose:
            wait_for(lambda: not watched.is_well("/readyz"), "it is not ready")
            assert watched.is_well("/livez")
            # Its figures are the last ones, as its event loop may wait for Redis.
            wait_for(lambda: not watched.samples()["batchery_worker_ready",], "its figures say so")
        wait_for(lambda: watched.is_well("/readyz"), "it is ready again", patient(60))


@contextlib.contextmanager
def gone(redis: OwnRedis) -> Iterator[None]:
    redis.kill()
    yield
    redis.start()


def test_gateways_own_worker_takes_nobody_s_port(start_worker: StartWorker) -> None:
    env = {"BATCHERY_METRICS__PORT": str(find_lasting_port())}
    worker = start_worker("apps.shop", "-c", "1", "-Q", JOBS_QUEUE, env=env)
    family = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
    listening = [
        each for process in family for each in process.net_connections() if each.status == "LISTEN"
    ]
    assert listening == []

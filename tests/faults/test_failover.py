"""A Redis that is no primary any more: workers wait for one, and then go on."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import OutOfMemoryError, Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from apps.ledger import executions
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.own_redis import OwnRedis
from support.patience import patient
from support.redis_places import MASTER, behind_sentinel

TIMEOUT_S = patient(120)

#: A batch task, and its queue.
BATCH = "apps.leases.batch"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[OwnRedis, OwnRedis]]:
    """A primary, and a replica that has all of its data."""
    with (
        OwnRedis(tmp_path / "first", repl_diskless_sync_delay="0") as first,
        OwnRedis(tmp_path / "second", repl_diskless_sync_delay="0") as second,
    ):
        with client_of(second) as client:
            client.replicaof("127.0.0.1", first.port)
        wait_for(lambda: is_synchronised(second), "the replica has all data")
        yield first, second


@contextlib.contextmanager
def client_of(server: OwnRedis) -> Iterator[Any]:
    with contextlib.closing(Redis.from_url(server.url)) as client:
        yield client


def is_synchronised(replica: OwnRedis) -> bool:
    with client_of(replica) as client:
        return bool(client.info("replication")["master_link_status"] == "up")


def wait_replicated(primary: OwnRedis) -> None:
    """Waits until its replica has all that was written so far; else it dies with the primary."""
    with client_of(primary) as client:
        client.set("written", "last")
        assert client.wait(1, int(1000 * TIMEOUT_S)) == 1


def fail_over(old: OwnRedis, new: OwnRedis) -> None:
    """Makes a replica the primary; the old one takes no writes, and cuts its connections."""
    wait_replicated(old)
    with client_of(new) as client:
        client.replicaof("NO", "ONE")
    with client_of(old) as client:
        client.replicaof("127.0.0.1", new.port)
        client.client_kill_filter(_type="normal", skipme=True)
    wait_for(lambda: is_synchronised(old), "the old primary follows the new one")


def knows_replica(sentinel: Any) -> bool:
    """Whether a Sentinel has heard from the replica itself; no other one may become the primary."""
    return any(each["master-link-status"] == "ok" for each in sentinel.sentinel_slaves(MASTER))


def leased(server: OwnRedis) -> int:
    """How many messages all workers together hold."""
    with client_of(server) as client:
        return sum(client.hlen(key) for key in client.keys("batchery:lease:*"))


def send(
    url: str,
    items: list[int],
    options: dict[str, Any] | None = None,
    countdown_s: float | None = None,
    queue: str = BATCH,
    **keywords: Any,
) -> Any:
    """Sends each item to the task, by its own queue or by another one; returns the ids."""
    with Celery("sender", broker=url, set_as_current=False) as app:
        app.conf.broker_transport_options = options or {}
        texts = {name: str(value) for name, value in keywords.items()}
        return [
            app.send_task(BATCH, [item], texts, countdown=countdown_s, queue=queue).id
            for item in items
        ]


def wait_answered(server: OwnRedis, worker: Worker, ids: list[str]) -> None:
    """Waits for a result of each job, each a success."""

    def results() -> list[Any]:
        assert worker.process.poll() is None, worker.log
        # A Sentinel that makes a server the primary ends its connections.
        with client_of(server) as client, contextlib.suppress(RedisConnectionError):
            found = client.mget([f"celery-task-meta-{each}" for each in ids])
            return found if all(found) else []
        return []

    stored = wait_for(results, "all jobs are answered", TIMEOUT_S)
    assert {json.loads(each)["status"] for each in stored} == {"SUCCESS"}


@pytest.mark.timeout(400)
def test_worker_outlives_a_failover_in_which_its_server_becomes_a_replica(
    start_worker: StartWorker, servers: tuple[OwnRedis, OwnRedis], tmp_path: Path
) -> None:
    first, second = servers
    book, gate = tmp_path / "book", tmp_path / "gate"
    env = {"CELERY_BROKER_URL": first.url, "CELERY_RESULT_BACKEND": first.url}
    worker = start_worker("apps.leases", "-c", "2", env=env, is_alone=False)
    wait_answered(first, worker, send(first.url, [1, 2], book=book))
    running = send(first.url, [3], book=book, gate=gate)
    wait_for(lambda: "3" in executions(book), "a batch runs")
    waiting = send(first.url, [4, 5, 6], book=book, gate=gate)
    fail_over(first, second)
    wait_for(lambda: "takes no writes" in worker.log, "it says why it waits", TIMEOUT_S)
    gate.touch()
    fail_over(second, first)
    later = send(first.url, [7], book=book)
    wait_answered(first, worker, running + waiting + later)
    assert Counter(executions(book)) == Counter("1234567")
    assert worker.stop() == 0
    assert "Traceback" not in worker.log


@pytest.mark.timeout(400)
def test_no_job_is_left_behind_by_a_primary_that_dies_behind_two_sentinels(
    start_worker: StartWorker, servers: tuple[OwnRedis, OwnRedis], tmp_path: Path
) -> None:
    first, second = servers
    book, gate = tmp_path / "book", tmp_path / "gate"
    with behind_sentinel(tmp_path / "sentinel", first.port, 2, down_after_s=1) as url:
        env = {"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url, "MASTER": MASTER}
        worker = start_worker("apps.leases", "-c", "2", env=env, is_alone=False)
        options = {"master_name": MASTER}
        wait_answered(first, worker, send(url, [1, 2], options, book=book))
        for each in url.split(";"):
            with Redis.from_url(each.replace("sentinel", "redis")) as sentinel:
                client: Any = sentinel
                wait_for(lambda: knows_replica(client), "Sentinel knows the replica")  # noqa: B023
                wait_for(lambda: client.sentinel_sentinels(MASTER), "it knows the other Sentinel")  # noqa: B023
        ids = send(url, [5, 6], options, countdown_s=20, book=book)
        wait_for(lambda: leased(first) == 2, "the device holds jobs that wait")
        ids += send(url, [3, 4], options, book=book, gate=gate)
        wait_for(lambda: "3" in executions(book), "a batch runs")
        ids += send(url, list(range(7, 15)), options, book=book)
        wait_replicated(first)
        first.kill()
        gate.touch()
        wait_answered(second, worker, ids)
        assert set(executions(book)) == set(map(str, range(1, 15)))
        assert worker.stop() == 0


@pytest.mark.timeout(400)
def test_worker_that_went_to_another_broker_leaves_no_waiting_job_with_the_first(
    start_worker: StartWorker, own_redis: OwnRedis, tmp_path: Path
) -> None:
    book, gate = tmp_path / "book", tmp_path / "gate"
    with OwnRedis(tmp_path / "first") as first:
        env = {"CELERY_BROKER_URL": f"{first.url};{own_redis.url}"}
        # What came together does not run together, and waits on the device.
        env |= {"CELERY_RESULT_BACKEND": own_redis.url, "RATE": "1/s"}
        send(first.url, [1, 5, 6], book=book, gate=gate)
        worker = start_worker("apps.leases", "-c", "2", env=env, is_alone=False)
        wait_for(lambda: executions(book) == ["1"], "a batch runs")
        wait_for(lambda: leased(first) == 3, "the device holds jobs that wait")
        send(first.url, [2], book=book, gate=gate)
        first.kill()
        with client_of(own_redis) as other:
            wait_for(lambda: other.zcard("batchery:workers"), "it goes to the other", TIMEOUT_S)
        first.start()
        with client_of(first) as client:
            wait_for(lambda: client.llen(BATCH) == 3, "what waits is back", TIMEOUT_S)
            assert leased(first) == 1
            gate.touch()
            wait_for(lambda: leased(first) == 0, "no lease is left", TIMEOUT_S)
            wait_for(lambda: not client.zcard("batchery:workers"), "it has left", TIMEOUT_S)
        wait_answered(own_redis, worker, send(own_redis.url, [7], book=book))
        assert executions(book) == ["1", "7"]
        assert worker.stop() == 0


def test_worker_starts_while_redis_is_full_and_drains_the_queue(
    start_worker: StartWorker, own_redis: OwnRedis, tmp_path: Path
) -> None:
    book = tmp_path / "book"
    ids = send(own_redis.url, list(range(10)), book=book)
    # By the queue of ordinary jobs, as a plain client sends them: the worker forwards them.
    ids += send(own_redis.url, list(range(10, 20)), book=book, queue="celery")
    with client_of(own_redis) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        with pytest.raises(OutOfMemoryError):
            client.set("more", "x")
        env = {"CELERY_BROKER_URL": own_redis.url, "CELERY_RESULT_BACKEND": own_redis.url}
        worker = start_worker("apps.leases", "-c", "2", env=env, is_alone=False)
        # It computes; results find no room, and wait.
        wait_for(lambda: len(executions(book)) >= 2, "it takes jobs", TIMEOUT_S)
        queues = ("celery", BATCH)
        wait_for(lambda: not client.exists(*queues), "it takes those that came astray", TIMEOUT_S)
        client.config_set("maxmemory", "0")
    wait_answered(own_redis, worker, ids)
    everything = set(map(str, range(20)))
    wait_for(lambda: set(executions(book)) == everything, "all have run", TIMEOUT_S)
    assert worker.stop() == 0

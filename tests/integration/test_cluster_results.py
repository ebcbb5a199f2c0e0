"""Results on a Redis Cluster: what Celery promises of them, and what we do."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord, group, uuid
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult, GroupResult
from redis.crc import key_slot

from batchery import AsyncClient, Client, install
from batchery.transport.cluster import find_shard, list_tags
from conftest import StartWorker
from support.harness import Worker, unsettled, wait_for
from support.own_cluster import OwnCluster
from support.patience import TIMEOUT_S

#: Celery's own code, which saves a group.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

COUNT = 200


@pytest.fixture(scope="module")
def app(cluster: OwnCluster, redis_url: str) -> Iterator[Celery]:
    """The app of a client; it does not know the tasks."""
    made = install(Celery("client", broker=redis_url, set_as_current=False))
    made.conf.update(result_backend=cluster.url)
    yield made
    backend: Any = made.backend
    backend.result_consumer.stop()
    backend.client.connection_pool.disconnect()
    made.close()


@pytest.fixture(scope="module", autouse=True)
def worker(start_module_worker: StartWorker, cluster: OwnCluster, app: Celery) -> Worker:
    env = {"CELERY_RESULT_BACKEND": cluster.url}
    return start_module_worker("apps.sharded", "-c", "1", env=env).wait_answers(app)


def task(app: Celery, name: str) -> Any:
    return app.signature(f"apps.sharded.{name}")


def send(app: Celery, name: str, *args: Any, **options: Any) -> Any:
    return task(app, name).clone(args).apply_async(**options)


def run(awaited: Any) -> Any:
    return asyncio.run(asyncio.wait_for(awaited, TIMEOUT_S))


def test_results_of_both_kinds_of_tasks_and_a_group_are_awaited(app: Celery) -> None:
    assert send(app, "count", 1).get(timeout=TIMEOUT_S) == 2
    assert send(app, "double", 4).get(timeout=TIMEOUT_S) == 8
    jobs: Any = group(task(app, "count").clone([number]) for number in range(COUNT)).apply_async()
    jobs.save()
    assert jobs.join(timeout=TIMEOUT_S) == list(range(1, COUNT + 1))
    again = GroupResult.restore(jobs.id, app=app)
    assert again is not None
    assert again.join_native(timeout=TIMEOUT_S) == list(range(1, COUNT + 1))


def test_failures_states_and_chords_are_celerys(app: Celery, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="-1 is negative"):
        send(app, "count", -1).get(timeout=TIMEOUT_S)
    gate = tmp_path / "gate"
    held = send(app, "wait", str(gate))
    wait_for(lambda: held.state == "STARTED", "it is said to have begun", TIMEOUT_S)
    gate.touch()
    assert held.get(timeout=TIMEOUT_S) == 1
    header = [task(app, name).clone([n]) for n in range(20) for name in ("count", "double")]
    assert chord(header)(task(app, "add")).get(timeout=TIMEOUT_S) == 210 + 380
    with pytest.raises(Exception, match="-5 is negative"):
        chord([task(app, "count").clone([-5])])(task(app, "add")).get(timeout=TIMEOUT_S)


def test_results_expire_and_are_forgotten_and_the_first_counts(app: Celery) -> None:
    backend: Any = app.backend
    task_id = uuid()
    ended = send(app, "count", 1, task_id=task_id)
    assert ended.get(timeout=TIMEOUT_S) == 2
    key = backend.get_key_for_task(task_id)
    assert 0 < backend.client.ttl(key) <= 1000
    send(app, "count", 7, task_id=task_id)
    send(app, "count", -7, task_id=task_id)
    broker = str(app.conf.broker_url)
    wait_for(lambda: unsettled(broker) == 0, "all have ended", TIMEOUT_S)
    assert send(app, "count", 0).get(timeout=TIMEOUT_S) == 1
    assert json.loads(backend.client.get(key))["result"] == 2
    ended.forget()
    assert backend.client.get(key) is None


def test_clients_fetch_many_results_and_streams(app: Celery) -> None:
    numbers = list(range(1000))
    client = Client(app)
    assert list(client.task("apps.sharded.count", queue="celery").map(numbers)) == [
        number + 1 for number in numbers
    ]
    spell = client.task("apps.sharded.spell", queue="celery")
    streams = [spell.stream(word, timeout_s=TIMEOUT_S) for word in ("abc", "defg", "hi" * 50)]
    assert ["".join(stream) for stream in streams] == ["abc", "defg", "hi" * 50]
    assert [stream.result for stream in streams] == ["ABC", "DEFG", "HI" * 50]
    assert list(client.follow(streams[1].id, timeout_s=TIMEOUT_S)) == list("defg")
    client.close()

    async def call_all() -> tuple[list[int], list[str]]:
        async with AsyncClient(app) as aio:
            count = aio.task("apps.sharded.count", queue="celery")
            values = await asyncio.gather(*map(count, range(100)))
            pieces = aio.task("apps.sharded.spell", queue="celery").stream("async")
            return values, [letter async for letter in pieces]

    assert run(call_all()) == (list(range(1, 101)), list("async"))


def test_the_cache_is_on_all_shards(app: Celery, tmp_path: Path) -> None:
    path = tmp_path / "noted"
    for _ in range(2):
        sent = [send(app, "note", [str(path), letter]) for letter in "abcdefghijklmnop"]
        assert "".join(each.get(timeout=TIMEOUT_S) for each in sent) == "abcdefghijklmnop"
    assert sorted(path.read_text()) == list("abcdefghijklmnop")


def hold(app: Celery, gate: Path) -> list[AsyncResult[int]]:
    """Jobs with results in all shards, which run until there is a file."""
    ids = (uuid() for _ in range(COUNT))
    sent = [send(app, "wait", str(gate), task_id=each) for each in ids]
    wait_for(lambda: any(each.state == "STARTED" for each in sent), "some have begun", TIMEOUT_S)
    return sent


def test_a_primary_dies_and_slots_move_while_results_are_stored(
    app: Celery, cluster: OwnCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    sent = hold(app, gate)
    slots = [key_slot(tag.encode()) for tag in list_tags()]
    victim = cluster.primary_of(slots[find_shard(sent[0].id)])
    other = next(n for n in cluster.nodes if n is not victim and cluster.is_primary(n))
    with ThreadPoolExecutor(len(sent)) as threads:
        waiting = [threads.submit(each.get, timeout=TIMEOUT_S) for each in sent]
        gate.touch()
        victim.kill()
        try:
            for slot in slots:
                if not any(a <= slot <= b for a, b in cluster.slots_of(other)):
                    cluster.move(slot, other)
                    break
            values = [each.result() for each in waiting]
        finally:
            victim.start()
            cluster.wait_ready()
    assert len(values) == COUNT
    backend: Any = app.backend
    stored = backend.client.mget([backend.get_key_for_task(each.id) for each in sent])
    assert [json.loads(each)["status"] for each in stored] == ["SUCCESS"] * COUNT


def test_other_urls_keep_the_stock_backend() -> None:
    made = install(Celery("plain", backend="redis://127.0.0.1:1/0", set_as_current=False))
    assert type(made.backend) is RedisBackend
    secure = install(Celery("secure", set_as_current=False))
    url = "rediss+cluster://me:secret@a:1,b:2/?ssl_cert_reqs=required"
    secure.conf.update(result_backend=url)
    assert isinstance(secure.backend, RedisBackend)
    backend: Any = secure.backend
    assert "secret" not in backend.as_uri()
    tag = list_tags()[find_shard("id")].encode()
    assert backend.get_key_for_task("id") == tag + b"celery-task-meta-id"
    assert backend.get_key_for_group("id", ".j") == tag + b"celery-taskset-meta-id.j"

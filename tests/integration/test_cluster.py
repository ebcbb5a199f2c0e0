"""What works on one Redis works on a cluster of three primaries and three replicas, too.

Celery's broker is an ordinary Redis; batch jobs and results are on the cluster.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.utils import uuid

from batchery import AsyncClient, BatchTask, Client, install
from batchery_producer import Ending, Publisher, submit_file
from conftest import StartGateway, StartWorker
from support.bulk_runs import read_rows, write_rows
from support.gateway import GatewayProcess
from support.harness import Worker, device_busy, open_redis
from support.own_cluster import OwnCluster
from support.patience import TIMEOUT_S, patient

#: Batch tasks of `apps.shop` that are sent here; an app that sends one by `delay` must have it.
BATCH_TASKS = ("shout", "until", "moody", "third_time", "increment", "total", "bound")

#: What all keys of a shard begin with.
SHARD = re.compile(r"\{b\d+\}")


def unused(item: Any) -> Any:
    """Stands for a function that workers have."""
    return item


@pytest.fixture(scope="module")
def environment(redis_url: str, cluster: OwnCluster) -> dict[str, str]:
    """Of all processes: where the broker, the batch jobs and the results are."""
    return {
        "CELERY_BROKER_URL": redis_url,
        "CELERY_RESULT_BACKEND": cluster.url,
        "BATCHERY_REDIS_URL": cluster.url,
    }


@pytest.fixture(scope="module", autouse=True)
def scripts_in_one_shard(cluster: OwnCluster) -> Iterator[None]:
    """Checks that no script of these tests has touched the keys of another shard.

    Redis would refuse that only if a node lacks them.
    """
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(open_redis(node.url)) for node in cluster.nodes[:3]]
        monitors = [stack.enter_context(client.monitor()) for client in clients]
        yield
        for client, monitor in zip(clients, monitors, strict=True):
            end = uuid()
            client.echo(end)
            declared: set[str] = set()
            while end not in (seen := monitor.next_command())["command"]:
                touched = set(SHARD.findall(seen["command"]))
                if seen["client_type"] != "lua":
                    declared = touched
                elif seen["command"].lower() != "time":
                    assert touched == declared, seen
                    assert len(declared) == 1, seen


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, environment: dict[str, str]) -> Worker:
    return start_module_worker("apps.shop", env=environment)


@pytest.fixture(scope="module")
def app(redis_url: str, cluster: OwnCluster) -> Iterator[Celery]:
    """An app of a client in which Batchery is installed."""
    made = Celery("client", broker=redis_url, backend=cluster.url, set_as_current=False)
    install(made, redis_url=cluster.url)
    for name in BATCH_TASKS:
        made.task(shared=False, base=BatchTask, name=f"apps.shop.{name}")(unused)
    made.task(shared=False, name="apps.shop.double")(unused)
    yield made
    backend: Any = made.backend
    backend.result_consumer.stop()
    made.close()


@pytest.fixture
def tasks(app: Celery, worker: Worker) -> Any:
    """The tasks of the app, by name."""
    return {name.removeprefix("apps.shop."): task for name, task in app.tasks.items()}


def test_calls_one_by_one_and_many_at_once(tasks: Any) -> None:
    shout = tasks["shout"]
    assert shout.delay("one").get(timeout=TIMEOUT_S) == "ONE"
    assert shout.submit_many(["two", "three"]).join(timeout=TIMEOUT_S) == ["TWO", "THREE"]
    with pytest.raises(LookupError, match="not there"):
        tasks["moody"].delay({"answer": "failed-exception", "why": "not there"}).get(
            timeout=TIMEOUT_S
        )


def test_a_queue_is_on_one_node_and_results_are_on_all(
    tasks: Any, worker: Worker, app: Celery, cluster: OwnCluster, tmp_path: Path
) -> None:
    queue = b"apps.shop.shout"

    def have(part: bytes) -> list[bool]:
        """Of each primary, whether it has keys with this part."""
        found = []
        for node in cluster.nodes[:3]:
            with open_redis(node.url) as redis:
                found.append(any(part in key for key in redis.scan_iter(count=1000)))
        return found

    with device_busy(worker, app, "apps.shop.until", tmp_path / "gate"):
        jobs = tasks["shout"].submit_many([f"text {number}" for number in range(200)])
        assert sorted(have(queue)) == [False, False, True]
    assert len(jobs.join(timeout=TIMEOUT_S)) == 200
    assert have(b"celery-task-meta-") == [True, True, True]


def test_clients(app: Celery, worker: Worker) -> None:
    texts = [f"text {number}" for number in range(300)]
    expected = [text.upper() for text in texts]
    with Client(app) as client:
        assert list(client.task("apps.shop.shout").map(texts, per_job=7)) == expected
    ids = [uuid() for _ in texts]
    with Publisher(app, "apps.shop.shout") as publisher:
        publisher.send(list(zip(ids, texts, strict=True)))
    assert [app.AsyncResult(each).get(timeout=TIMEOUT_S) for each in ids] == expected

    async def call() -> list[str]:
        async with AsyncClient(app) as client:
            shout = client.task("apps.shop.shout", timeout_s=TIMEOUT_S)
            return [*await asyncio.gather(*map(shout, texts))]

    assert asyncio.run(call()) == expected


def test_canvas(tasks: Any, app: Celery) -> None:
    increment, double = tasks["increment"], tasks["double"]
    steps = chain(increment.s(1), double.s(), increment.s(), app=app)
    assert steps().get(timeout=TIMEOUT_S) == 5
    several = group((increment.s(number) for number in range(9)), app=app)
    assert several().get(timeout=TIMEOUT_S) == list(range(1, 10))
    whole = chord([increment.s(n) for n in range(20)], tasks["total"].s(), app=app)
    assert whole().get(timeout=TIMEOUT_S) == sum(range(1, 21))
    mixed = chord([increment.s(1), double.s(2)], tasks["total"].s(), app=app)
    assert chain(mixed, increment.s(), app=app)().get(timeout=TIMEOUT_S) == 7


def test_a_retry_and_a_job_for_later(tasks: Any, tmp_path: Path) -> None:
    assert tasks["third_time"].delay(str(tmp_path / "attempts")).get(timeout=TIMEOUT_S) == 3
    later = [tasks["shout"].apply_async(("later",), countdown=wait_s) for wait_s in (0.5, 3)]
    assert [each.get(timeout=TIMEOUT_S) for each in later] == ["LATER", "LATER"]


def test_a_job_that_is_revoked_while_it_waits_never_runs(
    tasks: Any, worker: Worker, app: Celery, tmp_path: Path
) -> None:
    with device_busy(worker, app, "apps.shop.until", tmp_path / "gate"):
        revoked, mate = tasks["shout"].delay("never"), tasks["shout"].delay("mate")
        app.control.revoke(revoked.id, reply=True, timeout=TIMEOUT_S, limit=1)
    assert mate.get(timeout=TIMEOUT_S) == "MATE"
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=TIMEOUT_S)


def test_a_client_without_batchery_sends_by_the_broker(
    client: Celery, app: Celery, worker: Worker
) -> None:
    sent = [
        client.send_task("apps.shop.shout", [f"text {number}"], queue="apps.shop.shout")
        for number in range(100)
    ]
    results = [app.AsyncResult(each.id).get(timeout=TIMEOUT_S) for each in sent]
    assert results == [f"TEXT {number}" for number in range(100)]
    chained = chain(
        client.signature("apps.shop.shout", ("a",), queue="apps.shop.shout"),
        client.signature("apps.shop.bound"),
        app=client,
    )
    ended = app.AsyncResult(chained().id).get(timeout=TIMEOUT_S)
    assert ended == "apps.shop.bound:A"


def test_submit_writes_a_row_for_each(app: Celery, worker: Worker, tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    summary = submit_file(source, "apps.shop.shout", target, app=app, window=64)
    assert (summary.ending, summary.succeeded, summary.failed) == (Ending.SUCCEEDED, 300, 0)
    rows = {row["id"]: row["result"] for row in read_rows(target)}
    assert rows == {f"row-{n}": f"TEXT {n}" for n in range(300)}


@pytest.fixture(scope="module")
def gateway(
    start_gateway: StartGateway, environment: dict[str, str], worker: Worker
) -> GatewayProcess:
    settings = {"tasks": ["apps.shop.*"], "timeout_s": patient(30)}
    return start_gateway("-A", "apps.shop", models={}, gateway=settings, environment=environment)


def test_the_gateway_answers_now_and_later(gateway: GatewayProcess) -> None:
    path = "/tasks/apps.shop.shout"
    assert gateway.post(path, {"item": "a"}).json()["result"] == "A"
    many = gateway.post(path, {"items": ["a", "b"]}).json()["results"]
    assert many == [{"ok": "A"}, {"ok": "B"}]
    later = gateway.post(path, {"item": "later", "wait_s": 0})
    assert later.status_code == 202
    answer = gateway.get(f"{later.headers['location']}?wait_s={patient(20)}").json()
    assert (answer["status"], answer["result"]) == ("SUCCESS", "LATER")


@pytest.fixture(scope="module")
def streaming(start_module_worker: StartWorker, environment: dict[str, str]) -> Worker:
    # The other worker's ordinary tasks are not for it.
    return start_module_worker("apps.streaming", "-c", "1", "-X", "celery", env=environment)


@pytest.mark.usefixtures("streaming")
def test_streams_of_functions_and_of_texts_in_slots(app: Celery) -> None:
    with Client(app) as client:
        spell = client.task("apps.streaming.spell")
        pieces = spell.stream("word", timeout_s=TIMEOUT_S)
        assert list(pieces) == list("word")
        assert pieces.result == "WORD"
        followed = client.follow(pieces.id, timeout_s=TIMEOUT_S)
        assert list(followed) == list("word")
        with contextlib.ExitStack() as stack:
            speller = client.task("speller")
            texts = [f"text number {number}" for number in range(12)]
            streams = [
                stack.enter_context(contextlib.closing(speller.stream(each, timeout_s=TIMEOUT_S)))
                for each in texts
            ]
            assert ["".join(each) for each in streams] == texts
            assert [each.result["text"] for each in streams] == texts

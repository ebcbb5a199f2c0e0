"""Celery's signed messages: the fast way for those that are trusted, a dead letter for others."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchery import InvalidItem
from batchery.transport.redis_schema import Keys
from conftest import StartWorker
from support.commands import run_code
from support.harness import Worker, open_redis, wait_for
from support.patience import TIMEOUT_S
from support.redis_places import make_certificate


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with key and certificate of a friend and of a stranger."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("friend", "stranger")}
    for folder in made.values():
        make_certificate(folder)
    return made


def environment(signer: Path, trusted: Path) -> dict[str, str]:
    return {"SIGNING_KEY": str(signer), "TRUSTED_CERTIFICATES": str(trusted / "cert*.pem")}


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, keys: dict[str, Path]) -> Worker:
    return start_module_worker("apps.signed", env=environment(keys["friend"], keys["friend"]))


def run_client(redis_url: str, signer: Path, code: str) -> Any:
    """Runs code in a process of its own, which trusts itself; what it prints is JSON."""
    return run_code(redis_url, code, **environment(signer, signer))


FRIENDLY = """
import asyncio, json
from celery import chain
from apps.signed import app, double, shout
from batchery import AsyncClient, Client

found = [shout.delay("a").get(timeout=60), double.delay(2).get(timeout=60)]
jobs = shout.submit_many([f"text {n}" for n in range(100)])
found.append(jobs.get(timeout=60)[-1])
with Client(app) as client:
    found.append(len(list(client.task("apps.signed.shout").map(["x", "y"]))))

async def ask():
    async with AsyncClient(app) as client:
        return await client.task("apps.signed.shout", queue=shout.name)("b")

found.append(asyncio.run(ask()))
found.append(shout.apply(("c",)).get())
[figures] = app.control.inspect(timeout=60, limit=1)._request("batchery").values()
found.append(figures["batches"]["tracer_jobs"])
found.append(chain(shout.s("d"), shout.s())().get(timeout=60))
print(json.dumps(found))
"""


def test_signed_jobs_take_the_fast_way(
    redis_url: str, worker: Worker, keys: dict[str, Path]
) -> None:
    found = run_client(redis_url, keys["friend"], FRIENDLY)
    assert found == ["A", 4, "TEXT 99", 2, "B", "C", {}, "D"]


@pytest.fixture
def store(redis_url: str) -> Iterator[Any]:
    with open_redis(redis_url) as made:
        made.delete(Keys().dead, Keys().dead_messages)
        yield made


def check_refused(client: Celery, store: Any, task_id: str, reason: str) -> None:
    """Makes sure that a job became a dead letter, and that its caller hears of it."""
    with pytest.raises(InvalidItem, match=reason):
        client.AsyncResult(task_id).get(timeout=TIMEOUT_S)
    wait_for(lambda: store.hlen(Keys().dead) == 1, "a dead letter")
    [value] = store.hvals(Keys().dead)
    assert json.loads(value.partition(b"\0")[2])["id"] == task_id


def test_nobody_without_a_key_controls_a_worker(client: Celery, worker: Worker) -> None:
    client.control.shutdown()
    assert client.control.ping(timeout=2) == []
    assert worker.process.poll() is None


@pytest.mark.parametrize("queue", ["apps.signed.shout", "celery"])
def test_a_job_that_is_not_signed_is_refused(
    client: Celery, store: Any, worker: Worker, queue: str
) -> None:
    job = client.send_task("apps.signed.shout", ["a"], queue=queue)
    check_refused(client, store, job.id, "(?i)ContentDisallowed")


def test_a_worker_that_logs_no_job_refuses_it_too(
    client: Celery, store: Any, start_worker: StartWorker, keys: dict[str, Path]
) -> None:
    """It reads plain jobs without Celery's own code."""
    environ = environment(keys["friend"], keys["friend"])
    start_worker("apps.signed", "-l", "ERROR", "-Q", "quiet", ready=False, env=environ)
    job = client.send_task("apps.signed.shout", ["a"], queue="quiet")
    check_refused(client, store, job.id, "(?i)ContentDisallowed")


def test_a_job_that_a_stranger_signed_is_refused(
    redis_url: str, client: Celery, store: Any, worker: Worker, keys: dict[str, Path]
) -> None:
    code = "import json; from apps.signed import shout; print(json.dumps(shout.delay('a').id))"
    task_id = run_client(redis_url, keys["stranger"], code)
    check_refused(client, store, task_id, "(?i)decod|certificate|security")


def test_a_signed_job_that_somebody_changed_is_refused(
    redis_url: str, client: Celery, store: Any, worker: Worker, keys: dict[str, Path]
) -> None:
    code = (
        "import json; from apps.signed import shout;"
        " print(json.dumps(shout.apply_async(('amount: 1',), queue='aside').id))"
    )
    task_id = run_client(redis_url, keys["friend"], code)
    message = json.loads(store.rpop("aside"))
    body = base64.b64decode(base64.b64decode(message["body"]))
    changed = base64.b64encode(body.replace(b"amount: 1", b"amount: 9"))
    message["body"] = base64.b64encode(changed).decode()
    store.lpush("apps.signed.shout", json.dumps(message))
    check_refused(client, store, task_id, "(?i)decod|signature|security")

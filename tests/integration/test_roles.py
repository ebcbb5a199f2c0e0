"""Each role of `batchery acl` does its work as its own user over TLS, and nothing else."""

import hashlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, RedisError

from batchery.cli.acl import ROLES
from batchery.transport.redis_schema import Keys
from batchery_worker.devstack.redis_server import find_redis_server
from benchmarks.redis_cluster import find_lasting_port
from support.commands import run, run_code
from support.gateway import GatewayProcess
from support.harness import PYTHONPATH, Worker, kill_all, open_redis, wait_for
from support.metrics_port import Exporter
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S, patient
from support.redis_places import make_certificate

APP = "apps.roles"

#: What may be refused: what a server tells of itself, of which a role can do without, and a look
#: for queues, where no role can send to any but those that it knows.
TOLERATED = {"client|setinfo", "client", "scan"}


class GuardedRedis(NamedTuple):
    """A server, and the passwords of its users."""

    server: OwnRedis
    passwords: dict[str, str]

    def url(self, role: str) -> str:
        """The URL of a role."""
        name = f"batchery-{role}"
        return self.server.url.replace("://", f"://{name}:{self.passwords[name]}@")

    @contextmanager
    def nothing_refused(self) -> Iterator[None]:
        """Makes sure that Redis refuses nothing in the block."""
        with open_redis(self.server.url) as admin:
            admin.acl_log_reset()
            yield
            log = admin.acl_log(128)
        refused = [(each["username"], each["object"], each["context"]) for each in log]
        assert [each for each in refused if each[1] not in TOLERATED] == []


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedRedis]:
    """A Redis behind TLS that has the users of `batchery acl`; its `default` may do anything."""
    binary, folder = find_redis_server(), tmp_path_factory.mktemp("guarded")
    probe = [str(binary), "--port", "0", "--tls-port", "1"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    # One that has TLS stops because it has no certificate.
    if "tls-cert-file" not in done.stdout or "v=6." in version.stdout:
        pytest.skip(f"{binary} is no Redis 7 with TLS")
    # The server need not be there yet.
    status, lines, error = run("redis://127.0.0.1:1/0", "batchery", "acl", "-A", APP)
    assert status == 0, error
    passwords = {f"batchery-{role}": secrets.token_urlsafe() for role in ROLES}
    for name, password in passwords.items():
        lines = lines.replace(f"SHA256-OF-{name}", hashlib.sha256(password.encode()).hexdigest())
    users = folder / "users.acl"
    users.write_text(f"user default on nopass ~* &* +@all\n{lines}")
    certificate = make_certificate(folder)
    port = find_lasting_port()
    options = {"port": "0", "tls_port": str(port), "tls_auth_clients": "yes", "appendonly": "no"}
    options |= {"aclfile": str(users), "tls_ca_cert_file": str(certificate.authority)}
    options |= {"tls_cert_file": str(certificate.authority), "tls_key_file": str(certificate.key)}
    server = OwnRedis(folder / "redis", binary, **options)
    server.url = (
        f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=required"
        f"&ssl_ca_certs={certificate.authority}"
        f"&ssl_certfile={certificate.authority}&ssl_keyfile={certificate.key}"
    )
    with server:
        yield GuardedRedis(server, passwords)


@pytest.fixture(scope="module")
def admin(guarded: GuardedRedis) -> Iterator[Any]:
    """A client that may do anything."""
    with open_redis(guarded.server.url) as made:
        yield made


@pytest.fixture(scope="module")
def worker(guarded: GuardedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with all that Celery's has by default: mingle, gossip, events."""
    folder = tmp_path_factory.mktemp("worker")
    arguments = ("-Q", f"celery,loud,{APP}.remember,{APP}.spell", "-P", "threads", "-c", "4", "-E")
    made = Worker(folder, guarded.url("worker"), APP, *arguments, is_alone=False)
    try:
        yield made.wait_ready()
    finally:
        kill_all(made.process)
        print(made.log)


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
found["stall"] = explain_stall(app, "apps.roles.shout", {"queue": "loud"})[:25]
shout.apply_async(("e",), countdown=60).revoke()
found["ping"] = len(app.control.ping(timeout=60, limit=1))
found["inspect"] = len(app.control.inspect(timeout=60, limit=1).active_queues())
print(json.dumps(found))
"""


SHOUT = """
import json
from apps.roles import shout

job = shout.delay("a")
job.get(timeout=60)
print(json.dumps(job.id))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["producer", "worker", "operator"])
def test_jobs_are_sent_and_their_results_read_in_every_way(
    guarded: GuardedRedis, worker: Worker, role: str
) -> None:
    """Tasks may do so, too, with the rights of their worker."""
    with guarded.nothing_refused():
        found = run_code(guarded.url(role), PRODUCES)
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
found.append(len(app.control.inspect(timeout=60, limit=1).ping()))
print(json.dumps(found))
"""


def test_a_plain_celery_client_is_a_producer(guarded: GuardedRedis, worker: Worker) -> None:
    with guarded.nothing_refused():
        assert run_code(guarded.url("producer"), STOCK) == ["A", "SUCCESS", 1]


def test_a_worker_gives_back_what_a_dead_one_held_and_ends_in_order(
    guarded: GuardedRedis, admin: Any, worker: Worker, tmp_path: Path
) -> None:
    with guarded.nothing_refused():
        other = Worker(tmp_path, guarded.url("worker"), APP, "-Q", "celery", "-P", "solo")
        other.wait_ready().kill()
        wait_for(lambda: admin.zcard(Keys().workers) == 1, "the dead one is recovered", TIMEOUT_S)
        third = Worker(tmp_path, guarded.url("worker"), APP, "-Q", "celery", is_alone=False)
        assert third.wait_ready().stop() == 0


def test_an_operator_looks_at_workers_queues_and_jobs(
    guarded: GuardedRedis, worker: Worker
) -> None:
    url = guarded.url("operator")
    job = "from apps.roles import shout; job = shout.delay('a'); job.get(timeout=60)"
    [task_id] = run_code(
        guarded.url("producer"), f"import json; {job}; print(json.dumps([job.id]))"
    )
    with guarded.nothing_refused():
        status, out, error = run(url, "batchery", "stats", "-A", APP, "--json")
        assert status == 0, error
        assert json.loads(out)["queues"].keys() >= {"celery", "loud"}
        status, out, error = run(url, "batchery", "explain", task_id, "-A", APP)
        assert status == 0, out + error
        _, out, error = run(url, "batchery", "doctor", "-A", APP, "--json")
        assert not [why for why in json.loads(out)["unchecked"].values() if "refuses" in why], error
        with closing(Exporter(url, app=APP)) as exporter:
            wait_for(lambda: exporter.says("/readyz")[0] == 200, "the exporter is ready")
            assert exporter.samples()[("batchery_queue_waiting_jobs", "loud")] == 0


def test_an_operator_looks_after_dead_letters_and_queues(
    guarded: GuardedRedis, admin: Any, worker: Worker
) -> None:
    keys, url = Keys(), guarded.url("operator")
    admin.lpush("loud", "no message")
    wait_for(lambda: admin.hlen(keys.dead), "a dead letter")
    with guarded.nothing_refused():
        for command in (["list"], ["requeue", "--all"], ["list"], ["purge", "--all", "--yes"]):
            if command[0] == "purge":
                wait_for(lambda: admin.hlen(keys.dead), "it is dead again")
            status, out, error = run(url, "batchery", "dead", *command, "-A", APP)
            assert status == 0, out + error
        status, out, error = run(url, "celery", "-A", APP, "purge", "-f", "-Q", "loud")
        assert status == 0, out + error
    assert admin.hlen(keys.dead) == admin.hlen(keys.dead_messages) == 0


def test_a_gateway_answers_with_the_worker_that_it_starts(
    guarded: GuardedRedis, worker: Worker, tmp_path: Path
) -> None:
    url = guarded.url("worker")
    with guarded.nothing_refused():
        gateway = GatewayProcess(
            tmp_path,
            url,
            *("-A", APP),
            models={},
            gateway={"tasks": [f"{APP}.*"], "worker": True},
            environment={"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url},
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
    port, url = find_lasting_port(), guarded.url("operator")
    command = ["-A", APP, "flower", f"--port={port}", "--address=127.0.0.1"]
    environment = {**os.environ, "FLOWER_UNAUTHENTICATED_API": "true", "PYTHONPATH": PYTHONPATH}
    with guarded.nothing_refused():
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "celery", *command],
            env={**environment, "CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url},
        )
        try:

            def workers() -> Any:
                try:
                    address = f"http://127.0.0.1:{port}/api/workers?refresh=1"
                    return httpx2.get(address, timeout=patient(20)).json()
                except (httpx2.HTTPError, ValueError):
                    return {}

            wait_for(lambda: worker.name in workers(), "Flower knows the worker", TIMEOUT_S)
        finally:
            kill_all(process)


#: What nobody but an administrator may: to lose all, to read other apps' keys, to list ids of jobs.
FORBIDDEN = [
    *("flushall", "flushdb", "config set save x", "keys *", "acl list", "monitor", "scan 0"),
    *("shutdown nosave", "client kill id 1", "script flush", "replicaof no one", "randomkey"),
    *("get another-app", "hgetall another-app", "rename celery away", "object encoding loud"),
    *("subscribe __keyevent@0__:set", "psubscribe __keyspace@0__:*", "pubsub channels"),
]

#: What a role may not besides.
BEYOND = {
    "producer": [
        *(
            "rpop loud",
            "lrange loud 0 -1",
            "lindex loud 0",
            "set celery-task-meta-x {}",
            "del loud",
        ),
        *("hgetall batchery:lease:x", "hset batchery:lease:x 1 x", "zadd batchery:workers 1 me"),
        *("hgetall batchery:dead", "hgetall batchery:dead-messages", "hdel batchery:dead 1"),
        # The first would tell the ids of all jobs, the others would lose what waits.
        *("client tracking on", "pexpire loud 1", "expire loud 1"),
    ],
    "worker": ["hgetall batchery:dead", "hget batchery:dead-messages 1"],
    "operator": ["set celery-task-meta-x {}", "client tracking on"],
}


@pytest.mark.parametrize("role", BEYOND)
def test_a_command_outside_of_a_role_is_refused(
    guarded: GuardedRedis, admin: Any, role: str
) -> None:
    admin.hset(Keys().dead, "1", "secret")
    with Redis.from_url(guarded.url(role)) as client:
        run_command: Any = client.execute_command
        for command in [*FORBIDDEN, *BEYOND[role]]:
            with pytest.raises(NoPermissionError):
                run_command(*command.split())
        # Within a script, it is refused as well.
        digest = client.script_load("return redis.call('GET', 'another-app')")
        with pytest.raises(RedisError, match=r"(?i)permission|ACL|can't access"):
            client.evalsha(digest, 0)
    # It is no dead letter, and others list them.
    admin.hdel(Keys().dead, "1")

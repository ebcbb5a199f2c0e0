"""`batchery doctor` on real Redis servers and workers, well and badly configured."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from apps import shop
from batchery_worker.devstack.redis_server import EmbeddedRedis
from batchery_worker.devstack.stack import Stack
from conftest import StartWorker
from support.commands import run, start
from support.harness import PYTHONPATH, TESTS, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

DEPLOY = TESTS.parent / "deploy"

#: How long a run may take in which Redis hangs, in seconds.
HANGING_S = patient(30.0)

StartRedis = Callable[..., OwnRedis]


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[StartRedis]:
    """Starts servers with options, which end with the test."""
    with ExitStack() as stack:

        def start_one(**options: str) -> OwnRedis:
            number = len(list(tmp_path.glob("redis-*")))
            return stack.enter_context(OwnRedis(tmp_path / f"redis-{number}", None, **options))

        yield start_one


def diagnose(url: str, *options: str, cwd: Path | None = None) -> dict[str, Any]:
    """What the command reports; its exit code is that of the report."""
    code, out, err = run(url, "batchery", "doctor", "--json", *options, cwd=cwd)
    assert out, err
    report: dict[str, Any] = json.loads(out)
    assert code == report["exit_code"]
    report["found"] = {each["check"]: each["found"] for each in report["findings"]}
    return report


def test_bad_settings_of_redis_are_found(start_redis: StartRedis, tmp_path: Path) -> None:
    server = start_redis(
        appendonly="no", maxmemory_policy="allkeys-lru", timeout="30", maxmemory="64mb"
    )
    with Redis.from_url(server.url) as client:
        run_slow_script(client)
    report = diagnose(server.url, "-A", "apps.shop", cwd=tmp_path)
    assert report["exit_code"] == 2
    assert {
        *("redis-no-persistence", "redis-eviction", "redis-timeout", "redis-slow-commands"),
        "worker-none",
    } <= set(report["found"])
    assert "EVAL" in report["found"]["redis-slow-commands"]
    assert report["unchecked"] == {}


def run_slow_script(client: Any) -> None:
    """Runs a script that takes over 0.15 s, on any machine."""
    loops = 5_000_000
    while all(each["duration"] < 150_000 for each in client.slowlog_get(128)):
        client.eval(f"for i = 1, {loops} do end", 0)
        loops *= 2


def test_full_redis_with_a_backlog_and_a_replica_is_found(
    start_redis: StartRedis, tmp_path: Path
) -> None:
    primary = start_redis(maxmemory="24mb")
    replica = start_redis()
    with Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", primary.port)
    with Redis.from_url(primary.url) as client, client.pipeline() as pipe:
        wait_for(lambda: client.info("replication").get("slave0"), "the replica")
        for _ in range(20):
            pipe.lpush("celery", *["x" * 1000] * 1000)
        pipe.execute()
        report = diagnose(primary.url, "-A", "apps.shop", cwd=tmp_path)
    assert {"redis-memory", "redis-backlog", "redis-lost-writes", "queue-unserved"} <= set(
        report["found"]
    )
    assert "20,000 jobs wait" in report["found"]["redis-backlog"]
    report = diagnose(replica.url, "-A", "apps.shop", cwd=tmp_path)
    assert "127.0.0.1" in report["found"]["redis-replica"]


@pytest.mark.parametrize("way", ["renamed", "forbidden"])
def test_managed_redis_without_config_leaves_checks_unmade(
    start_redis: StartRedis, tmp_path: Path, way: str
) -> None:
    renamed = tmp_path / "renamed.conf"
    renamed.write_text('rename-command CONFIG ""\n' if way == "renamed" else "")
    server = start_redis(include=str(renamed))
    url = server.url
    if way == "forbidden":
        with Redis.from_url(url) as client:
            client.acl_setuser(
                "app",
                enabled=True,
                passwords=["+pw"],
                categories=["+@all", "-@admin"],
                keys=["*"],
                channels=["*"],
            )
        url = url.replace("redis://", "redis://app:pw@")
    report = diagnose(url, "-A", "apps.shop", cwd=tmp_path)
    assert report["unchecked"]["redis-timeout"].startswith("Redis refuses it: ")
    # The file is appended to, which INFO says.
    assert "redis-no-persistence" not in report["unchecked"]
    assert "redis-eviction" not in {*report["unchecked"], *report["found"]}
    assert ("redis-slow-commands" in report["unchecked"]) is (way == "forbidden")


def test_redis_that_hangs_is_an_error_within_seconds(
    start_redis: StartRedis, tmp_path: Path
) -> None:
    server = start_redis()
    with server.hanging():
        began_s = time.monotonic()
        report = diagnose(server.url, "-A", "apps.shop", cwd=tmp_path)
        assert time.monotonic() - began_s < HANGING_S
    assert report["exit_code"] == 2
    assert report["found"]["redis-away"].startswith(f"no Redis at {server.url}")
    assert {"redis-eviction", "queue-unserved", "worker-none"} <= set(report["unchecked"])
    # What needs no Redis is checked all the same.
    assert "connection-retries" in report["found"]


def test_redis_that_begins_to_hang_meanwhile_ends_it_within_seconds(
    start_redis: StartRedis, tmp_path: Path
) -> None:
    server = start_redis()
    command = ("batchery", "doctor", "--json", "-A", "apps.shop", "--timeout", "3")
    with start(server.url, *command, cwd=tmp_path) as process, Redis.from_url(server.url) as client:
        wait_for(lambda: len(client.client_list()) > 1, "it has connected")
        with server.hanging():
            out, err = process.communicate(timeout=patient(60))
    assert out, err
    assert json.loads(out)["unchecked"]


def test_bad_settings_of_an_app_are_found(start_redis: StartRedis, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        """
from celery import Celery
from celery.app import trace
from batchery import BatchTask, install

app = Celery("bad")
app.conf.update(
    accept_content=["pickle"],
    broker_transport_options={"leases": False, "visibility_timeout": 10},
    result_expires=1,
    task_always_eager=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=0,
)
install(app, gateway={"host": "0.0.0.0"}, target_latency_ms=5.0)
build_tracer = trace.build_tracer
def wrap(*arguments, **options):
    return build_tracer(*arguments, **options)
trace.build_tracer = wrap

@app.task(base=BatchTask, acks_late=False, ignore_result=True)
def shout(texts):
    return texts
"""
    )
    settings = '[models.gone]\nkind = "embedding"\nmodel = "./gone"\n'
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    settings += f'[models.pickled]\nkind = "embedding"\nmodel = "{folder}"\n'
    settings += '[models.open]\nkind = "embedding"\nmodel = "org/model"\n'
    (tmp_path / "batchery.toml").write_text(settings)
    report = diagnose(start_redis().url, "-A", "bad:app", cwd=tmp_path)
    assert {
        *("visibility-timeout", "acks-early", "prefetch-unlimited", "requeue-forever"),
        *("serializer-refused", "pickle-accepted", "result-expires"),
        *("results-ignored", "always-eager", "connection-retries", "tracer-wrapped"),
        *("model-missing", "model-weights", "model-unpinned", "gateway-keys"),
    } <= set(report["found"])
    assert report["found"]["tracer-wrapped"] == "Celery's build_tracer is that of bad"


def test_settings_that_cannot_be_read_are_an_error(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "batchery.toml").write_text("max_batch_sise = 8\n")
    report = diagnose(redis_url, cwd=tmp_path)
    assert report["exit_code"] == 2
    assert "the nearest is max_batch_size" in report["found"]["settings-invalid"]


def test_workers_without_install_and_stock_ones_are_found(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    first = start_worker("apps.uninstalled")
    report = wait_for_found(redis_url, "apps.uninstalled", "worker-not-installed", tmp_path)
    assert first.name in report["found"]["worker-not-installed"]
    assert "app-not-installed" in report["found"]
    report = wait_for_found(redis_url, "apps.shop", "worker-stock", tmp_path)
    assert first.name in report["found"]["worker-stock"]


def wait_for_found(url: str, app: str, check: str, cwd: Path) -> dict[str, Any]:
    """The first report with a check; a worker that is ready may not answer yet."""

    def look() -> dict[str, Any] | None:
        report = diagnose(url, "-A", app, cwd=cwd)
        return report if check in report["found"] else None

    report = wait_for(look, f"{check} is found", patient(60))
    assert report is not None
    return report


def test_unknown_version_of_a_worker_is_found(
    start_worker: StartWorker, redis_url: str, store: Any, tmp_path: Path
) -> None:
    worker = start_worker("apps.shop")
    report = wait_for_found(redis_url, "apps.shop", "connection-retries", tmp_path)
    assert "worker-versions" not in report["found"]
    # As an older worker registers itself.
    worker.stop()
    store.zadd("batchery:workers", {"old": store.time()[0] * 1000})
    about = '{"name": "old@here", "queues": ["celery"], "expiry_s": 600}'
    store.hset("batchery:worker-info", "old", about)
    report = diagnose(redis_url, "-A", "apps.shop", cwd=tmp_path)
    assert "old@here has unknown" in report["found"]["worker-versions"]


def test_workers_that_were_killed_count_no_more(
    start_worker: StartWorker, redis_url: str, store: Any, tmp_path: Path
) -> None:
    worker = start_worker("apps.shop")
    assert "worker-none" not in diagnose(redis_url, "-A", "apps.shop", cwd=tmp_path)["found"]
    worker.kill()
    assert store.zcard("batchery:workers") == 1
    store.lpush("celery", "a message")
    report = wait_for_found(redis_url, "apps.shop", "worker-none", tmp_path)
    assert "1 jobs wait" in report["found"]["queue-unserved"]


def test_misspelt_queue_is_found(start_redis: StartRedis, tmp_path: Path) -> None:
    url = start_redis().url
    with Celery(broker=url, set_as_current=False) as client:
        client.send_task(shop.shout.name, ["a"], queue="embde")
    report = diagnose(url, "-A", "apps.shop", cwd=tmp_path)
    assert "1 jobs wait in queue 'embde'" in report["found"]["queue-unserved"]
    _, out, _ = run(url, "batchery", "stats", "--once", "-A", "apps.shop", cwd=tmp_path)
    assert "embde" in out


@pytest.mark.parametrize("kind", ["deploy", "up"])
def test_recommended_set_up_is_silent(
    kind: str, start_worker: StartWorker, tmp_path: Path, model_toml: str, minilm_path: Path
) -> None:
    """The Redis of deploy/ and that of `batchery up`, each with a worker of `batchery.app`."""
    with ExitStack() as stack:
        if kind == "up":
            url = stack.enter_context(EmbeddedRedis()).url
        else:
            url = stack.enter_context(
                OwnRedis(tmp_path / "redis", None, **read_deploy_options())
            ).url
        (tmp_path / "batchery.toml").write_text(model_toml)
        worker = start_worker("batchery.app", cwd=tmp_path, env=urls(url))

        def look() -> bool:
            code, out, err = run(url, "batchery", "doctor", "--redis", url, cwd=tmp_path)
            assert "error" not in out, out + err
            return code == 0

        wait_for(look, "the doctor finds nothing", patient(60))
        report = diagnose(url, "--redis", url, cwd=tmp_path)
        assert report["found"] == {}
        assert set(report["unchecked"]) <= {"driver-old"}
        assert worker.stop() == 0


def test_models_of_the_deployment_are_pinned(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "batchery.toml").write_text((DEPLOY / "batchery.toml").read_text())
    report = diagnose(redis_url, "--redis", redis_url, cwd=tmp_path)
    assert not {"model-unpinned", "model-missing", "gateway-keys"} & set(report["found"])


def urls(url: str) -> dict[str, str]:
    names = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL")
    return dict.fromkeys(names, url)


def read_deploy_options() -> dict[str, str]:
    """What deploy/redis.conf says, but for where it listens."""
    lines = (DEPLOY / "redis.conf").read_text(encoding="utf-8").splitlines()
    options = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    del options["bind"]
    return {name.replace("-", "_"): value for name, value in options.items()}


def test_open_flower_is_found_and_one_with_a_login_is_not(redis_url: str, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": PYTHONPATH, "PYTHONWARNINGS": "ignore"}
    with Stack("apps.shop", redis_url=redis_url, flower_port=0, environment=environment) as stack:
        report = diagnose(redis_url, "-A", "apps.shop", "--flower", str(stack.flower_url))
        assert report["found"]["flower-open"] == f"{stack.flower_url} asks for no password"
    environment["FLOWER_BASIC_AUTH"] = "user:secret"
    with Stack("apps.shop", redis_url=redis_url, flower_port=0, environment=environment) as stack:
        report = diagnose(redis_url, "-A", "apps.shop", "--flower", str(stack.flower_url))
        assert "flower-open" not in {*report["found"], *report["unchecked"]}


def test_table_is_readable_without_a_terminal(start_redis: StartRedis, tmp_path: Path) -> None:
    url = start_redis(maxmemory_policy="allkeys-lru").url
    code, out, _ = run(url, "batchery", "doctor", "-A", "apps.shop", cwd=tmp_path)
    assert code == 2
    assert "redis-cli CONFIG SET maxmemory-policy noeviction && redis-cli CONFIG REWRITE\n" in out
    assert " \n" not in out
    assert os.linesep.join(out.splitlines()[-1:]).endswith("could not be made")


def test_app_that_cannot_be_imported_is_one_line_and_exit_code_2(redis_url: str) -> None:
    code, out, err = run(redis_url, "batchery", "doctor", "-A", "no_such_app")
    assert (code, out) == (2, "")
    assert err.startswith("batchery: error: app 'no_such_app' cannot be imported")

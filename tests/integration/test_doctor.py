"""`batchery doctor` on real Redis servers and workers, well and badly configured."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from celery import Celery
from redis import Redis

from apps import shop, uninstalled
from batchery_worker.devstack.redis_server import EmbeddedRedis
from conftest import StartWorker
from support.commands import run
from support.harness import TESTS, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

DEPLOY = TESTS.parent / "deploy"


class StartRedis(Protocol):
    """Starts servers with options, which end with the test."""

    def __call__(self, **options: str) -> OwnRedis:
        """One more."""


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[StartRedis]:
    with ExitStack() as stack:

        def start_one(**options: str) -> OwnRedis:
            number = len(list(tmp_path.glob("redis-*")))
            return stack.enter_context(OwnRedis(tmp_path / f"redis-{number}", None, **options))

        yield start_one


def diagnose(url: str, *options: str, cwd: Path) -> dict[str, Any]:
    """What the command reports; its exit code is that of the report."""
    code, out, err = run(url, "batchery", "doctor", "--json", *options, cwd=cwd)
    assert out, err
    report: dict[str, Any] = json.loads(out)
    assert code == report["exit_code"]
    report["found"] = {each["check"]: each["found"] for each in report["findings"]}
    return report


def test_bad_redis_without_a_worker_and_an_unserved_queue_are_found(
    start_redis: StartRedis, tmp_path: Path
) -> None:
    settings = {"appendonly": "no", "maxmemory_policy": "allkeys-lru", "maxmemory": "40mb"}
    url = start_redis(**settings).url
    with Redis.from_url(url) as client:
        for number in range(32):
            client.set(f"large {number}", "x" * 2**20)
    # Last, as this Redis throws away what was used least recently.
    with Celery(broker=url, set_as_current=False) as caller:
        caller.send_task(shop.shout.name, ["a"], queue=shop.shout.name)
    report = diagnose(url, "-A", "apps.shop", cwd=tmp_path)
    assert report["exit_code"] == 2
    assert {
        *("redis-no-persistence", "redis-eviction", "redis-memory", "worker-none"),
        "queue-unserved",
    } == set(report["found"])
    assert f"1 job in queue {shop.shout.name!r}" in report["found"]["queue-unserved"]
    assert report["unchecked"] == {}
    code, out, _ = run(url, "batchery", "doctor", "-A", "apps.shop", cwd=tmp_path)
    assert code == 2
    assert "redis-cli CONFIG SET maxmemory-policy noeviction && redis-cli CONFIG REWRITE\n" in out
    assert " \n" not in out
    assert out.endswith("could not be made\n")


def test_worker_without_install_runs_items_one_by_one_and_is_found(
    start_worker: StartWorker, redis_url: str, client: Celery, tmp_path: Path
) -> None:
    queues = ("-Q", f"celery,{uninstalled.shout.name}")
    worker = start_worker("apps.uninstalled", "-P", "solo", *queues)
    wait_for(lambda: "call batchery.install(app) where the app is made" in worker.log, "a word")
    jobs = [client.send_task(uninstalled.shout.name, [text]) for text in ("a", "b")]
    assert [job.get(timeout=patient(30)) for job in jobs] == ["A of 1", "B of 1"]
    report = wait_for_found(redis_url, "apps.uninstalled", "worker-stock", tmp_path)
    assert worker.name in report["found"]["worker-stock"]
    assert "app-not-installed" in report["found"]


def wait_for_found(url: str, app: str, check: str, cwd: Path) -> dict[str, Any]:
    """The first report with a check; a busy worker may answer late."""

    def look() -> dict[str, Any] | None:
        report = diagnose(url, "-A", app, cwd=cwd)
        return report if check in report["found"] else None

    report = wait_for(look, f"{check} is found", patient(60))
    assert report is not None
    return report


@pytest.mark.parametrize("kind", ["deploy", "up"])
def test_recommended_set_up_is_silent(
    kind: str, start_worker: StartWorker, tmp_path: Path, model_toml: str
) -> None:
    """The Redis of deploy/ and that of `batchery up`, each with a worker of `batchery.app`."""
    with ExitStack() as stack:
        if kind == "up":
            url = stack.enter_context(EmbeddedRedis()).url
        else:
            own = OwnRedis(tmp_path / "redis", None, **read_deploy_options())
            url = stack.enter_context(own).url
        (tmp_path / "batchery.toml").write_text(model_toml)
        names = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "BATCHERY_REDIS_URL")
        worker = start_worker("batchery.app", cwd=tmp_path, env=dict.fromkeys(names, url))
        worker.wait_known(url)
        report = diagnose(url, "--redis", url, cwd=tmp_path)
        assert (report["found"], report["unchecked"], report["exit_code"]) == ({}, {}, 0)
        assert worker.stop() == 0


def read_deploy_options() -> dict[str, str]:
    """What deploy/redis.conf says, but for where it listens."""
    lines = (DEPLOY / "redis.conf").read_text(encoding="utf-8").splitlines()
    options = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    del options["bind"]
    return {name.replace("-", "_"): value for name, value in options.items()}

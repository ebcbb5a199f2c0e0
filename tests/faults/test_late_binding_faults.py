"""Workers that are killed while one gives jobs to the other: each job ends with one result."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from apps.ledger import executions
from batchery.transport.redis_schema import Keys
from conftest import StartWorker
from support.harness import open_redis, queue_length, unsettled, wait_for
from support.held_jobs import JOBS, send_to_be_held
from support.own_redis import OwnRedis
from support.patience import patient

#: One process, and a queue of the tests.
OPTIONS = ("-c", "1", "-Q", "any")

KEYS = Keys()

TIMEOUT_S = patient(60.0)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this module's own: a test cuts connections, also those in the client's pools."""
    with OwnRedis(tmp_path_factory.mktemp("own") / "redis") as server:
        yield server.url


@pytest.fixture
def bare(redis_url: str) -> Iterator[Any]:
    with open_redis(redis_url) as client:
        yield client


def hold_all(start_worker: StartWorker, redis_url: str, directory: Path, **options: Any) -> Any:
    """Starts a worker that holds more jobs than it can begin; returns it, and their ids."""
    jobs = send_to_be_held(redis_url, directory, "any")
    worker = start_worker("apps.singles", *OPTIONS, **options)
    wait_for(lambda: begun(directory) and unsettled(redis_url) == JOBS, "it holds all of them")
    return worker, jobs


def begun(directory: Path) -> list[str]:
    book = directory / "book"
    return executions(book) if book.exists() else []


def finish(redis_url: str, bare: Any, directory: Path, jobs: list[str]) -> None:
    """Opens the gate; every job has its own result, and none is left anywhere."""
    (directory / "gate").touch()
    keys = [f"celery-task-meta-{job}" for job in jobs]
    wait_for(lambda: bare.exists(*keys) == JOBS, "all are answered", TIMEOUT_S)
    found = [json.loads(each) for each in bare.mget(keys)]
    assert [each["result"] for each in found] == list(range(JOBS))
    assert {each["status"] for each in found} == {"SUCCESS"}
    wait_for(
        lambda: not unsettled(redis_url) and not queue_length(redis_url, "any"), "none is left"
    )


@pytest.mark.parametrize("killed", ["the one that gave", "the one that got"])
def test_every_job_has_one_result_if_a_worker_dies_after_jobs_changed_hands(
    start_worker: StartWorker, redis_url: str, bare: Any, tmp_path: Path, killed: str
) -> None:
    giver, jobs = hold_all(start_worker, redis_url, tmp_path)
    getter = start_worker("apps.singles", *OPTIONS)
    wait_for(lambda: giver.has_logged("jobs go back to their queue", 1), "jobs change hands")
    (giver if killed == "the one that gave" else getter).kill()
    wait_for(lambda: bare.zcard(KEYS.workers) == 1, "its death is seen", TIMEOUT_S)
    finish(redis_url, bare, tmp_path, jobs)
    # What ran on the dead worker ran twice, and nothing more often.
    assert max(Counter(begun(tmp_path)).values()) <= 2


def test_a_connection_that_breaks_while_jobs_change_hands_repeats_nothing(
    start_worker: StartWorker, redis_url: str, bare: Any, tmp_path: Path
) -> None:
    # Nobody dies here: the other one is not to take over what is leased.
    patiently: Any = {"env": {"LEASE_EXPIRY_S": "60"}}
    _, jobs = hold_all(start_worker, redis_url, tmp_path, **patiently)
    # Nothing more begins there before the gate opens.
    first = len(begun(tmp_path))
    start_worker("apps.singles", *OPTIONS, ready=False, **patiently)
    wait_for(lambda: bare.hlen(KEYS.worker_info) == 2, "the other one is there", TIMEOUT_S)
    for kind in ("normal", "pubsub"):
        bare.client_kill_filter(_type=kind, skipme=True)
    wait_for(lambda: len(begun(tmp_path)) > first, "the other one has begun", TIMEOUT_S)
    finish(redis_url, bare, tmp_path, jobs)
    assert max(Counter(begun(tmp_path)).values()) == 1

"""Equal items are computed once, on a real worker; each job has its own result all the same."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import TaskRevokedError

from batchery import DeviceDied
from conftest import StartWorker
from support.cached_jobs import answers, computed, send
from support.harness import Worker, unsettled, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.cached")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a task notes what it computes: a keyword, so that no test has to do with another."""
    path = tmp_path / "computed"
    path.touch()
    return path


def figures(worker: Worker, client: Celery, task: str) -> dict[str, Any]:
    """What the worker says of a task's cache; empty before it has said anything."""
    batches = worker.inspect(client, "stats")["pool"]["batches"]
    found: dict[str, Any] = batches["caches"].get(f"apps.cached.{task}", {})
    return found


def test_of_a_thousand_jobs_with_a_hundred_different_items_a_hundred_are_computed(
    worker: Worker, client: Celery, log: Path, redis_url: str
) -> None:
    texts = [f"text-{number % 100}" for number in range(1000)]
    before = figures(worker, client, "shout").get("items", 0)
    assert answers(send(client, "shout", *texts, path=str(log))) == [each.upper() for each in texts]
    assert computed(log) == Counter(texts[:100])
    # Those that come later find what the others have left.
    assert answers(send(client, "shout", *texts[:10], path=str(log))) == [
        each.upper() for each in texts[:10]
    ]
    assert computed(log) == Counter(texts[:100])
    wait_for(
        lambda: figures(worker, client, "shout").get("items", 0) >= before + 1010, "all are counted"
    )
    found = figures(worker, client, "shout")
    assert found["computed"] + found["hits"] + found["deduplicated"] == found["items"]
    assert found["hits"] >= 10
    assert found["hit_rate"] >= 0.8
    assert found["errors"] == 0
    wait_for(lambda: unsettled(redis_url) == 0, "all are acknowledged")


def test_a_plain_client_and_multi_item_jobs_share_with_all_others(
    worker: Worker, client: Celery, log: Path
) -> None:
    keywords = {"path": str(log)}
    header = {"batchery": {"v": 1, "n": 3}}
    jobs = [
        client.send_task("apps.cached.shout", ["a"], keywords),
        client.send_task("apps.cached.shout", [["a", "b", "a"]], keywords, headers=header),
        client.send_task("apps.cached.shout", ["b"], keywords),
        client.send_task("apps.cached.shout", [["b", "c", "a"]], keywords, headers=header),
    ]
    ok = {each: {"ok": each.upper()} for each in "abc"}
    assert answers(jobs) == [
        "A",
        [ok["a"], ok["b"], ok["a"]],
        "B",
        [ok["b"], ok["c"], ok["a"]],
    ]
    assert computed(log) == {"a": 1, "b": 1, "c": 1}


def test_a_stored_result_goes_through_chains_as_a_computed_one(
    worker: Worker, client: Celery, log: Path
) -> None:
    step = client.signature("apps.cached.shout", kwargs={"path": str(log)})
    for _ in range(2):
        found = chain(step.clone(args=("Up",)), step, step).apply_async()
        assert found.get(timeout=TIMEOUT_S) == "UP"
    assert computed(log) == {"Up": 1, "UP": 1}


def test_cached_result_is_stored_byte_for_byte(
    worker: Worker, client: Celery, log: Path, store: Any
) -> None:
    stored = []
    for _ in range(2):
        (job,) = send(client, "shout", "ä", path=str(log))
        assert job.get(timeout=TIMEOUT_S) == "Ä"
        stored.append(json.loads(store.get(f"celery-task-meta-{job.id}")))
    first, second = ({**each, "task_id": 0, "date_done": 0, "batch": 0} for each in stored)
    assert first == second
    assert set(stored[0]["batch"]) == set(stored[1]["batch"])


def gated(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "gate", tmp_path / "next-gate"


def test_duplicate_gets_its_result_when_the_computed_job_is_revoked(
    worker: Worker, client: Celery, log: Path, tmp_path: Path
) -> None:
    gate, next_gate = gated(tmp_path)
    (blocker,) = send(client, "shout", "blocker", path=str(log), gate=str(gate))
    wait_for(lambda: computed(log)["blocker"], "the device is busy")
    first, duplicate = send(client, "shout", "a", "a", path=str(log), gate=str(next_gate))
    gate.touch()
    wait_for(lambda: computed(log)["a"], "one of them runs")
    (late,) = send(client, "shout", "a", path=str(log), gate=str(next_gate))
    first.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        first.get(timeout=TIMEOUT_S)
    next_gate.touch()
    assert answers([blocker, duplicate, late]) == ["BLOCKER", "A", "A"]
    assert computed(log) == {"blocker": 1, "a": 1}


def test_revoked_duplicate_changes_nothing(
    worker: Worker, client: Celery, log: Path, tmp_path: Path
) -> None:
    gate, _ = gated(tmp_path)
    (first,) = send(client, "shout", "a", path=str(log), gate=str(gate))
    wait_for(lambda: computed(log)["a"], "it runs")
    duplicate, other = send(client, "shout", "a", "a", path=str(log), gate=str(gate))
    duplicate.revoke()
    # Workers hear of revocations in the order in which they are sent, and answer in that order.
    worker.inspect(client, "ping")
    gate.touch()
    assert answers([first, other]) == ["A", "A"]
    with pytest.raises(TaskRevokedError):
        duplicate.get(timeout=TIMEOUT_S)
    assert computed(log) == {"a": 1}


def test_duplicates_of_a_job_whose_device_died_get_their_results(
    worker: Worker, client: Celery, log: Path, tmp_path: Path, redis_url: str
) -> None:
    gate, _ = gated(tmp_path)
    (first,) = send(client, "deadly", "a", path=str(log), gate=str(gate))
    wait_for(lambda: computed(log)["a"], "it runs")
    duplicates = send(client, "deadly", "a", "a", "b", path=str(log), gate=str(gate))
    worker.devices()[0].kill()
    wait_for(lambda: computed(log)["a"] > 1, "it runs again")
    gate.touch()
    assert answers([first, *duplicates]) == ["A", "A", "A", "B"]
    assert computed(log) == {"a": 2, "b": 1}
    wait_for(lambda: unsettled(redis_url) == 0, "all are acknowledged")


def test_each_of_two_equal_poison_jobs_fails_and_no_other(
    worker: Worker, client: Celery, log: Path
) -> None:
    jobs = send(client, "deadly", "die", "a", "die", "b", "a", path=str(log))
    for job in (jobs[0], jobs[2]):
        with pytest.raises(DeviceDied, match="running alone"):
            job.get(timeout=TIMEOUT_S)
    assert answers([jobs[1], *jobs[3:]]) == ["A", "B", "A"]

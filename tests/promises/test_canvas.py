"""What Celery's users know works on batch tasks: canvas, callbacks, revoke, expiry, countdown."""

import time
from pathlib import Path
from typing import Any

import pytest
from celery import chord, group
from celery.exceptions import TaskRevokedError

from apps import shop
from conftest import StartWorker
from support.harness import Worker, device_busy, unsettled, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(autouse=True, scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.shop", "-E")


def test_a_chain_of_batch_tasks() -> None:
    steps = shop.increment.s(1) | shop.increment.s() | shop.double.s() | shop.increment.s()
    assert steps.delay().get(timeout=TIMEOUT_S) == 7


def test_a_group_of_fifty() -> None:
    jobs = group(shop.increment.s(number) for number in range(50)).apply_async()
    assert jobs.get(timeout=TIMEOUT_S) == list(range(1, 51))


def test_a_chord_with_a_batch_task_as_header_and_as_body() -> None:
    header = [shop.increment.s(number) for number in range(20)]
    assert chord(header)(shop.total.s()).get(timeout=TIMEOUT_S) == sum(range(1, 21))


def test_a_member_of_a_chord_adds_another_one() -> None:
    header = [shop.grow.s(1), shop.increment.s(2)]
    assert chord(header)(shop.total.s()).get(timeout=TIMEOUT_S) == 1 + 3 + 2


def test_a_chord_with_a_failing_member_fails() -> None:
    header = [shop.nasty.s("a"), shop.nasty.s("raise"), shop.nasty.s("b")]
    with pytest.raises(Exception, match="a bad one"):
        chord(header)(shop.total.s()).get(timeout=TIMEOUT_S)


def test_a_chord_inside_a_chain() -> None:
    last = group(shop.increment.s(), shop.double.s()) | shop.total.s()
    steps: Any = shop.increment.s(1) | last
    assert steps.delay().get(timeout=TIMEOUT_S) == 7


def test_chords_and_groups_within_each_other() -> None:
    s, total = shop.increment.s, shop.total.s()
    inner = chord([s(1), s(2)], total)
    assert chord([inner, s(3), s(4) | s()])(total).get(timeout=TIMEOUT_S) == 5 + 4 + 6
    steps: Any = s(1) | group(s(), s()) | shop.total.s() | group(s(), s() | s()) | shop.total.s()
    assert steps.delay().get(timeout=TIMEOUT_S) == 7 + 8


def test_a_failure_within_a_nested_chord_fails_the_whole() -> None:
    inner = chord([shop.nasty.s("a"), shop.nasty.s("raise")], shop.total.s())
    with pytest.raises(Exception, match="a bad one"):
        chord([inner, shop.increment.s(1)])(shop.total.s()).get(timeout=TIMEOUT_S)


def test_a_job_that_a_function_sends_has_the_parent_that_it_is_given() -> None:
    jobs = [shop.beget.delay(number) for number in range(3)]
    children = [shop.app.AsyncResult(job.get(timeout=TIMEOUT_S)) for job in jobs]
    # Celery's client misses what is stored between its first look and its subscription.
    for child in children:
        wait_for(child.ready, "it has run", TIMEOUT_S)
    assert [child.get(timeout=TIMEOUT_S) for child in children] == [[job.id] * 2 for job in jobs]


def test_link_is_called_with_the_result_of_its_own_job(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    link = shop.remember.s(str(trace))
    jobs = [shop.increment.apply_async((number,), link=link) for number in range(5)]
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == [1, 2, 3, 4, 5]
    wait_for(lambda: trace.exists() and len(trace.read_text().split()) == 5, "five callbacks")
    assert sorted(trace.read_text().split()) == ["1", "2", "3", "4", "5"]


def test_link_error_is_called_for_the_job_that_failed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    errback = shop.remember_error.s(str(trace))
    jobs = [shop.nasty.apply_async((text,), link_error=errback) for text in ("a", "raise", "b")]
    wait_for(lambda: trace.exists() and trace.read_text().endswith("\n"), "the errback")
    assert trace.read_text().split()[0] == jobs[1].id
    assert jobs[2].get(timeout=TIMEOUT_S) == "B"


def test_a_job_that_is_revoked_while_it_waits_never_runs(worker: Worker, tmp_path: Path) -> None:
    with device_busy(worker, shop.app, shop.until.name, tmp_path / "gate"):
        revoked, mate = shop.shout.delay("never"), shop.shout.delay("mate")
        shop.app.control.revoke(revoked.id, reply=True, timeout=TIMEOUT_S, limit=1)
    assert mate.get(timeout=TIMEOUT_S) == "MATE"
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=TIMEOUT_S)


def test_a_job_that_is_terminated_while_it_runs_leaves_its_mates_alone(
    worker: Worker, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with device_busy(worker, shop.app, shop.until.name, tmp_path / "first"):
        jobs = [shop.until.delay(str(gate)) for _ in range(4)]
    ids = {job.id for job in jobs}
    wait_for(
        lambda: ids == {each["id"] for each in worker.inspect(shop.app, "active")},
        "the batch runs",
    )
    shop.app.control.revoke(jobs[1].id, terminate=True, reply=True, timeout=TIMEOUT_S, limit=1)
    gate.touch()
    with pytest.raises(TaskRevokedError):
        jobs[1].get(timeout=TIMEOUT_S)
    for number in (0, 2, 3):
        assert jobs[number].get(timeout=TIMEOUT_S) == str(gate)


def test_a_job_that_expires_while_it_waits_never_runs(worker: Worker, tmp_path: Path) -> None:
    with device_busy(worker, shop.app, shop.until.name, tmp_path / "gate"):
        expired = shop.shout.apply_async(("never",), expires=0.3)
        sent_s = time.monotonic()
        wait_for(lambda: time.monotonic() > sent_s + 0.4, "its time is over")
    with pytest.raises(TaskRevokedError):
        expired.get(timeout=TIMEOUT_S)


def test_a_countdown_is_kept() -> None:
    started_s = time.monotonic()
    job = shop.shout.apply_async(("later",), countdown=1)
    assert job.get(timeout=TIMEOUT_S) == "LATER"
    assert time.monotonic() - started_s >= 1


def test_ignore_result_stores_nothing(redis_url: str) -> None:
    job = shop.shout.apply_async(("quiet",), ignore_result=True)
    assert shop.shout.delay("loud").get(timeout=TIMEOUT_S) == "LOUD"
    wait_for(lambda: unsettled(redis_url) == 0, "everything acknowledged")
    backend: Any = shop.app.backend
    assert backend.get(backend.get_key_for_task(job.id)) is None

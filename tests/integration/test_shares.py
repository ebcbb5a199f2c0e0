"""Shares on a real worker: bulk waits in it, and whoever comes later is not behind it."""

import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import tally
from batchery import Client, DeadlineExceeded, InvalidItem
from conftest import StartWorker
from support.harness import wait_for
from support.patience import TIMEOUT_S

#: Items of a batch of `tally`.
BATCH = 32

#: More than the worker takes behind a batch that runs for long.
BULK = 16 * BATCH


def test_live_jobs_and_small_tenants_do_not_wait_behind_bulk(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    start_worker("apps.tally")
    path, gate = tmp_path / "computed", tmp_path / "go"

    def send(*texts: str, **options: Any) -> list[Any]:
        keywords = {"path": str(path)}
        return [tally.tally.apply_async((text,), keywords, **options) for text in texts]

    tally.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    jobs = send(str(gate), priority=9)
    wait_for(path.exists, "a batch runs")
    jobs += send(*(f"bulk {number}" for number in range(BULK)), priority=9)
    jobs += send("tenant", priority=9, tenant="small")
    jobs += send("live")
    gate.touch()
    assert len([job.get(timeout=TIMEOUT_S) for job in jobs]) == BULK + 3
    order = path.read_text().splitlines()
    assert len(order) == BULK + 3
    # Nothing was ahead of them but what the worker had taken, behind the batch that ran: it looks
    # whose jobs wait before it takes more.
    assert order.index("live") == 1
    assert order.index("tenant") <= 1 + 4 * BATCH


def test_each_batch_has_jobs_of_all_classes_by_their_shares(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    path = tmp_path / "computed"
    # Of long batches a device takes what comes next only near their end.
    keywords = {"path": str(path), "pause_s": 0.25}
    jobs = [
        client.send_task(name, [text], keywords, priority=priority, queue=name)
        for name in [tally.tally.name]
        for _ in range(4 * BATCH)
        for text, priority in (("high", 0), ("normal", 3), ("low", 9))
    ]
    start_worker("apps.tally")
    for job in jobs:
        job.get(timeout=TIMEOUT_S)
    order = path.read_text().splitlines()
    batches = [order[start : start + BATCH] for start in range(0, 7 * BATCH, BATCH)]
    # Half of it for half of the shares.
    assert all(abs(batch.count("high") - BATCH / 2) <= BATCH / 8 for batch in batches)


def test_late_job_is_shed_before_it_costs_anything(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    start_worker("apps.tally", env={"BATCHERY_SHED_LATE": "true"})
    path, gate = tmp_path / "computed", tmp_path / "go"
    with Celery("caller", broker=redis_url, backend=redis_url, set_as_current=False) as app:

        def send(text: str, **headers: float) -> Any:
            return app.send_task(tally.tally.name, [text], {"path": str(path)}, headers=headers)

        first = send(str(gate))
        wait_for(path.exists, "a batch runs")
        deadline_s = time.time() + 1
        late, in_time = send("late", batchery_deadline=deadline_s), send("in time")
        wait_for(lambda: time.time() > deadline_s, "the deadline is over")
        gate.touch()
        assert [job.get(timeout=TIMEOUT_S) for job in (first, in_time)] == [
            str(gate).upper(),
            "IN TIME",
        ]
        with pytest.raises(DeadlineExceeded):
            late.get(timeout=TIMEOUT_S)
    assert "late" not in path.read_text().splitlines()


def test_live_job_goes_between_two_calls_for_a_job_with_many_items(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    worker = start_worker("apps.tally")
    path, gate = tmp_path / "computed", tmp_path / "go"
    keywords = {"path": str(path)}
    items = [str(gate), *(f"bulk {number}" for number in range(3 * BATCH - 1))]
    with Celery("caller", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        bulk = app.send_task(
            tally.tally.name,
            [items],
            keywords,
            priority=9,
            headers={"batchery": {"v": 1, "n": len(items)}},
        )
        wait_for(path.exists, "its first part runs")
        behind = app.send_task(tally.tally.name, ["behind"], keywords, priority=9)
        live = app.send_task(tally.tally.name, ["live"], keywords)
        # The device has read it when it has been told of it: events say so of no other job.
        wait_for(lambda: live.id in str(worker.inspect(app, "active")), "it is on the device")
        gate.touch()
        assert live.get(timeout=TIMEOUT_S) == "LIVE"
        assert len(bulk.get(timeout=TIMEOUT_S)) == len(items)
        assert behind.get(timeout=TIMEOUT_S) == "BEHIND"
    order = path.read_text().splitlines()
    assert order.index("live") == BATCH
    assert order.index("behind") == 3 * BATCH + 1


def test_a_device_takes_messages_with_many_items_as_it_takes_items(
    start_worker: StartWorker, client: Celery, store: Any, tmp_path: Path
) -> None:
    start_worker("apps.tally")
    path, gate, name = tmp_path / "computed", tmp_path / "go", tally.tally.name

    def send(queue: str, *items: str) -> Any:
        headers = {"batchery": {"v": 1, "n": BATCH}}
        return client.send_task(name, [items], {"path": str(path)}, queue=queue, headers=headers)

    send(name, *["first"] * BATCH).get(timeout=TIMEOUT_S)
    jobs = [send("staged", str(gate), *["more"] * (BATCH - 1)) for _ in range(BATCH)]
    # All come at once.
    store.rename("staged", name)
    wait_for(lambda: str(gate) in path.read_text(), "a batch runs")
    assert store.llen(name) >= BATCH / 2
    gate.touch()
    for job in jobs:
        job.get(timeout=TIMEOUT_S)


def test_the_client_names_a_tenant_and_a_wrong_name_fails_at_once(redis_url: str) -> None:
    with Client(redis_url) as client:
        task = client.task("embed", tenant="acme", headers={"mine": 1})
        assert task._options["headers"] == {"mine": 1, "batchery_tenant": "acme"}
        with pytest.raises(InvalidItem, match="batchery_tenant is 7; expected a name"):
            client.task("embed", tenant=7)  # type: ignore[arg-type]


def test_jobs_of_plain_clients_in_a_queue_of_ordinary_tasks_keep_their_priority(
    start_worker: StartWorker, redis_url: str, tmp_path: Path, store: Any
) -> None:
    start_worker("apps.tally")
    path, gate = tmp_path / "computed", tmp_path / "go"
    with Celery("caller", broker=redis_url, backend=redis_url, set_as_current=False) as app:

        def send(text: str, priority: int) -> Any:
            options: Any = {"queue": "celery", "priority": priority}
            return app.send_task(tally.tally.name, [text], {"path": str(path)}, **options)

        jobs = [send(str(gate), 9)]
        wait_for(path.exists, "a batch runs")
        jobs += [send(f"bulk {number}", 9) for number in range(2 * BATCH)]
        jobs.append(send("live", 0))
        wait_for(
            lambda: sum(map(store.llen, store.keys("celery~batches*"))) == 2 * BATCH,
            "Celery's consumer has passed them on",
        )
        gate.touch()
        for job in jobs:
            job.get(timeout=TIMEOUT_S)
    assert path.read_text().splitlines().index("live") == 1

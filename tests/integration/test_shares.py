"""Shares on a real worker: bulk waits in it, and whoever comes later is not behind it."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import tally
from batchery import Client, InvalidItem
from conftest import StartWorker
from support.harness import wait_for

TIMEOUT_S = 60

#: Items of a batch of `tally`.
BATCH = 32

#: The worker takes them all: one batch is on the device, behind the one that runs, and the rest
#: waits.
BULK = 2 * BATCH


def test_live_jobs_and_small_tenants_do_not_wait_behind_bulk(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    worker = start_worker("apps.tally")
    path, gate = tmp_path / "computed", tmp_path / "go"

    def send(app: Celery, *texts: str, **options: Any) -> list[Any]:
        keywords = {"path": str(path)}
        return [app.send_task(tally.tally.name, [text], keywords, **options) for text in texts]

    with Celery("caller", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        jobs = send(app, str(gate), priority=9)
        wait_for(path.exists, "a batch runs")
        jobs += send(app, *(f"bulk {number}" for number in range(BULK)), priority=9)
        jobs += send(app, "live")
        jobs += send(app, "tenant", priority=9, headers={"batchery_tenant": "small"})
        waiting = BULK - BATCH + 2
        wait_for(lambda: worker.inspect(app, "stats")["pool"]["waiting"] == waiting, "all wait")
        gate.touch()
        assert len([job.get(timeout=TIMEOUT_S) for job in jobs]) == BULK + 3
    order = path.read_text().splitlines()
    assert len(order) == BULK + 3
    # Nothing was ahead of them but what was on the device, and the lane whose turn it was.
    assert order.index("live") <= 1 + BATCH + 2
    assert order.index("tenant") <= 1 + BATCH + 4


def test_the_client_names_a_tenant_and_a_wrong_name_fails_at_once(redis_url: str) -> None:
    with Client(redis_url) as client:
        task = client.task("embed", tenant="acme", headers={"mine": 1})
        assert task._options["headers"] == {"mine": 1, "batchery_tenant": "acme"}
        with pytest.raises(InvalidItem, match="batchery_tenant is 7; expected a name"):
            client.task("embed", tenant=7)  # type: ignore[arg-type]

"""A worker of a Django project: batches and hooks use its database, and leave nothing open."""

from pathlib import Path
from typing import Any

from celery import Celery

from conftest import StartWorker
from support.harness import wait_for

TIMEOUT_S = 30


def test_database_connections_are_closed_as_django_closes_them(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    env = {
        "DJANGO_SETTINGS_MODULE": "apps.django_settings",
        "DJANGO_DATABASE": str(tmp_path / "database.sqlite3"),
    }
    worker = start_worker("apps.django_shop", env=env)

    def ask(task: str, item: Any) -> Any:
        return client.send_task(f"apps.django_shop.{task}", (item,)).get(timeout=TIMEOUT_S)

    first, *later = [ask("read", number) for number in range(4)]
    (device,) = worker.devices()
    assert {each["pid"] for each in (first, *later)} == {device.pid}
    assert [each["default says"] for each in (first, *later)] == [1, 2, 3, 4]
    # In the device: as between two requests of a web server, `CONN_MAX_AGE` decides.
    assert not any(each["default"] for each in (first, *later))
    assert [each["kept"] for each in (first, *later)] == [False, True, True, True]

    # In the main process: Celery's own receivers, around each job.
    wait_for(lambda: len(ask("noted", "x")) == 4, "all hooks")
    rows = ask("noted", "x")
    assert {pid for _, pid, _ in rows} == {worker.pid}
    assert not any(found for _, _, found in rows)
    assert worker.stop() == 0, worker.log

"""A worker of a Django project: batches and hooks use its database, and leave nothing open."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery import Celery

from conftest import StartWorker, flush
from support.harness import START_S, TESTS, wait_for
from support.patience import patient

TIMEOUT_S = patient(30)


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


ON_COMMIT = """
import sys
from django.db import transaction
from apps.django_shop import app, noted

app.set_current()
app.conf.update(broker_url=sys.argv[1], result_backend=sys.argv[1])
with app.connection_for_write() as connection:
    count = lambda: connection.default_channel.queue_declare("celery").message_count
    with transaction.atomic():
        noted.delay_on_commit("a")
        noted.apply_async_on_commit(("b",))
        print(count())
    print(count())
    try:
        with transaction.atomic():
            noted.delay_on_commit("c")
            raise ValueError
    except ValueError:
        print(count())
"""


def test_a_job_is_sent_when_the_transaction_is_committed(redis_url: str, tmp_path: Path) -> None:
    flush(redis_url)
    done = subprocess.run(
        [sys.executable, "-c", ON_COMMIT, redis_url],
        env={
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "DJANGO_SETTINGS_MODULE": "apps.django_settings",
            "DJANGO_DATABASE": str(tmp_path / "database.sqlite3"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    assert done.stdout.split() == ["0", "2", "2"], done.stderr

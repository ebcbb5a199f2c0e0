"""A worker of a Django project: batches and hooks use its database, and leave nothing open."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from conftest import StartWorker, flush
from support.harness import PYTHONPATH, START_S, wait_for
from support.patience import TIMEOUT_S, patient


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

    # Hooks write there, too.
    wait_for(lambda: len(ask("noted", "x")) == 4, "all hooks")
    rows = ask("noted", "x")
    assert {pid for _, pid in rows} == {device.pid}
    assert worker.stop() == 0, worker.log


ON_COMMIT = """
import sys
from django.db import transaction
from apps.django_shop import app, noted

app.set_current()
app.conf.update(broker_url=sys.argv[1], result_backend=sys.argv[1])
with app.connection_for_write() as connection:
    count = lambda: connection.default_channel.queue_declare(noted.name).message_count
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
            "PYTHONPATH": PYTHONPATH,
            "DJANGO_SETTINGS_MODULE": "apps.django_settings",
            "DJANGO_DATABASE": str(tmp_path / "database.sqlite3"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    assert done.stdout.split() == ["0", "2", "2"], done.stderr


def run_books(command: list[str], environment: dict[str, str]) -> str:
    """Runs a command of Django for the project `apps.django_books`."""
    done = subprocess.run(
        [sys.executable, "-m", "django", *command],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


@pytest.mark.parametrize("database", ["in memory", "on disk"])
def test_a_django_test_with_a_worker_leaves_the_development_database_alone(
    tmp_path: Path, database: str
) -> None:
    development = tmp_path / "development.sqlite3"
    environment = {
        "DJANGO_SETTINGS_MODULE": "apps.django_books.settings",
        "DJANGO_DATABASE": str(development),
    }
    if database == "on disk":
        environment["DJANGO_TEST_DATABASE"] = str(tmp_path / "test.sqlite3")
    run_books(["migrate", "--run-syncdb"], environment)
    with closing(sqlite3.connect(development)) as connection:
        connection.execute("INSERT INTO django_books_book VALUES (1, 'precious')")
        connection.commit()
        before = list(connection.iterdump())
        report = run_books(["test", "apps.django_books.checks"], environment)
        assert "Ran 4 tests" in report
        assert list(connection.iterdump()) == before

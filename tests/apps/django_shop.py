"""An app of a Django project: batches read its database, a hook writes to it.

Not imported by tests: Celery's fixup for Django changes the process that it is in. The worker gets
its settings module from the environment.
"""

import os
from typing import Any

from celery import Celery
from django.db import connection, connections

from batchery import BatchTask, install

app = install(Celery("django_shop", set_as_current=False))
app.conf.worker_hijack_root_logger = False


TABLE = "CREATE TABLE IF NOT EXISTS noted (task_id TEXT, pid INT)"


class Noted(BatchTask):
    """Writes each success into the database."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(TABLE)
            cursor.execute("INSERT INTO noted VALUES (%s, %s)", [task_id, os.getpid()])


@app.task(shared=False, base=Noted, max_batch_size=1)
def read(items: list[int]) -> list[dict[str, Any]]:
    """Says which connections were open when the function was called, and uses them."""
    answer: dict[str, Any] = {"pid": os.getpid()}
    for name in connections:
        answer[name] = connections[name].connection is not None
        with connections[name].cursor() as cursor:
            cursor.execute("SELECT %s + 1", [items[0]])
            answer[f"{name} says"] = cursor.fetchone()[0]
    return [answer] * len(items)


@app.task(shared=False, base=BatchTask)
def noted(items: list[str]) -> list[Any]:
    """What the hook wrote."""
    with connection.cursor() as cursor:
        cursor.execute(TABLE)
        cursor.execute("SELECT task_id, pid FROM noted")
        rows = cursor.fetchall()
    return [rows] * len(items)

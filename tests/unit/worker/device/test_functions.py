"""What surrounds the call of a batch function."""

from collections.abc import Sequence
from typing import Any

import django.db
from celery import Celery
from django.conf import settings

from batchery import BatchTask
from batchery_worker.device.functions import run_batch
from batchery_worker.work import Work

app = Celery("functions", set_as_current=False)


@app.task(shared=False, base=BatchTask, name="double")
def double(items: Sequence[int]) -> list[int]:
    return [item * 2 for item in items]


def test_django_that_some_library_has_imported_is_left_alone() -> None:
    # Any of its connections would say that nothing is configured.
    assert django.db.connections is not None
    assert not settings.configured
    jobs: Any = [("a", [1], False), ("b", [2], False)]
    work = Work(1, "double", {}, jobs, 8, None)
    task: Any = app.tasks["double"]
    run: Any = lambda outcomes: outcomes  # noqa: E731
    assert run_batch(task, work, "cpu", [1, 2], run, lambda: None) == [2, 4]

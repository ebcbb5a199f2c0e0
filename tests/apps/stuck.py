"""An app whose worker has an event loop that stands still while a file is there."""

import time
from pathlib import Path
from typing import Any

from celery import Celery, signals

from batchery import install
from batchery_worker.operations import watch

#: No test waits for half a minute.
watch.MAX_STILL_S = 1.0

app = install(Celery("stuck", set_as_current=False))
# Another worker of the tests would take its jobs from Celery's usual queue, and drop them.
app.conf.task_default_queue = "stuck"


@app.task(shared=False)
def note(path: str) -> str:
    return path


@signals.task_received.connect
def wait_while_it_is_there(request: Any, **_: Any) -> None:
    """Called on the event loop."""
    while Path(request.args[0]).exists():
        time.sleep(0.01)

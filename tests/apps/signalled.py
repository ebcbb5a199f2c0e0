"""An app whose worker is told to end while its main thread writes a line of the log.

That thread holds the lock of the log's handler meanwhile, and has not read the device's answer yet.
A thread that settles that job wants to write a line, too.
"""

import logging
import os
import select
import signal
import time
from typing import Any

from celery import Celery, signals

from batchery import BatchTask, install

app = install(Celery("signalled", set_as_current=False))
app.conf.worker_hijack_root_logger = False


@app.task(shared=False, base=BatchTask, max_batch_size=1)
def echo(items: list[str]) -> list[str]:
    """Waits for the files that the items name."""
    while not all(map(os.path.exists, items)):
        time.sleep(0.01)
    return items


@app.task(shared=False)
def ordinary() -> None:
    """With one, the worker takes jobs ahead, as Celery does, also while the first job runs."""


class Ending(logging.Handler):
    """Ends the worker by SIGQUIT when it is given the job `last` and its device has answered.

    The device answers then, and no sooner: it waits for the file that `ENDS` names.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self._pool = pool

    def emit(self, record: logging.LogRecord) -> None:
        if "[last] received" in record.getMessage():
            open(os.environ["ENDS"], "w").close()
            [device] = self._pool.devices
            select.select([device.link.reader], [], [])
            os.kill(os.getpid(), signal.SIGQUIT)


@signals.task_success.connect(weak=False)
def listen(**_: Any) -> None:
    """With somebody who listens, threads log what has succeeded."""


@signals.worker_ready.connect(weak=False)
def begin(sender: Any, **_: Any) -> None:
    if "ENDS" not in os.environ:
        return
    handler = Ending(sender.pool)
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).addHandler(handler)

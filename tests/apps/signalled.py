"""An app whose worker is told to end while its main thread writes a line of the log.

That thread holds the lock of the log's handler meanwhile, and has not read the device's answer yet.
A thread that settles that job wants to write a line, too.
"""

import logging
import os
import signal
import time
from typing import Any

from celery import Celery, signals

from batchery import BatchTask, install

app = install(Celery("signalled", set_as_current=False))
app.conf.worker_hijack_root_logger = False

#: How long the answer of a device takes from the result to the worker, at most, in seconds.
ANSWER_S = 1.0


@app.task(shared=False, base=BatchTask, max_batch_size=1)
def echo(items: list[float]) -> list[float]:
    """Takes so many seconds."""
    time.sleep(sum(items))
    return items


class Ending(logging.Handler):
    """Ends the worker by SIGQUIT when it is given the job `last`, once `first` has been run."""

    def emit(self, record: logging.LogRecord) -> None:
        if "[last] received" in record.getMessage():
            while not app.AsyncResult("first").ready():
                time.sleep(0.01)
            time.sleep(ANSWER_S)
            os.kill(os.getpid(), signal.SIGQUIT)


@signals.task_success.connect(weak=False)
def listen(**_: Any) -> None:
    """With somebody who listens, threads log what has succeeded."""


@signals.worker_ready.connect(weak=False)
def begin(**_: Any) -> None:
    if os.environ.get("ENDS") == "":
        return
    handler = Ending()
    for name in ("celery.worker.strategy", "celery.app.trace"):
        logging.getLogger(name).addHandler(handler)

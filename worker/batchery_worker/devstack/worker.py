"""The command `celery`, whose worker serves all queues that its tasks go to; `up` runs it.

Celery's own worker serves the default queue, and with `install` those of models: whoever runs
several says what each one serves. `up` runs one, and what it left out nobody would serve.
"""

import logging
import os
import threading
import time
from typing import Any

from celery.__main__ import main
from celery.signals import after_setup_logger, celeryd_init, worker_ready

from batchery.cli.survey import app_queues
from batchery_worker.devstack.stack import READY

#: To print would not do: Celery makes a record of its log of that.
STDOUT = 1

#: How often it is looked whether devices are ready, in seconds.
LOOK_S = 0.05

#: They log two lines for each job, with its whole result.
LOGGERS_OF_JOBS = ("celery.worker.strategy", "celery.app.trace")


@celeryd_init.connect
def add_own_queues(instance: Any, options: Any, **_: Any) -> None:
    """Has a worker serve the queues that calls of its tasks are sent to, before it prepares."""
    queues = instance.app.amqp.queues
    for name in sorted(app_queues(instance.app)) if not options.get("queues") else ():
        queues.select_add(queues[name])


@after_setup_logger.connect
def leave_jobs_out(loglevel: int, **_: Any) -> None:
    """Jobs are logged at level DEBUG alone; those that fail, and batches, always."""
    if loglevel >= logging.INFO:
        for name in LOGGERS_OF_JOBS:
            logging.getLogger(name).setLevel(logging.WARNING)


@worker_ready.connect
def say_ready(sender: Any, **_: Any) -> None:
    """Tells `up`, once models are there: a worker with ordinary tasks does not wait for them."""
    threading.Thread(target=_await_devices, args=(sender,), daemon=True).start()


def _await_devices(consumer: Any) -> None:
    fleet = getattr(consumer.controller, "fleet", None)
    while fleet is not None and not all(device.ready_s for device in fleet.devices):
        time.sleep(LOOK_S)
    os.write(STDOUT, f"{READY}\n".encode())


if __name__ == "__main__":
    main()

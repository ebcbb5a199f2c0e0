"""An app whose functions log and print, with a handler of its own on the worker's loggers."""

import logging
import os
from typing import Any

from celery import Celery, signals
from celery.utils.log import get_task_logger

from batchery import BatchTask, install
from support.patience import patient

app = install(Celery("speaking", set_as_current=False))
# A slow machine may hold up a worker that lives for as long as the default.
app.conf.broker_transport_options = {"lease_expiry_s": patient(5)}

#: Named after nothing that Celery knows; the receiver below lets it say more than the others.
plain = logging.getLogger("speaking.plain")
of_task = get_task_logger("speaking.tasks")


class Unspeakable:
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


@signals.after_setup_logger.connect
def add_handler(logger: logging.Logger, **_: Any) -> None:
    plain.setLevel(logging.DEBUG)
    handler = logging.FileHandler(os.environ["OWN_LOG"])
    handler.addFilter(lambda record: record.name.startswith(("speaking", "celery.redirected")))
    form = "%(name)s|%(levelname)s|%(processName)s|%(task_name)s|%(task_id)s|%(message)s"
    handler.setFormatter(logging.Formatter(form, defaults={"task_name": "", "task_id": ""}))
    logger.addHandler(handler)


def speak(item: Any) -> None:
    plain.debug("debug %s", item)
    of_task.info("info %s", item, extra={"odd": {item}})
    of_task.debug("not to be seen")
    print(f"printed {item}")
    try:
        raise ValueError(item)
    except ValueError:
        plain.exception("caught")
    plain.info("%s", Unspeakable())
    plain.info("end %s", item)


@app.task(shared=False, base=BatchTask, name="batch", max_batch_size=8)
def batch(items: list[Any]) -> list[Any]:
    speak(items[0])
    return items


@app.task(shared=False, base=BatchTask, name="crash", max_batch_size=1, max_deaths=1)
def crash(items: list[Any]) -> list[Any]:
    plain.info("last words of %s", items[0])
    os._exit(1)

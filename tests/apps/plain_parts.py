"""An app whose worker writes down of which classes its parts are."""

import json
import os
from typing import Any

from celery import Celery, signals
from kombu.utils.imports import symbol_by_name

from batchery import BatchTask, install

app = install(Celery("plain_parts", set_as_current=False))
app.conf.worker_hijack_root_logger = False


@app.task(shared=False, base=BatchTask)
def echo(items: list[Any]) -> list[Any]:
    return items


@app.task(shared=False)
def ordinary(item: Any) -> Any:
    return item


@signals.worker_ready.connect
def write_parts(sender: Any, **_: Any) -> None:
    channel = sender.task_consumer.channel
    parts = {
        "consumer": type(sender),
        "pool": type(sender.pool),
        "request": symbol_by_name(ordinary.Request),
        "channel": type(channel),
        "qos": type(channel.qos),
        "transport": type(sender.connection.transport),
    }
    found = {name: find_overrides(each) for name, each in parts.items()}
    with open(os.environ["PARTS"], "w") as file:
        json.dump(found, file)


def find_overrides(kind: type) -> list[str]:
    """The methods of Celery's and kombu's classes that a class of somebody else has anew."""
    theirs = [each for each in kind.__mro__ if each.__module__.startswith(("celery.", "kombu."))]
    methods = {name for each in theirs for name in vars(each) if callable(getattr(each, name))}
    own = [each for each in kind.__mro__ if each.__module__.startswith("batchery")]
    return sorted({name for each in own for name in vars(each) if name in methods})

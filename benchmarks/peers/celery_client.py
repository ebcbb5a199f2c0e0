"""What all Celery apps share as clients: a queue full of messages, and one call."""

import json
import os
import uuid
from functools import partial
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.peers.peer import RESULTS_URL, URL, main

QUEUE = "celery"
TEMPLATE = "the-template"

#: Whether each job has a callback.
LINK = os.environ.get("PEER_LINK") == "1"

#: Messages per LPUSH.
CHUNK = 1000


def configure(app: Celery) -> None:
    """Makes an app comparable: late acknowledgement, and no logging of its own."""
    app.conf.update(
        broker_url=URL,
        result_backend=RESULTS_URL,
        task_acks_late=True,
        task_default_queue=QUEUE,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
    )


def fill(app: Celery, task: str, count: int) -> None:
    """Copies one real message so many times; each copy has ids of its own."""
    redis: Any = Redis.from_url(URL)
    # A callback that is sent, and that nobody runs: so that the rate is that of the jobs alone.
    link = app.signature(task, (0,), immutable=True, queue="nobody") if LINK else None
    options: Any = {"ignore_result": True, "headers": {"ignore_result": False}}
    # By way of a queue that no worker empties.
    app.send_task(task, [0], link=link, queue=TEMPLATE, **options)
    text = redis.rpop(TEMPLATE).decode().replace(f'"{TEMPLATE}"', f'"{QUEUE}"')
    message = json.loads(text)
    ids = (message["headers"]["id"], message["properties"]["delivery_tag"])
    for start in range(0, count, CHUNK):
        copies = []
        for _ in range(min(CHUNK, count - start)):
            copy = text
            for each in ids:
                copy = copy.replace(each, str(uuid.uuid4()))
            copies.append(copy)
        redis.lpush(QUEUE, *copies)


def run(app: Celery, task: str) -> None:
    """The command line of a Celery app."""
    main(partial(fill, app, task), lambda: app.send_task(task, [0]).get(timeout=60))

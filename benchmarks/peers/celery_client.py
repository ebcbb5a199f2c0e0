"""What all Celery apps share as clients: a queue full of messages, and one call."""

import json
import uuid
from functools import partial
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.peers.peer import URL, main

QUEUE = "celery"
TEMPLATE = "the-template"

#: Messages per LPUSH.
CHUNK = 1000


def configure(app: Celery) -> None:
    """Makes an app comparable: late acknowledgement, and no logging of its own."""
    app.conf.update(
        broker_url=URL,
        result_backend=URL,
        task_acks_late=True,
        task_default_queue=QUEUE,
        worker_hijack_root_logger=False,
        broker_connection_retry_on_startup=True,
    )


def fill(app: Celery, task: str, count: int) -> None:
    """Copies one real message so many times; each copy has ids of its own."""
    redis: Any = Redis.from_url(URL)
    # A message as Celery makes it, by way of a queue that no worker empties.
    app.send_task(task, [0], queue=TEMPLATE, ignore_result=True, headers={"ignore_result": False})
    message = json.loads(redis.rpop(TEMPLATE))
    ids = (message["headers"]["id"], message["properties"]["delivery_tag"])
    text = json.dumps(message).replace(f'"{TEMPLATE}"', f'"{QUEUE}"')
    for start in range(0, count, CHUNK):
        copies = []
        for _ in range(start, min(start + CHUNK, count)):
            copy = text
            for each in ids:
                copy = copy.replace(each, str(uuid.uuid4()))
            copies.append(copy)
        redis.lpush(QUEUE, *copies)


def run(app: Celery, task: str) -> None:
    """The command line of a Celery app."""
    main(partial(fill, app, task), lambda: app.send_task(task, [0]).get(timeout=60))

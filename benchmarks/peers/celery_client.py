"""What all Celery apps share as clients: a queue full of messages, and one call.

`PEER_KIND` says what else the jobs have: a callback (`link`), a place in a chord (`chord`), an
error that they end with (`failure`), or the state STARTED (`started`).
"""

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

KIND = os.environ.get("PEER_KIND", "plain")

#: Item of a job that fails.
BAD = -1

#: Parts of each chord.
CHORD_PARTS = 100

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
        task_track_started=KIND == "started",
    )


def fill(app: Celery, task: str, count: int) -> None:
    """Copies one real message so many times; each copy has ids of its own."""
    redis: Any = Redis.from_url(URL)
    message = template(app, task, redis)
    ids = (message["headers"]["id"], message["properties"]["delivery_tag"])
    chord = message["headers"]["group"]
    text = json.dumps(message).replace(f'"{TEMPLATE}"', f'"{QUEUE}"')
    for start in range(0, count, CHUNK):
        copies = []
        for number in range(start, min(start + CHUNK, count)):
            copy = text
            for each in ids:
                copy = copy.replace(each, str(uuid.uuid4()))
            if chord:
                group = f"{chord}-{number // CHORD_PARTS}"
                copy = copy.replace(chord, group)
                if number % CHORD_PARTS == 0:
                    app.backend.set_chord_size(group, CHORD_PARTS)
            copies.append(copy)
        redis.lpush(QUEUE, *copies)


def template(app: Celery, task: str, redis: Any) -> Any:
    """A message as Celery makes it."""
    # It is sent, and nobody runs it: so that the rate is that of the jobs alone.
    follower = app.signature(task, (0,), immutable=True, queue="nobody")
    options: Any = {"ignore_result": True, "headers": {"ignore_result": False}}
    if KIND == "link":
        options["link"] = follower
    if KIND == "chord":
        options |= {"chord": follower, "group_id": uuid.uuid4().hex, "group_index": 0}
    # By way of a queue that no worker empties.
    app.send_task(task, [BAD if KIND == "failure" else 0], queue=TEMPLATE, **options)
    return json.loads(redis.rpop(TEMPLATE))


def run(app: Celery, task: str) -> None:
    """The command line of a Celery app."""
    main(partial(fill, app, task), lambda: app.send_task(task, [0]).get(timeout=60))

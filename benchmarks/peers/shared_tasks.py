"""Batch functions that only sleep, so much per batch and per item, and note whose items they had.

An item is a label: the class or the tenant that it is of. Each batch is a line of JSON in the file
`PEER_LOG`: begin and end on the monotonic clock, in seconds, and the number of items by label.
"""

import json
import os
import time
from collections import Counter
from functools import cache
from typing import IO

from celery import Celery

from batchery import BatchTask, install
from benchmarks.peers.celery_client import configure, run

#: Of each batch, and of each item, in seconds.
PASS_S = float(os.environ.get("PEER_PASS_S", "0.002"))
ITEM_S = float(os.environ.get("PEER_ITEM_S", "0.001"))

#: How many times as long an item of the slow task takes.
SLOW = 3

LOG = os.environ.get("PEER_LOG", os.devnull)

app = install(Celery("bench"))
configure(app)


@app.task(base=BatchTask, name="sleep", max_batch_size=32)
def sleep(items: list[str], **_: str) -> list[None]:
    """Takes some time for the batch, and some for each item; keywords only keep batches apart."""
    return _sleep(items, ITEM_S)


@app.task(base=BatchTask, name="sleep_long", max_batch_size=32)
def sleep_long(items: list[str], **_: str) -> list[None]:
    """The same, with items that take longer."""
    return _sleep(items, SLOW * ITEM_S)


def _sleep(items: list[str], item_s: float) -> list[None]:
    begin_s = time.monotonic()
    time.sleep(PASS_S + item_s * len(items))
    _log().write(json.dumps([begin_s, time.monotonic(), Counter(items)]) + "\n")
    return [None] * len(items)


@cache
def _log() -> IO[str]:
    """Each line is written at once."""
    return open(LOG, "a", buffering=1, encoding="utf-8")


if __name__ == "__main__":
    run(app, "sleep")

"""Batchery, with a note of the time wherever a lonely job passes on its way through the worker.

Every process that imports this appends to a file of its own in the folder PEER_TRACE, now and then:
what it has noted last is lost with it.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from time import monotonic_ns
from typing import Any

from celery import Celery

from batchery import BatchTask, install
from batchery.transport.channel import LeasingChannel
from batchery.transport.consume import Fetcher
from batchery_worker.commit.committer import RedisCommitter
from batchery_worker.dispatch.dispatcher import Dispatcher
from benchmarks.peers.celery_client import configure

app = install(Celery("bench"))
configure(app)


@app.task(base=BatchTask, name="noop", max_batch_size=64)
def noop(items: list[Any]) -> list[Any]:
    """Does nothing."""
    return items


#: Notes that are written together: to write each one would cost as much as what it is about.
CHUNK = 100

_file = os.path.join(os.environ["PEER_TRACE"], str(os.getpid()))
_notes: list[tuple[int, str]] = []


def note(hop: str) -> None:
    """Writes down that something happened now."""
    _notes.append((monotonic_ns(), hop))
    if len(_notes) >= CHUNK:
        with open(_file, "a", encoding="ascii") as file:
            file.writelines(f"{at} {hop}\n" for at, hop in _notes)
        _notes.clear()


def traced(owner: Any, name: str, *, before: str = "", after: str = "") -> None:
    """Notes when a function is called, or has returned."""
    call: Callable[..., Any] = getattr(owner, name)

    @wraps(call)
    def noting(*args: Any, **options: Any) -> Any:
        if before:
            note(before)
        answer = call(*args, **options)
        if after:
            note(after)
        return answer

    setattr(owner, name, noting)


traced(LeasingChannel, "_ask_at_once", before="woken", after="fetch sent")
traced(Fetcher, "read", after="fetched")
traced(Dispatcher, "admit", after="admitted")
traced(Dispatcher, "_launch", before="dispatched", after="sent to the device")
traced(RedisCommitter, "_store", before="commit sent", after="commit answered")
traced(Dispatcher, "_on_done", before="answered", after="settled")

#: In a device process this is `batchery_worker.device`; under that name it would be another one.
main: Any = sys.modules["__main__"]
if hasattr(main, "Device"):
    traced(main, "load_message", before="on the device")
    traced(main.Device, "_forward", before="computing", after="computed")

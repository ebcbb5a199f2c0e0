"""What a device is told by its worker: to stop, to load, or to answer for remote control."""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.utils.json import dumps

from batchery_worker.device.device import Device
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.messages import (
    SIGN,
    Answer,
    Fenced,
    Forget,
    Handed,
    Order,
    Stop,
    load_message,
)

logger = logging.getLogger("batchery.device")

#: That of jobs with an ETA among all that Celery's timer has.
ETA_PRIORITY = 6

#: How long the main thread may take to see that the worker is gone, in seconds.
LEAVE_S = 1.0


def listen(
    end: socket.socket, device: Device, leave: Callable[[Device], None] | None = None
) -> None:
    """Reads what the worker orders, on a thread of its own, while the device runs.

    Args:
        end: Of the pipe to the worker.
        device: It has started.
        leave: Called when the worker is gone; by default the process ends.
    """
    threading.Thread(
        target=_listen,
        args=(end, device, leave or _leave),
        daemon=True,
        name="batchery-control",
    ).start()


def _listen(end: socket.socket, device: Device, leave: Callable[[Device], None]) -> None:
    feed = device.feed
    while True:
        try:
            message = load_message(read_frame(end))
        except (EOFError, OSError):
            leave(device)
            return
        if isinstance(message, Stop):
            feed.stop()
        elif isinstance(message, Handed):
            feed.source.put(message)
        elif isinstance(message, Forget):
            feed.forget_waiting()
        elif isinstance(message, Fenced):
            feed.source.fence(message.holder)
        elif isinstance(message, Order):
            device.tell(Answer(message.number, _obey(device, message)))


def _leave(device: Device) -> None:
    """Ends the process, as the worker is gone."""
    device.feed.stop()
    if not device.feed.closed.wait(LEAVE_S):
        os._exit(0)


def _obey(device: Device, order: Order) -> str:
    """Runs a command of remote control on the jobs of this device; its answer as JSON."""
    if order.name == SIGN:
        return ""
    feed = device.feed
    try:
        with feed.lock:
            if order.name == "batchery":
                found: Any = feed.figures()
            elif order.name == "batchery_queues":
                feed.take_from(order.options["sizes"])
                found = None
            else:
                feed.materialise()
                state = _State(feed.consumer)
                found = Panel.data[order.name](state, **order.options)
                if order.name == "scheduled":
                    found += [_describe_later(each) for each in feed.list_later()]
                elif order.name == "query_task":
                    later = {each.id: each for each in feed.list_later()}
                    asked = [later[each] for each in order.options["ids"] if each in later]
                    found |= {each.id: ("scheduled", each.info()) for each in asked}
        return str(dumps(found))
    except Exception as error:
        logger.exception("the order %s has failed", order.name)
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _describe_later(request: Any) -> dict[str, Any]:
    """What Celery's `scheduled` says of a job that waits for its time."""
    return {"eta": request.eta.isoformat(), "priority": ETA_PRIORITY, "request": request.info()}


class _State:
    """What Celery's commands get: a consumer and its app."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.app = consumer.app
        self.hostname = consumer.hostname
        self.tset = set

    state = worker_state

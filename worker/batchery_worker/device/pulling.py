"""A device whose jobs come from Redis, or from its worker; which starts, watches and orders it."""

import json
import logging
import os
import socket
import threading
from functools import cached_property
from typing import Any

from celery import Celery
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.utils.json import dumps

from batchery_worker.device.device import Device
from batchery_worker.device.feed import Feed
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.messages import (
    SIGN,
    Answer,
    Began,
    Cancel,
    Done,
    Ended,
    Fenced,
    Forget,
    Handed,
    Left,
    Loaded,
    Loads,
    NotReady,
    Order,
    Parted,
    Ready,
    Reload,
    Reloaded,
    Reply,
    ResultsWait,
    Running,
    Setup,
    Stop,
    Work,
    load_message,
)

logger = logging.getLogger("batchery.device")

#: What is said of a batch, and matters to the worker only if the time of that batch is limited.
OF_BATCHES = (Began, Left, Loads, Loaded, ResultsWait)

#: How long the main thread may take to see that the worker is gone, in seconds.
LEAVE_S = 1.0


class PullingDevice(Device):
    """Runs batches of the jobs that its feed has, until its worker tells it to stop."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        #: Ids of the batches that the worker knows of.
        self._told: set[int] = set()

    def start(self, setup: Setup, app: Celery | None = None) -> Ready:
        """Imports the app, and loads the models; it connects later, as the broker may be away."""
        ready = super().start(setup, app)
        # Here, as its errors are those of a start.
        self._intake.device.note_figures(ready)
        source = self._intake.source
        source.on_parted = lambda holder: self.tell(Parted(holder))
        source.on_refused = lambda error: self.tell(NotReady(type(error).__name__, str(error)))
        return ready

    @cached_property
    def _intake(self) -> Any:
        assert self._setup.pull is not None
        return Feed(
            self._app,
            self._setup,
            self._setup.pull,
            self._prepare_message,
            self._tell_of_batch,
            resumes=self._steps is None or self._steps.resumes,
        )

    def _prepare_message(self, message: Work | Cancel) -> Any:
        """Makes of a batch, or of an order for one, what runs."""
        if self._steps is None:
            assert isinstance(message, Work)
            return self.prepare_work(message)
        return self.prepare_step(message)

    def _tell_of_batch(self, reply: Reply) -> None:
        """Tells the worker of a batch whose time is limited, or of this process."""
        if isinstance(reply, Running):
            self._told.add(reply.id)
        super().tell(reply)

    def tell(self, reply: Reply) -> None:
        """Tells whoever must know: the feed of all batches, the worker of few."""
        # The worker first: it may be about to kill this process for the time of the batch.
        if isinstance(reply, OF_BATCHES):
            if reply.id in self._told:
                super().tell(reply)
            self._intake.receive(reply)
        elif isinstance(reply, Done):
            if reply.id in self._told:
                self._told.discard(reply.id)
                super().tell(Ended(reply.id))
            self._intake.receive(reply)
        elif isinstance(reply, Reloaded):
            # Those of before have gone with a batch, of which the worker does not hear.
            self._reported = {}
            super().tell(reply._replace(figures=self._figures()))
        else:
            super().tell(reply)

    def run(self) -> None:
        """Works until the worker has told it to stop."""
        threading.Thread(target=self._listen, daemon=True, name="batchery-control").start()
        super().run()
        self._intake.close()

    def _listen(self) -> None:
        """Reads what the worker orders; ends the process if the worker is gone."""
        feed: Feed = self._intake
        while True:
            try:
                message = load_message(read_frame(self._end))
            except (EOFError, OSError):
                self._leave()
                return
            if isinstance(message, Stop):
                feed.stop()
            elif isinstance(message, Handed):
                feed.source.put(message)
            elif isinstance(message, Forget):
                feed.forget_waiting()
            elif isinstance(message, Fenced):
                feed.source.fence(message.holder)
            elif isinstance(message, Reload):
                self._reloader.begin(message)
            elif isinstance(message, Order):
                self.tell(Answer(message.number, self._obey(feed, message)))

    def _leave(self) -> None:
        """Ends the process, as the worker is gone."""
        self._intake.stop()
        if not self._intake.closed.wait(LEAVE_S):
            os._exit(0)

    def _obey(self, feed: Feed, order: Order) -> str:
        """Runs a command of remote control on the jobs of this device; its answer as JSON."""
        if order.name == SIGN:
            return ""
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
            return str(dumps(found))
        except Exception as error:
            logger.exception("the order %s has failed", order.name)
            return json.dumps({"error": f"{type(error).__name__}: {error}"})


class _State:
    """What Celery's commands get: a consumer and its app."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.app = consumer.app
        self.hostname = consumer.hostname
        self.tset = set

    state = worker_state

"""A device process that is fed batches by a pipe, and how it takes them in."""

import logging
import os
import pickle
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, TypeVar

from batchery_worker.device.device import Device, begin, run_or_die
from batchery_worker.device.reply import DeviceBatch
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.logs import forward_logs
from batchery_worker.ipc.messages import load_message

Prepared = TypeVar("Prepared")

#: How long the main thread may take to see that the parent has closed the pipe, in seconds.
LEAVE_S = 1.0

#: What the main thread tells the other one: to read ahead, or to stop that.
_GO, _STOP = b"g", b"s"


class Intake(Generic[Prepared]):
    """Reads batches on the main thread, or ahead of it on a thread beside it.

    To hand a batch from one thread to another takes 0.1 ms, and a lonely job would wait for that.
    So the main thread reads while it has nothing else to do. While it computes something long, the
    other one reads and prepares what comes next.

    Once the parent has closed the pipe, the main thread leaves when it asks for the next batch. If
    it is busy with one, the other thread ends the process.
    """

    def __init__(self, end: socket.socket, prepare: Callable[[bytes], Prepared | None]) -> None:
        """Reads nothing yet.

        Args:
            end: The device's end of the pipe.
            prepare: Makes a batch of a frame, or handles another message and returns None; called
                by either thread, never by both at once.
        """
        self._end = end
        self._prepare = prepare
        # Without a limit: the parent sends at most `DEVICE_DEPTH` batches, and an urgent one. With
        # a limit, the reader of a queue wakes up after 20 us instead of 6.
        self._ready: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        #: Whether the other thread reads; for the main thread.
        self._reads_ahead = False
        self._told, self._notify = os.pipe()
        # Not a semaphore, which is a condition in Python.
        self._stopped = threading.Lock()
        self._stopped.acquire()
        #: Set when the main thread has seen that the parent has closed the pipe.
        self.closed = threading.Event()
        self._arrived = select.poll()
        self._arrived.register(end, select.POLLIN)

    @property
    def is_empty(self) -> bool:
        """Whether no batch has arrived."""
        return self._ready.empty() and not self._has_unread()

    def take_arrived(self) -> Prepared:
        """Takes the next batch, if it has arrived.

        Raises:
            queue.Empty: It has not, or the other thread still prepares it.
        """
        # An end is for `take`: what runs now may take the error for its own.
        with suppress(EOFError):
            while self._ready.empty() and self._has_unread():
                if (batch := self._read()) is not None:
                    return batch
        return self._ready.get_nowait()

    def take(self) -> Prepared:
        """Takes the next batch; waits for it.

        Raises:
            EOFError: The parent has closed the pipe.
        """
        if self._reads_ahead and self._ready.empty():
            os.write(self._notify, _STOP)
            self._stopped.acquire()
            self._reads_ahead = False
        try:
            # The other thread may have read one in the meantime.
            while self._ready.empty():
                if (batch := self._read()) is not None:
                    return batch
        except EOFError:
            self.closed.set()
            raise
        return self._ready.get()

    def read_ahead(self) -> None:
        """From now on the other thread reads, until this one waits for a batch."""
        if not self._reads_ahead:
            self._reads_ahead = True
            os.write(self._notify, _GO)

    def run(self) -> None:
        """The other thread's work; ends the process if the main thread does not."""
        with suppress(EOFError):
            self._read_on_demand()
        # The main thread may wait for this one, which may have told it already.
        if self._stopped.locked():
            self._stopped.release()
        # A forward pass may run: do not wait for that.
        if not self.closed.wait(LEAVE_S):
            os._exit(0)

    def _read_on_demand(self) -> None:
        """Reads when it is told to; returns, or raises EOFError, when the parent is gone."""
        poll = select.poll()
        poll.register(self._told, select.POLLIN)
        poll.register(self._end, 0)  # That the parent is gone is always told.
        while True:
            found = dict(poll.poll())
            events = found.get(self._end.fileno(), 0)
            if events & select.POLLIN:
                if (batch := self._read()) is not None:
                    self._ready.put(batch)
            elif events:
                return
            elif os.read(self._told, 1) == _GO:
                poll.modify(self._end, select.POLLIN)
            else:
                poll.modify(self._end, 0)
                self._stopped.release()

    def _has_unread(self) -> bool:
        return not self._reads_ahead and bool(self._arrived.poll(0))

    def _read(self) -> Prepared | None:
        return self._prepare(read_frame(self._end))


class FedDevice(Device):
    """Runs the batches that come by its pipe, until that is closed."""

    @cached_property
    def _intake(self) -> Any:
        return Intake(self._end, self._prepare)

    def _prepare(self, frame: bytes) -> DeviceBatch:
        return self.prepare_work(pickle.loads(frame))


def main(descriptor: int) -> None:
    """Entry point: `python -m benchmarks.engine.fed_device DESCRIPTOR`, that of a socket."""
    end = socket.socket(fileno=descriptor)
    setup, device = load_message(read_frame(end)), FedDevice(end)
    forward_logs(logging.StreamHandler(), setup.log_levels)
    if begin(device, setup):
        run_or_die(device.run)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A device on a thread of the worker's own process: for workers that live inside a test.

There holds what the test has changed: its databases, its patches, and tasks that no module has.
"""

import logging
import os
import queue
import select
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from celery import Celery

from batchery_worker.device.device import Device, begin
from batchery_worker.device.functions import EventLoop, close_connections
from batchery_worker.device.reply import DeviceBatch
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.messages import load_message

logger = logging.getLogger("batchery.device")


class SequentialDevice(Device):
    """Runs one batch after the other on one thread, until its parent closes the pipe."""

    def run(self) -> None:
        """Works until the pipe is closed.

        Raises:
            OSError: It was closed before a batch was answered.
        """
        if self._steps is not None:
            self._steps.run(SequentialIntake(self._end, self._prepare_job))
        with closing(EventLoop()) as loop:
            while True:
                if (batch := self._prepare(read_frame(self._end))) is not None:
                    with self._reloader.turn.gate, self._reloader.turn.running:
                        self._hand_over(self._forward(batch, loop.run), at_once=True)

    def _look_ahead(self) -> None:
        """Takes in nothing ahead."""

    def _finish(self, batch: DeviceBatch, is_last: bool) -> None:  # noqa: ARG002 (has one thread)
        super()._finish(batch, is_last=True)


class SequentialIntake:
    """The messages to a device that has one thread."""

    def __init__(self, end: socket.socket, prepare: Callable[[bytes], Any]) -> None:
        self._end = end
        self._prepare = prepare

    def take(self) -> Any:
        """Takes the next one; waits for it."""
        return self._prepare(read_frame(self._end))

    def take_arrived(self) -> Any:
        """Takes the next one, if it has arrived.

        Raises:
            queue.Empty: It has not.
            EOFError: The pipe is closed.
        """
        if not select.select([self._end], [], [], 0)[0]:
            raise queue.Empty
        return self.take()

    def read_ahead(self) -> None:
        """Does nothing: the next message waits for the end of a step."""


class DeviceThread:
    """The thread of a device, with the methods of `subprocess.Popen` that its parent calls."""

    def __init__(self, app: Celery, end: socket.socket) -> None:
        """Starts the thread.

        Args:
            app: The worker's.
            end: Of a pipe to the parent; the thread closes it.
        """
        self.pid = os.getpid()
        self._end = end
        self._thread = threading.Thread(
            target=self._run, args=(app,), daemon=True, name="batchery-device"
        )
        self._thread.start()

    def poll(self) -> int | None:
        """The exit code of a thread that has ended; None while it runs."""
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the thread.

        Raises:
            TimeoutExpired: It has not ended after this time, in seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired(self._thread.name, timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Closes the pipe; a function that runs goes on to its end, and nobody gets its result."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _run(self, app: Celery) -> None:
        device = SequentialDevice(self._end)
        try:
            if begin(device, load_message(read_frame(self._end)), app):
                device.run()
        except (EOFError, OSError):
            logger.debug("the parent has closed the pipe", exc_info=True)
        except Exception:
            logger.critical("device thread failed", exc_info=True)
        finally:
            close_connections(app)
            self._end.close()

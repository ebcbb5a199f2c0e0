"""A device on threads of the worker's own process: for workers that live inside a test.

There holds what the test has changed: its databases, its patches, and tasks that no module has.
"""

import logging
import os
import socket
import subprocess
import threading
from contextlib import closing, suppress

from celery import Celery

from batchery_worker.batch import DeviceBatch
from batchery_worker.device.device import Device, begin
from batchery_worker.device.functions import EventLoop, close_connections
from batchery_worker.device.orders import listen
from batchery_worker.ipc.framing import read_frame
from batchery_worker.ipc.messages import Reply, load_message

logger = logging.getLogger("batchery.device")


class ThreadedDevice(Device):
    """Takes, runs and answers batches on one thread, until its worker closes the pipe."""

    def run(self) -> None:
        """Works until the worker has told it to stop, or has given it up."""
        try:
            with closing(EventLoop()) as loop:
                self.run_loop(loop)
        finally:
            self.feed.close()

    def _write(self, reply: Reply) -> None:
        # Nobody hears a device that was given up.
        with suppress(OSError):
            super()._write(reply)

    def _hand_over(self, batch: DeviceBatch, *, at_once: bool = False) -> None:  # noqa: ARG002
        super()._hand_over(batch, at_once=True)


class DeviceThread:
    """The thread of a device, with the methods of `subprocess.Popen` that its worker calls."""

    def __init__(self, app: Celery, end: socket.socket) -> None:
        """Starts the thread.

        Args:
            app: The worker's.
            end: Of a pipe to the worker; the thread closes it.
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
        device = ThreadedDevice(self._end)
        try:
            if begin(device, load_message(read_frame(self._end)), app):
                # Nobody can end a thread: a function that runs goes on to its end.
                listen(self._end, device, lambda device: device.feed.abandon())
                device.run()
        except (EOFError, OSError):
            logger.debug("the parent has closed the pipe", exc_info=True)
        except Exception:
            logger.critical("device thread failed", exc_info=True)
        finally:
            close_connections(app)
            # Another thread may read from it.
            self.kill()
            self._end.close()

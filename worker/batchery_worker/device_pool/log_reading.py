"""Reads what a device process logs, and gives it to the handlers of this process.

On a thread, because the event loop stands still while Celery waits for a broker that is away, and
lines about that are wanted then.
"""

import logging
import marshal
import socket
import threading

from batchery.fork_gate import fork_gate
from batchery_worker.ipc.framing import read_frame

logger = logging.getLogger("batchery.pool")


def follow_log(end: socket.socket) -> None:
    """Handles a device's records until its process ends; returns at once."""
    fork_gate.keep_private(end)
    threading.Thread(target=_follow, args=(end,), daemon=True, name="batchery-log").start()


def _follow(end: socket.socket) -> None:
    with end:
        while True:
            try:
                frame = read_frame(end)
            except (EOFError, OSError):
                return
            with fork_gate.working():
                try:
                    handle(frame)
                except Exception:
                    logger.exception("a line of a device cannot be logged")


def handle(frame: bytes) -> None:
    """Gives a record to this process's handlers.

    Args:
        frame: The attributes of a `logging.LogRecord`, as marshal writes them.
    """
    record = logging.makeLogRecord(marshal.loads(frame))
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        target.handle(record)

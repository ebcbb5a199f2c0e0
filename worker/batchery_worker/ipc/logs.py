"""What a device process logs and prints goes through the handlers of its worker.

The worker's log file, format and receivers of Celery's logging signals hold for batch functions as
they hold for ordinary tasks.
"""

import logging
import marshal
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_logger

from batchery.fork_gate import fork_gate
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.plain_values import is_plain
from batchery_worker.work import Work

#: Loggers of ours: what they say is not said by the function of the batch.
OURS = "batchery"

#: Maximum number of task ids in a line of the log; `task_ids` has all of them.
MAX_IDS = 3

#: How long a thread that logs waits until its line is in the pipe, in seconds. It waits that long
#: only where the parent reads nothing.
WRITE_TIMEOUT_S = 1.0

#: Attributes of a record that are sent in another form, or not at all.
_REPLACED = {"args", "exc_info", "message", "msg", "processName"}

logger = logging.getLogger("batchery.pool")


class ForwardingHandler(logging.Handler):
    """Sends each record to the parent process, as plain data."""

    def __init__(self, device: str, end: socket.socket, current: Callable[[], Work | None]) -> None:
        """Makes a handler for the root logger.

        Args:
            device: Name of the device, as torch spells it.
            end: Of a pipe to the parent, for nothing else.
            current: The batch whose function runs; None between batches.
        """
        super().__init__()
        self._device = device
        self._end = end
        self._current = current
        # A soft time limit interrupts the main thread wherever it is. Half a message in the pipe
        # would garble all that follow, so another thread writes it.
        self._records: queue.SimpleQueue[tuple[bytes, threading.Event]] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record; the parent's handlers write it."""
        if not self._writer.is_alive():
            # A fork of this process, or the parent is gone.
            self._say(self.format(record))
            return
        try:
            frame = marshal.dumps(self._fields(record))
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - whatever the text of the caller's objects raises
            self._say(f"a line of {record.name} cannot be logged: {traceback.format_exc()}")
            return
        is_written = threading.Event()
        self._records.put((frame, is_written))
        # The last line before a crash must not be lost.
        is_written.wait(WRITE_TIMEOUT_S)

    def _write(self) -> None:
        while True:
            frame, is_written = self._records.get()
            try:
                write_frame(self._end, frame)
            except OSError:
                return
            finally:
                is_written.set()

    def _say(self, text: str) -> None:
        # Not `sys.stderr`, which may be redirected to this very handler.
        if sys.__stderr__ is not None:
            print(text, file=sys.__stderr__)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = {
            name: _plain(value) for name, value in vars(record).items() if name not in _REPLACED
        }
        fields["msg"] = record.getMessage()
        fields["processName"] = f"device {self._device}"
        if record.exc_info and not record.exc_text:
            fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
        work = self._current()
        if work is not None and record.name.partition(".")[0] != OURS:
            ids = [task_id for task_id, _, _ in work.jobs]
            more = f" and {len(ids) - MAX_IDS} more" if len(ids) > MAX_IDS else ""
            fields.setdefault("task_name", work.task)
            fields.setdefault("task_id", ", ".join(ids[:MAX_IDS]) + more)
            fields.setdefault("task_ids", ids)
        return fields


def forward_logs(handler: logging.Handler, levels: Mapping[str, int]) -> None:
    """Gives the root logger one handler, and all loggers the levels that they have in the parent.

    Args:
        handler: The only one.
        levels: Level of each logger that has one; that of the root logger has an empty name.
    """
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def redirect_prints(app: Celery) -> None:
    """Turns what functions print into log records, if the app's workers do that."""
    if app.conf.worker_redirect_stdouts:
        app.log.redirect_stdouts_to_logger(
            get_logger("celery.redirected"), app.conf.worker_redirect_stdouts_level
        )


def _plain(value: Any) -> Any:
    return value if is_plain(value) else repr(value)


def follow_log(end: socket.socket) -> None:
    """Handles a device's records until its process ends; returns at once.

    A thread does it: the event loop stands still while Celery waits for a broker that is away, and
    lines about that are wanted then.

    Raises:
        OSError: The system has no room for another thread.
    """
    fork_gate.keep_private(end)
    try:
        threading.Thread(target=_follow, args=(end,), daemon=True, name="batchery-log").start()
    except RuntimeError as error:
        end.close()
        raise OSError(str(error)) from error


def _follow(end: socket.socket) -> None:
    with end:
        while True:
            try:
                frame = read_frame(end)
            except (EOFError, OSError):
                return
            with fork_gate.working():
                try:
                    handle_record(frame)
                except Exception:
                    logger.exception("a line of a device cannot be logged")


def handle_record(frame: bytes) -> None:
    """Gives a record to this process's handlers.

    Args:
        frame: The attributes of a `logging.LogRecord`, as marshal writes them.
    """
    record = logging.makeLogRecord(marshal.loads(frame))
    target = logging.getLogger(record.name)
    if target.isEnabledFor(record.levelno):
        target.handle(record)

"""Reads the items of a device's jobs beside it: fetched on threads, decoded in processes.

So neither a slow host nor a large scan idles the device, and a decoder that dies takes one item
with it. All of it ends with the device.
"""

import logging
import os
import pickle
import queue
import socket
import subprocess
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from time import monotonic
from typing import Any

from celery import Celery
from kombu.utils.imports import symbol_by_name

from batchery.errors import InvalidItem
from batchery.fork_gate import fork_gate
from batchery.installation import get_installation
from batchery.media_settings import MediaSettings
from batchery.model_task import ModelTask
from batchery.outcomes import Failed
from batchery.transport.payloads import Payloads
from batchery_worker.devstack.guarded_process import python_command
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.media.fetching import describe
from batchery_worker.media.items import Text
from batchery_worker.media.reader import Reader, ReadItem
from batchery_worker.media.reader_process import Asked

#: Maximum number of items of a device that are read at a time, and bytes of those among them that
#: are fetched, if each has as many as it may: most wait for a host.
MAX_AT_ONCE, MAX_FETCHED_BYTES = 128, 1 << 30

#: How often an item is read whose reader dies: it may have died of something else.
ATTEMPTS = 2

#: Maximum time until the first reader is there, in seconds: what it imports may come from a slow
#: disk. And how much later than its system a device gives a reader up.
START_S, GRACE_S = 120.0, 5.0

#: What the processes run.
MODULE = "batchery_worker.media.reader_process"


class Readers:
    """Fetches and reads items for one device; for any thread."""

    def __init__(
        self, readers: Mapping[str, Reader], payloads: Payloads | None, media: MediaSettings
    ) -> None:
        """Starts the first process, and no thread.

        Args:
            readers: That of each model, by its task.
            payloads: Where clients have put bytes.
            media: Their settings.
        """
        self._readers = readers
        self._payloads = payloads
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="batchery-reading")
        #: Whoever has one fetches an item, or waits with its bytes for a process.
        self._permits = threading.Semaphore(max(1, MAX_FETCHED_BYTES // media.max_bytes))
        self._source = ReaderSource(readers)
        #: Pipes to readers that read nothing now; None for one that has to be started.
        self._free: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4
        for _ in range(media.readers or min(4, max(2, cores))):
            self._free.put(None)

    @classmethod
    def open(cls, app: Celery, tasks: Iterable[ModelTask]) -> "Readers":
        """The readers of a device that has the models of these tasks."""
        media = get_installation(app).settings.media
        # It logs each URL with its query, which may be as good as a key.
        logging.getLogger("httpx2").setLevel(logging.WARNING)
        readers = {task.name: make_reader(task, media) for task in tasks}
        return cls(readers, Payloads.open(app), media)

    def submit(self, task: str, item: Any) -> "Future[Any]":
        """Takes an item of a task.

        Returns:
            What its batch gets in the place of the item: a `ReadItem`, or `Failed`.
        """
        return self._threads.submit(self._read, self._readers[task], task, item)

    def close(self) -> None:
        """Ends the processes; what is being fetched goes nowhere."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._source.close()
        with suppress(queue.Empty):
            while True:
                if (end := self._free.get_nowait()) is not None:
                    end.close()

    def _read(self, reader: Reader, task: str, item: Any) -> Any:
        try:
            content = reader.parse(item)
            # What came with its message is here already.
            with nullcontext() if isinstance(content, bytes | Text) else self._permits:
                began_s, limit_s = monotonic(), reader.media.timeout_s
                data = reader.fetch(content, self._payloads)
                # Small enough, it would be no limit but for those who came too late.
                left_s = max(0.1, limit_s - (monotonic() - began_s))
                return ReadItem(self._decode(Asked(task, data, left_s), reader))
        except InvalidItem as error:
            # Without its frames, which hold the bytes.
            return Failed(InvalidItem(str(error)))
        except Exception as error:  # noqa: BLE001 - a job that nobody gives back would be lost
            return Failed(InvalidItem(f"{reader.medium}: cannot be read: {describe(error)}"))

    def _decode(self, asked: Asked, reader: Reader) -> Any:
        """Has an item read by the next process that is free.

        Raises:
            InvalidItem: It is not fit to run, or its readers die of it.
        """
        end = self._free.get()
        try:
            for _ in range(ATTEMPTS):
                end = end or self._source.start_reader()
                began_s = monotonic()
                try:
                    write_frame(end, pickle.dumps(asked, pickle.HIGHEST_PROTOCOL))
                    end.settimeout(asked.limit_s + GRACE_S)
                    value, problem = pickle.loads(read_frame(end))
                except (EOFError, OSError):
                    end.close()
                    end = None
                    if monotonic() - began_s >= asked.limit_s:
                        limit_s = reader.media.timeout_s
                        raise InvalidItem(
                            f"{reader.medium}: took more than media.timeout_s = {limit_s:g}"
                        ) from None
                else:
                    if problem:
                        raise InvalidItem(problem)
                    return value
            raise InvalidItem(f"{reader.medium}: the processes that tried to read it have died")
        finally:
            if self._source.is_closed and end is not None:
                end.close()
            self._free.put(end)


def make_reader(task: ModelTask, media: MediaSettings) -> Reader:
    """The reader of a model of the settings."""
    model: Any = symbol_by_name(task.model) if isinstance(task.model, str) else task.model
    made: Reader = model.Reader(task.model_settings, media)
    return made


class ReaderSource:
    """The process of which readers are forked; started anew if it has died."""

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        """Starts it. On Linux it ends with the thread that has done so, which must live on."""
        self._readers = readers
        self._lock = threading.Lock()
        self.is_closed = False
        self._start()

    def _start(self) -> None:
        self._end, theirs = socket.socketpair()
        # A fork of the device must not keep the process alive.
        fork_gate.keep_private(self._end)
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [*python_command(), "-m", MODULE, str(descriptor)],
                # Each reader has one core; numpy would start threads for all of them.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(descriptor,),
                stdin=subprocess.DEVNULL,
            )
        write_frame(self._end, pickle.dumps(self._readers))

    def start_reader(self) -> socket.socket:
        """Has a reader forked, and waits for it; returns the pipe to it.

        Raises:
            InvalidItem: There is none.
        """
        with self._lock:
            for _ in range(ATTEMPTS):
                if self.is_closed:
                    break
                if self._process.poll() is not None:
                    self._end.close()
                    self._start()
                ours, theirs = socket.socketpair()
                fork_gate.keep_private(ours)
                try:
                    with theirs:
                        socket.send_fds(self._end, [b"r"], [theirs.fileno()])
                    ours.settimeout(START_S)
                    read_frame(ours)
                except (EOFError, OSError):
                    ours.close()
                    # It ends with the sockets that it was sent.
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(GRACE_S)
                else:
                    return ours
        raise InvalidItem("item: no process could be started to read it; the worker's log says why")

    def close(self) -> None:
        """Ends it, and its forks with it."""
        self.is_closed = True
        # Whoever has the lock waits for it.
        self._process.kill()
        with self._lock:
            self._end.close()
            self._process.kill()
            self._process.wait()

"""The process that runs batches, beside each process of a gateway.

It is a process of its own, as a run takes a good part of a core: in a thread of the gateway it
would delay every request. It ends with the gateway, however that ends, because their pipe does.
"""

import asyncio
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import redis
from celery import Celery

from batchery.errors import BatcheryError
from batchery.settings import Settings
from batchery_producer.gateway.batches.leases import Lease, LeaseLost, Leases, leases_of
from batchery_producer.gateway.batches.runner import BatchRun, Surroundings
from batchery_producer.gateway.batches.storage import Storage
from batchery_producer.gateway.batches.store import BatchPlace, BatchStore, FileStore
from batchery_producer.gateway.models.served_models import ServedModels
from batchery_producer.gateway.problems import Problem

logger = logging.getLogger(__name__)

#: How often a process looks for batches that nobody runs, in seconds.
LOOK_S = 2.0

#: Maximum batches that a process runs at once; each has a thread and a window of jobs.
MAX_RUNS = 16

#: How long after a failure a batch is tried again, in seconds.
RETRY_S = 5.0

#: How long the process may take to end in order, in seconds.
STOP_S = 15.0


class BatchRunner:
    """Takes up batches that nobody runs."""

    def __init__(self, app: Celery, settings: Settings, leases: Leases) -> None:
        """Prepares.

        Args:
            app: Sends the jobs.
            settings: The models, and where the files are.
            leases: Says who runs a batch.
        """
        storage = Storage(settings.gateway.files)
        self._leases = leases
        self._stopping = threading.Event()
        self._batches = BatchStore(storage)
        self._shared = Surroundings(
            app,
            ServedModels(settings.models),
            FileStore(storage),
            self._batches,
            self._stopping.is_set,
        )
        self._threads: dict[BatchPlace, threading.Thread] = {}
        #: When each batch that was not finished may be tried again.
        self._not_before_s: dict[BatchPlace, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        deadline_s = time.monotonic() + STOP_S
        for thread in self._threads.values():
            thread.join(max(0, deadline_s - time.monotonic()))

    def look(self) -> None:
        """Takes up batches, those first that wait longest; looks again when called again."""
        self._threads = {
            place: thread for place, thread in self._threads.items() if thread.is_alive()
        }
        places = self._batches.open_batches()
        self._not_before_s = {
            place: at_s for place, at_s in self._not_before_s.items() if place in places
        }
        for place in sorted(places, key=lambda each: self._not_before_s.get(each, 0.0)):
            if len(self._threads) >= MAX_RUNS:
                break
            is_due = time.monotonic() >= self._not_before_s.get(place, 0.0)
            if place not in self._threads and is_due:
                self._take_up(place)

    def _take_up(self, place: BatchPlace) -> None:
        lease = self._leases.take(place.id)
        if lease is not None:
            thread = threading.Thread(
                target=self._run, args=(place, lease), name=place.id, daemon=True
            )
            self._threads[place] = thread
            thread.start()

    def _run(self, place: BatchPlace, lease: Lease) -> None:
        try:
            record = self._batches.get(*place)
            BatchRun(self._shared, record, lease).run()
        except LeaseLost as error:
            logger.info("batch %s: another process runs it: %s", place.id, error)
        except Problem as problem:
            logger.warning("batch %s: tried again soon: %s", place.id, problem)
            self._batches.forget_lost(place)
        except (BatcheryError, redis.RedisError) as error:
            logger.warning("batch %s: tried again soon: %s", place.id, error)
        except Exception:
            logger.exception("batch %s: tried again soon", place.id)
        finally:
            self._not_before_s[place] = time.monotonic() + RETRY_S
            lease.release()


class BatchProcess:
    """The process beside this one, which is started when there is a batch to run."""

    def __init__(self, load: Callable[[], Celery], settings: Settings, batches: BatchStore) -> None:
        """Starts nothing yet.

        Args:
            load: Gives the app, in the other process; can be pickled.
            settings: As for `BatchRunner`.
            batches: Where to look for batches.
        """
        self._load = load
        self._settings = settings
        self._batches = batches
        self._process: Any = None
        self._pipe: Connection | None = None
        self._lock = threading.Lock()

    async def watch(self) -> None:
        """Sees to it that the process runs while there are batches, until it is cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._look)
            except Exception as error:  # noqa: BLE001 - a store may be away, and come back
                logger.warning("batches: cannot be looked for: %s", error)
            await asyncio.sleep(LOOK_S)

    def wake(self) -> None:
        """Has the process look now, as there is a new batch, or one was cancelled."""
        with self._lock:
            self._ensure()
            assert self._pipe is not None
            with suppress(OSError):  # It has died, and the next look starts another one.
                self._pipe.send(None)

    def close(self) -> None:
        """Ends the process in order; its batches go on elsewhere, or later."""
        with self._lock:
            if self._process is None:
                return
            assert self._pipe is not None
            self._pipe.close()
            # It may be between two looks, then its runs end.
            self._process.join(STOP_S + LOOK_S)
            if self._process.is_alive():
                self._process.kill()

    def _look(self) -> None:
        with self._lock:
            if self._process is not None and self._process.is_alive():
                return
            if self._batches.open_batches():
                self._ensure()

    def _ensure(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_batches, args=(theirs, self._load, self._settings), daemon=True
        )
        self._process.start()
        # Ours would keep the pipe open when the process dies.
        theirs.close()


def run_batches(pipe: Connection, load: Callable[[], Celery], settings: Settings) -> None:
    """Runs batches until the other end of the pipe is closed."""
    ended = threading.Event()
    # Ctrl-C is for the gateway, which closes the pipe then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    app = load()
    with leases_of(app) as leases, BatchRunner(app, settings, leases) as runner:
        while _is_open(pipe) and not ended.is_set():
            try:
                runner.look()
            except Exception as error:  # noqa: BLE001 - Redis or a store may be away, and come back
                logger.warning("batches: cannot be looked for: %s", error)


def _is_open(pipe: Connection) -> bool:
    """Waits until it is time to look again; False if the gateway has ended."""
    try:
        if pipe.poll(LOOK_S):
            pipe.recv()
    except (EOFError, OSError):
        return False
    return True

"""The device process: one per device, spawned, and the only one that imports torch.

Three threads work on three batches: `prepare` reads and tokenizes the next one, the main thread
runs the forward pass, `commit` encodes and sends the last one. The process ends with its parent,
and with any of its threads; what it had not answered is the parent's to run again.
"""

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from celery import Celery, signals

from batchery.errors import BatcheryError
from batchery.execute import prepare
from batchery.outcome import Failed
from batchery.task import ModelTask
from batchery_worker.answers import Computed, answer
from batchery_worker.calibration_cache import CalibrationCache
from batchery_worker.functions import run_batch
from batchery_worker.link import read_frame, write_frame
from batchery_worker.loading import check_device, import_app, load_model
from batchery_worker.locate import find_task
from batchery_worker.memory import Memory, memory_of
from batchery_worker.redis_commit import RedisCommitter
from batchery_worker.served import Served
from batchery_worker.timing import EventLoop, soft_time_limit
from batchery_worker.wire import (
    NotReady,
    Ready,
    Setup,
    Waiting,
    Work,
    dump_reply,
    load_message,
)

logger = logging.getLogger("batchery.device")

#: How often the parent is told how much memory the models take, in seconds.
REPORT_S = 1.0

#: Exit code after the failure of a thread; the parent treats it like any other death.
EX_SOFTWARE = 70


@dataclass(slots=True)
class Prepared:
    """A batch between two threads."""

    work: Work
    items: list[Any]
    served: Served | None
    prepare_ms: float
    #: When it was prepared, on the clock of `time.perf_counter`.
    prepared_s: float


class Device:
    """Runs batches on one device until its parent closes the pipe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._prepared: queue.Queue[Prepared] = queue.Queue(maxsize=1)
        self._computed: queue.Queue[Computed] = queue.Queue(maxsize=1)
        self._served: dict[str, Served] = {}
        #: Id of the batch on the commit thread.
        self._committing = 0
        #: What the parent was last told of the models, and when.
        self._told: dict[str, Any] = {}
        self._told_s = 0.0
        self._app: Celery
        self._name = "cpu"
        self._setup: Setup
        #: Known from the first model on: not every batch function needs torch.
        self._memory = Memory()

    def start(self, setup: Setup) -> Ready:
        """Imports the app, loads the models and warms them up.

        Raises:
            BatcheryError: In one line, what is missing.
        """
        started_s = time.monotonic()
        self._setup = setup
        self._name = setup.device
        self._app = import_app(setup)
        # As in each process of Celery's own pools: apps open their clients and profilers here.
        signals.worker_process_init.send(sender=None)
        for name in setup.load:
            self._serve(cast(ModelTask, self._app.tasks[name]))
        return Ready(os.getpid(), time.monotonic() - started_s, self._figures())

    def run(self) -> None:
        """Works until the process is told to leave, which happens on the prepare thread."""
        for stage in (self._prepare, self._commit):
            threading.Thread(target=_or_die, args=(stage,), daemon=True).start()
        loop = EventLoop()
        while True:
            self._computed.put(self._forward(self._prepared.get(), loop.run))

    def _prepare(self) -> None:
        while True:
            try:
                work: Work = load_message(read_frame(self._end))
            except EOFError:
                # The parent is gone or wants us gone, and a forward pass may run: no ceremony.
                os._exit(0)
            started_s = time.perf_counter()
            items = [item for _, part, _ in work.jobs for item in part]
            served = self._served.get(work.task)
            if served is not None:
                items = prepare(served.model, items, work.keywords)
            prepared_s = time.perf_counter()
            prepare_ms = (prepared_s - started_s) * 1e3
            self._prepared.put(Prepared(work, items, served, prepare_ms, prepared_s))

    def _forward(self, batch: Prepared, resolve: Callable[[Any], Any]) -> Computed:
        work, items, served = batch.work, batch.items, batch.served
        started_s = time.perf_counter()
        done = Computed(work, prepare_ms=batch.prepare_ms, computed_s=started_s)
        done.queued_ms = (started_s - batch.prepared_s) * 1e3
        try:
            task = find_task(self._app, work.task)
            if served is None and isinstance(task, ModelTask):
                # A model of a queue that this worker got to know only after its start.
                served = self._serve(task)
                items = prepare(served.model, items, work.keywords)
        except BatcheryError as error:
            done.outcomes = [Failed(error) for _ in items]
            return done
        started_s = time.perf_counter()
        if served is not None:
            limit = partial(soft_time_limit, work.soft_time_limit_s)
            done.outcomes, done.tokens, done.computed_tokens = served.compute(items, work, limit)
        else:
            done.outcomes = run_batch(task, work, items, resolve)
        done.computed_s = time.perf_counter()
        done.forward_ms = (done.computed_s - started_s) * 1e3
        done.figures = self._news()
        return done

    def _commit(self) -> None:
        # Celery gives each thread a backend of its own.
        backend: Any = self._app.backend
        committer = RedisCommitter(backend, self._tell_waiting)
        while True:
            batch = self._computed.get()
            self._committing = batch.work.id
            batch.queued_ms += (time.perf_counter() - batch.computed_s) * 1e3
            done = answer(batch, self._name, committer, backend)
            write_frame(self._end, dump_reply(done))

    def _tell_waiting(self) -> None:
        write_frame(self._end, dump_reply(Waiting(self._committing)))

    def _serve(self, task: ModelTask) -> Served:
        if task.name not in self._served:
            check_device(self._name)
            self._memory = memory_of(self._name, self._setup.memory_fraction)
            before_bytes = self._memory.allocated_bytes()
            model = load_model(task, self._name)
            weights_bytes = self._memory.allocated_bytes() - before_bytes
            self._served[task.name] = Served(
                task.name, model, self._name, self._memory, weights_bytes
            )
            if task.name in self._setup.calibrate:
                self._served[task.name].calibrate(CalibrationCache(self._setup.cache_dir))
        return self._served[task.name]

    def _news(self) -> dict[str, Any] | None:
        """What the parent shall know of the models; None where it was told a moment ago."""
        if self._models() == self._told and time.monotonic() - self._told_s < REPORT_S:
            return None
        return self._figures()

    def _figures(self) -> dict[str, Any]:
        self._told, self._told_s = self._models(), time.monotonic()
        return {"models": self._told, "memory": self._memory.figures()}

    def _models(self) -> dict[str, Any]:
        return {name: served.figures() for name, served in self._served.items()}


def _or_die(stage: Callable[[], None]) -> None:
    """Ends the process with the thread, whose batches would never be answered."""
    try:
        stage()
    except BaseException:
        logger.critical("device thread failed; the process ends", exc_info=True)
        os._exit(EX_SOFTWARE)


def _leave_signals_to_parent() -> None:
    """Ctrl-C reaches the whole process group, but it is the parent that decides when to end."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(each, signal.SIG_IGN)
    if sys.platform == "linux":
        # Should the parent die while a forward pass holds the interpreter, the kernel ends us.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(descriptor: int) -> None:
    """Entry point: `python -m batchery_worker.device DESCRIPTOR`."""
    _leave_signals_to_parent()
    end = socket.socket(fileno=descriptor)
    try:
        setup: Setup = load_message(read_frame(end))
    except EOFError:
        return
    logging.basicConfig(
        level=setup.log_level,
        format=f"[%(asctime)s: %(levelname)s/device {setup.device}] %(message)s",
    )
    device = Device(end)
    try:
        ready = device.start(setup)
    except Exception as error:
        logger.debug("start failed", exc_info=True)
        known = isinstance(error, BatcheryError)
        text = str(error) if known else f"{setup.app}: {type(error).__name__}: {error}"
        name = type(error).__name__ if known else "AppNotImportable"
        write_frame(end, dump_reply(NotReady(name, text)))
        return
    write_frame(end, dump_reply(ready))
    device.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))

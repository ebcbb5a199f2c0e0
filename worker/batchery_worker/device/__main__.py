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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from celery import Celery, signals

from batchery.errors import BatcheryError
from batchery.execution.batch import prepare
from batchery.outcomes import Failed
from batchery.task import ModelTask
from batchery_worker.cache.single_flight import Folding, Reuse
from batchery_worker.cache.store import ResultCache
from batchery_worker.commit.committer import RedisCommitter
from batchery_worker.device.functions import EventLoop, run_batch, soft_time_limit
from batchery_worker.device.loading import (
    check_device,
    find_task,
    identity_of,
    import_app,
    load_model,
    memory_of,
)
from batchery_worker.device.reply import Computed, answer
from batchery_worker.device.served_model import Served
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.ipc.messages import (
    NotReady,
    Ready,
    Setup,
    Waiting,
    Work,
    dump_reply,
    load_message,
)
from batchery_worker.memory import Memory

logger = logging.getLogger("batchery.device")

#: How often the parent is told how much memory the models take, in seconds.
REPORT_S = 1.0

#: Exit code after the failure of a thread; the parent treats it like any other death.
EX_SOFTWARE = 70


@dataclass(slots=True)
class Prepared:
    """A batch between two threads."""

    work: Work
    #: Those that have to be computed.
    items: list[Any]
    served: Served | None
    folding: Folding | None
    prepare_ms: float
    #: When it was prepared, on the clock of `time.perf_counter`.
    prepared_s: float


class Device:
    """Runs batches on one device until its parent closes the pipe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        # These queues have no limit: the parent sends at most `DEVICE_DEPTH` batches. A reader of a
        # queue with a limit wakes up three times as late, after 20 us instead of 6.
        self._prepared: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        #: The batch whose first pass was begun while the last one was computed.
        self._next: Prepared | None = None
        self._computed: queue.SimpleQueue[Computed] = queue.SimpleQueue()
        self._served: dict[str, Served] = {}
        #: Batches that the commit thread was given, and those that it has answered; each is counted
        #: by one thread.
        self._given = self._answered = 0
        #: Id of the batch that is being committed.
        self._committing = 0
        #: What the parent was last told of the models, and when.
        self._told: dict[str, Any] = {}
        self._told_s = 0.0
        self._app: Celery
        self._committer: RedisCommitter
        self._name = "cpu"
        self._setup: Setup
        #: Known from the first model on: not every batch function needs torch.
        self._memory = Memory()
        self._reuse: Reuse

    def start(self, setup: Setup) -> Ready:
        """Imports the app, loads the models and warms them up.

        Raises:
            BatcheryError: In one line, what is missing.
        """
        started_s = time.monotonic()
        self._setup = setup
        self._name = setup.device
        self._app = import_app(setup)
        self._reuse = Reuse(ResultCache(self._app.backend))
        # As in each process of Celery's own pools: apps open their clients and profilers here.
        signals.worker_process_init.send(sender=None)
        for name in setup.load:
            self._serve(cast(ModelTask, self._app.tasks[name]))
        return Ready(os.getpid(), time.monotonic() - started_s, self._figures())

    def run(self) -> None:
        """Works until the process is told to leave, which happens on the prepare thread."""
        self._committer = RedisCommitter(self._app.backend, self._tell_waiting)
        for stage in (self._prepare, self._commit):
            threading.Thread(target=_or_die, args=(stage,), daemon=True).start()
        loop = EventLoop()
        while True:
            batch, self._next = self._next or self._prepared.get(), None
            computed = self._forward(batch, loop.run)
            if self._given == self._answered and self._next is None and self._prepared.empty():
                # Nothing else to do meanwhile: another thread would only begin later.
                self._answer(computed)
            else:
                self._given += 1
                self._computed.put(computed)

    def _prepare(self) -> None:
        while True:
            try:
                work: Work = load_message(read_frame(self._end))
            except EOFError:
                # The parent is gone or wants us gone, and a forward pass may run: no ceremony.
                os._exit(0)
            started_s = time.perf_counter()
            served = self._served.get(work.task)
            items, folding = self._choose(work, served)
            prepared_s = time.perf_counter()
            prepare_ms = (prepared_s - started_s) * 1e3
            self._prepared.put(Prepared(work, items, served, folding, prepare_ms, prepared_s))

    def _choose(self, work: Work, served: Served | None) -> tuple[list[Any], Folding | None]:
        """The items that have to be computed, prepared where their model is there."""
        items = [item for _, part, _ in work.jobs for item in part]
        folding = self._reuse.begin(work, items, served.identity if served is not None else "")
        if folding is not None:
            items = [items[place] for place in folding.places]
        if served is not None:
            items = prepare(served.model, items, work.keywords)
        return items, folding

    def _forward(self, batch: Prepared, resolve: Callable[[Any], Any]) -> Computed:
        work, items, served, folding = batch.work, batch.items, batch.served, batch.folding
        started_s = time.perf_counter()
        done = Computed(work, prepare_ms=batch.prepare_ms, computed_s=started_s)
        done.queued_ms = (started_s - batch.prepared_s) * 1e3
        try:
            task = find_task(self._app, work.task)
            if served is None and isinstance(task, ModelTask):
                # A model of a queue that this worker got to know only after its start.
                served = self._serve(task)
                items, folding = self._choose(work, served)
        except BatcheryError as error:
            done.outcomes = [Failed(error) for _, part, _ in work.jobs for _ in part]
            return done
        started_s = time.perf_counter()

        def run(part: list[Any]) -> list[Any]:
            if served is None:
                return run_batch(task, work, part, resolve)
            limit = partial(soft_time_limit, work.soft_time_limit_s)
            outcomes, tokens, computed_tokens = served.compute(part, work, limit, self._begin_next)
            done.tokens += tokens
            done.computed_tokens += computed_tokens
            return outcomes

        done.outcomes = self._reuse.run(folding, items, run)
        done.folding = folding
        done.computed_s = time.perf_counter()
        done.forward_ms = (done.computed_s - started_s) * 1e3
        done.figures = self._news()
        return done

    def _begin_next(self) -> None:
        """Gives the device the first pass of the next batch, if that one is there already."""
        if self._next is None:
            with suppress(queue.Empty):
                self._next = self._prepared.get_nowait()
        # What is to be computed of a batch with a folding depends on the one before it.
        if self._next is not None and self._next.served and self._next.folding is None:
            self._next.served.begin(self._next.items, self._next.work)

    def _commit(self) -> None:
        while True:
            self._answer(self._computed.get())
            self._answered += 1

    def _answer(self, batch: Computed) -> None:
        self._committing = batch.work.id
        batch.queued_ms += (time.perf_counter() - batch.computed_s) * 1e3
        done = answer(batch, self._name, self._committer, self._app.backend, self._reuse)
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
            served = Served(task.name, model, self._name, self._memory, weights_bytes)
            served.identity = identity_of(task, model)
            self._served[task.name] = served
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

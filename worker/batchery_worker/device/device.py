"""The device process: one per device, spawned, and the only one that imports torch.

Its loop takes a batch, runs it, and has it answered. Three threads work on three batches: the
feeder takes and tokenizes the next one, the main thread runs the forward passes, `commit` encodes
and sends the last one. A device with nothing else to do leaves all of that to the main thread.
Between two passes the main thread looks whether an urgent batch has come, and runs it first. The
process ends with its worker, and with any of its threads.
"""

import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from celery import Celery, signals
from kombu.utils.imports import symbol_by_name

from batchery.device_names import main_device
from batchery.errors import BatcheryError, DeviceDied
from batchery.outcomes import Failed
from batchery.task import BatchTask
from batchery_worker.batch import DeviceBatch
from batchery_worker.device.answerer import Answerer
from batchery_worker.device.feed import Feed
from batchery_worker.device.functions import EventLoop
from batchery_worker.device.pieces import PieceWriter
from batchery_worker.device.runner import Between, Runner, RunnerContext
from batchery_worker.device.start import check_device, find_memory, import_app, refuse_start
from batchery_worker.device.started import StartedStates
from batchery_worker.dispatch.poison import find_dead_items
from batchery_worker.ipc.framing import write_frame
from batchery_worker.ipc.logs import redirect_prints
from batchery_worker.ipc.messages import (
    Began,
    Ended,
    Loaded,
    Loads,
    NotReady,
    Parted,
    Ready,
    Reply,
    ResultsWait,
    Running,
    Setup,
    dump_reply,
)
from batchery_worker.result_cache import ResultCache, SingleFlight
from batchery_worker.work import Cancel, Work

logger = logging.getLogger("batchery.device")

#: From how long on a batch is worth a second thread, which prepares the next one meanwhile; to wake
#: that thread takes 0.1 ms.
LONG_MS = 2.0

#: What runs the batches of a feeder.
FEEDER_RUNNER = "batchery_worker.feeders.runner:FeederRunner"

#: Exit code after the failure of a thread; the worker treats it like any other death.
EX_SOFTWARE = 70

#: What is said of a batch, and matters to the worker only if the time of that batch is limited.
OF_BATCHES = (Began, Loads, Loaded, ResultsWait)


class Device:
    """Runs the batches that its feed has, until its worker tells it to stop."""

    def __init__(self, end: socket.socket) -> None:
        """Reads nothing yet; `end` is that of the pipe to the worker."""
        self._end = end
        #: Two threads may have something to tell at once.
        self._telling = threading.Lock()
        #: Ids of the batches that the worker knows of.
        self._told: set[int] = set()
        #: The batch whose function runs.
        self.current: Work | None = None
        #: How long the last batch of each task took.
        self._lasted_ms: dict[str, float] = {}
        #: Batches that the main thread has taken in, in the order in which they run.
        self._ahead: deque[DeviceBatch] = deque()
        self._app: Celery
        self._setup: Setup
        self._context: RunnerContext
        #: By the name of their class.
        self._runners: dict[str, Runner] = {}
        #: The loop over the steps of its model, if that runs in slots.
        self._slot_loop: Any = None
        self._reuse: SingleFlight
        self._started: StartedStates
        self._pieces: PieceWriter
        self._answerer: Answerer
        #: Where its batches come from.
        self.feed: Feed

    # The start

    def start(self, setup: Setup, app: Celery | None = None) -> Ready:
        """Imports the app, loads the models and warms them up; connects later.

        Args:
            setup: From the worker.
            app: The worker's own, where this is a thread of its process; None imports it.

        Raises:
            BatcheryError: Says in one line what is missing.
        """
        started_s = time.monotonic()
        self._setup = setup
        if app is None:
            self._app = import_app(setup)
        else:
            check_device(setup.device)
            self._app = app
        self._reuse = SingleFlight(ResultCache(self._app.backend))
        self._pieces = PieceWriter(self._app.backend)
        self._started = StartedStates(self._app)
        self._answerer = Answerer(
            *(self._app, setup.name, self._reuse, self._pieces, self.tell, self._settle)
        )
        self._context = RunnerContext(
            *(self._app, setup, main_device(setup.device)),
            find_memory(setup.device, setup.memory_fraction),
            *(self._pieces, self.tell, lambda: self.feed.find_wanted()),
            lambda batch: self.feed.give_back(batch),
        )
        if app is None:
            # Celery's own pools send it in each process: apps open clients and profilers here.
            signals.worker_process_init.send(sender=None)
        self._load()
        if app is None:
            # After the models: the progress bars of their loading are no log.
            redirect_prints(self._app)
        resumes = self._slot_loop is None or self._slot_loop.resumes
        self.feed = Feed(
            *(self._app, setup, self._prepare, self._answerer.answer_sent),
            *(self.tell, self.figures),
            resumes=resumes,
        )
        source = self.feed.source
        source.listeners.on_parted = lambda holder: self.tell(Parted(holder))
        source.listeners.on_refused = lambda error: self.tell(NotReady(str(error)))
        return Ready(os.getpid(), time.monotonic() - started_s, self.figures())

    def _load(self) -> None:
        """Loads what must be there before the device is ready."""
        tasks: dict[str, Any] = self._app.tasks
        if self._setup.slots:
            load = symbol_by_name(tasks[self._setup.task].SlotLoop)
            self._slot_loop = load(self._context, self._finish, self._free_slot)
            return
        for task in tasks.values():
            if isinstance(task, BatchTask) and self._setup.serves(task.name):
                self._find_runner(task)

    def _find_runner(self, task: BatchTask) -> Runner:
        """What runs the batches of a task."""
        name = FEEDER_RUNNER if self._setup.feeder else task.Runner
        runner = self._runners.get(name)
        if runner is None:
            # Where a test defines a task while its worker runs, its runner may be new.
            runner = self._runners[name] = symbol_by_name(name)(self._context)
            runner.start()
        return runner

    # The loop

    def run(self) -> None:
        """Works until no more batches come."""
        for stage in (self.feed.run, self._answerer.run):
            threading.Thread(target=run_or_die, args=(stage,), daemon=True).start()
        self.run_loop(EventLoop())
        self.feed.close()

    def run_loop(self, loop: EventLoop) -> None:
        """Takes batches, and runs them, until no more come; awaits what functions return."""
        try:
            if self._slot_loop is not None:
                self._slot_loop.run(self.feed)
            while True:
                self._step(loop)
        except EOFError:
            # It may come from the code of a model.
            if not self.feed.closed.is_set():
                raise

    def _step(self, loop: EventLoop) -> None:
        """Takes a batch, runs it, and has it answered."""
        # A function, so that an idle device holds no batch, and with it a model that made room.
        self._look_ahead()
        batch = self._ahead.popleft() if self._ahead else self.feed.take()
        is_long = self._lasted_ms.get(batch.work.task, LONG_MS) >= LONG_MS
        if is_long or batch.work.is_timed:
            # The batch before it is not settled after so long; nor is its time counted before that.
            self._answerer.answer_sent()
        if is_long:
            self.feed.read_ahead()
        self._forward(batch, loop.run)
        self._lasted_ms[batch.work.task] = batch.forward_ms
        # With nothing else to do meanwhile: another thread would start later.
        # Nor behind a short one: both threads would wait for the interpreter.
        is_free = not self._ahead and self.feed.is_empty
        self._hand_over(batch, at_once=is_free or batch.forward_ms < LONG_MS)

    def _look_ahead(self) -> None:
        """Takes all batches that have arrived; an urgent one goes to the front."""
        with suppress(queue.Empty):
            while True:
                batch = self.feed.take_arrived()
                if batch.work.urgent:
                    self._ahead.appendleft(batch)
                else:
                    self._ahead.append(batch)

    def _hand_over(self, batch: DeviceBatch, *, at_once: bool = False) -> None:
        self.feed.end(batch)
        self._answerer.hand_over(batch, at_once=at_once)

    def _settle(self, batch: DeviceBatch) -> None:
        """Settles the jobs of a batch that is answered; on whichever thread has done that."""
        if batch.work.id in self._told:
            self._told.discard(batch.work.id)
            self._write(Ended(batch.work.id))
        self.feed.settle(batch)

    # Jobs in slots

    def _finish(self, batch: DeviceBatch, is_last: bool) -> None:
        """Has a job answered that has left its slots; on the commit thread, if others go on."""
        self._hand_over(batch, at_once=is_last)
        self._answerer.answer_sent()

    def _free_slot(self, batch_id: int) -> None:
        self.feed.free_slot(batch_id)

    # Preparing, beside what runs

    def _prepare(self, batch: DeviceBatch | Cancel) -> Any:
        """Prepares what runs next; on either of two threads, never on both at once."""
        if isinstance(batch, Cancel):
            return batch
        work = batch.work
        if work.contexts:
            # Before the function, which may set states of its own.
            with self._excused(work):
                self._started.store(work)
        if self._slot_loop is not None:
            with self._excused(work):
                pieces = self._pieces.read(work) if work.pieces is not None else ()
            return self._slot_loop.prepare(batch, pieces)
        started_s = time.perf_counter()
        self._choose_items(batch)
        batch.ended_s = time.perf_counter()
        batch.prepare_ms = (batch.ended_s - started_s) * 1e3
        if work.pieces is not None:
            self._pieces.open(work)
        return batch

    def _choose_items(self, batch: DeviceBatch) -> None:
        """Finds the items that have to be computed, and prepares them."""
        work, runner = batch.work, self._find_runner(batch.task)
        identity = runner.choose(batch)
        items = [item for _, part, _ in work.jobs for item in part]
        if work.cache is not None:
            with self._excused(work):
                batch.deduped = self._reuse.begin(work, work.cache, items, identity)
            items = [items[position] for position in batch.deduped.positions]
        batch.items = runner.prepare(batch, items)

    @contextmanager
    def _excused(self, work: Work) -> Iterator[None]:
        """Keeps the time in which Redis is asked out of the time of a batch: it may be away."""
        self.tell(ResultsWait(work.id))
        yield
        self.tell(ResultsWait(work.id, is_over=True))

    # Running

    def _forward(self, batch: DeviceBatch, resolve: Callable[[Any], Any]) -> None:
        """Fills in the outcomes of a batch."""
        work, runner = batch.work, self._find_runner(batch.task)
        if work.urgent:
            self.tell(Began(work.id))
        batch.queued_ms = (time.perf_counter() - batch.ended_s) * 1e3
        try:
            if runner.make_ready(batch):
                self._choose_items(batch)
        except BatcheryError as error:
            batch.outcomes = [Failed(error) for _, part, _ in work.jobs for _ in part]
            batch.deduped, batch.ended_s = None, time.perf_counter()
            return
        self.feed.note_begun(batch)
        started_s = time.perf_counter()
        interrupted_s = 0.0

        def run_urgent() -> None:
            nonlocal interrupted_s
            interrupted_s -= time.perf_counter()
            if not work.urgent:
                self._run_urgent(resolve)
            interrupted_s += time.perf_counter()

        # Behind an urgent batch comes the rest of what it has interrupted.
        start_next = (lambda: None) if work.urgent else self._start_next
        between = Between(run_urgent, start_next, resolve)
        self.current = work
        if work.culprits is not None:
            batch.outcomes = self._run_one_by_one(batch, runner, between, work.culprits)
        else:
            batch.outcomes = self._reuse.run(
                batch.deduped, batch.items, lambda items: runner.run(batch, items, between)
            )
        self.current = None
        batch.ended_s = time.perf_counter()
        batch.forward_ms = (batch.ended_s - started_s - interrupted_s) * 1e3

    def _run_one_by_one(
        self, batch: DeviceBatch, runner: Runner, between: Between, culprits: Sequence[int]
    ) -> list[Any]:
        """Runs the items of a suspect, but those that end devices; notes each before."""
        (task_id, items, form), outcomes = batch.work.jobs[0], []
        dead_items = find_dead_items(culprits)
        for place, prepared in enumerate(batch.items):
            if place in dead_items:
                text = f"{batch.work.task}[{task_id}]: item {place} ended its device twice, alone"
                outcomes.append(Failed(DeviceDied(f"{text}; it is not run again")))
                continue
            self.feed.note_items(batch, [*culprits, place])
            work = replace(batch.work, jobs=[(task_id, [items[place]], form)])
            one = replace(batch, work=work, items=[prepared])
            outcomes += runner.run(one, [prepared], between)
            batch.tokens, batch.computed_tokens = one.tokens, one.computed_tokens
        return outcomes

    def _run_urgent(self, resolve: Callable[[Any], Any]) -> None:
        """Runs the urgent batches that have come, in the midst of another one."""
        self._look_ahead()
        while self._ahead and self._ahead[0].work.urgent and self._can_begin(self._ahead[0]):
            interrupted, urgent = self.current, self._ahead.popleft()
            self._forward(urgent, resolve)
            self.current = interrupted
            self._hand_over(urgent)
            self._look_ahead()

    def _can_begin(self, batch: DeviceBatch) -> bool:
        return self._find_runner(batch.task).may_interrupt(batch)

    def _start_next(self) -> None:
        """Starts the first pass of the next batch, if that batch is prepared."""
        self._look_ahead()
        if not self._ahead:
            return
        batch = self._ahead[0]
        # An urgent one runs before the passes that were started. Single flight: which items are
        # left to compute depends on the batch before.
        if batch.deduped is None and not batch.work.urgent:
            self._find_runner(batch.task).start_ahead(batch)

    # What the worker is told

    def tell(self, reply: Reply) -> None:
        """Tells the worker; of batches only those whose time is limited, or that must end.

        Raises:
            OSError: The worker is gone.
        """
        if isinstance(reply, Running):
            self._told.add(reply.id)
        elif isinstance(reply, OF_BATCHES) and reply.id not in self._told:
            return
        self._write(reply)

    def _write(self, reply: Reply) -> None:
        frame = dump_reply(reply)
        with self._telling:
            write_frame(self._end, frame)

    def figures(self) -> dict[str, Any]:
        """Figures of its models and its memory; from any thread."""
        parts = [*self._runners.values()] if self._slot_loop is None else [self._slot_loop]
        models = {name: each for part in parts for name, each in part.figures().items()}
        return {"models": models, "memory": self._context.memory.figures()}


def run_or_die(stage: Callable[[], None]) -> None:
    """Ends the process if the thread fails: its batches would never be answered."""
    try:
        stage()
    except BaseException:
        logger.critical("device thread failed; the process ends", exc_info=True)
        os._exit(EX_SOFTWARE)


def begin(device: Device, setup: Setup, app: Celery | None = None) -> bool:
    """Starts a device, and reports that to its worker; see `Device.start`.

    Returns:
        Whether it is ready.

    Raises:
        OSError: The worker is gone.
    """
    try:
        ready = device.start(setup, app)
    except Exception as error:  # noqa: BLE001 - the code of an app or a model
        device.tell(refuse_start(error, setup.app or setup.device))
        return False
    device.tell(ready)
    return True

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from celery import Celery, signals

from batchery.device_names import main_device
from batchery.errors import BatcheryError
from batchery.execution.batch import prepare
from batchery.installation import get_installation
from batchery.model import StepModel
from batchery.model_task import ModelTask
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.batch import DeviceBatch
from batchery_worker.commit.committer import broker_client
from batchery_worker.device.answerer import Answerer
from batchery_worker.device.feed import Feed
from batchery_worker.device.functions import EventLoop, drop_pieces, run_batch, soft_time_limit
from batchery_worker.device.loading import (
    build_identity,
    check_device,
    find_memory,
    find_task,
    import_app,
    load_model,
    read_version,
    serve_model,
)
from batchery_worker.device.model_pool import ModelPool
from batchery_worker.device.pieces import PieceWriter
from batchery_worker.device.reload import Reloader
from batchery_worker.device.slot_loop import SlotJob, SlotLoop
from batchery_worker.device.started import StartedStates
from batchery_worker.device_pool.weights import estimate_bytes
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
    Reload,
    Reply,
    ResultsWait,
    Running,
    Setup,
    dump_reply,
)
from batchery_worker.memory import Memory
from batchery_worker.result_cache import ResultCache, SingleFlight
from batchery_worker.served_model import LoadedModel
from batchery_worker.work import Cancel, Work

logger = logging.getLogger("batchery.device")

#: From how long on a batch is worth a second thread, which prepares the next one meanwhile; to wake
#: that thread takes 0.1 ms.
LONG_MS = 2.0

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
        #: By name of a task: the settings of its model, where they are not those of the app.
        self._versions: dict[str, ModelSettings] = {}
        self._reloader = Reloader(
            lambda name: self._models.find_dimensions(name),
            self._load_version,
            self._swap,
            lambda: self._memory.release(),
            lambda reply: self.tell(reply._replace(figures=self.figures())),
        )
        #: The loop over the steps of its model, if that runs in slots.
        self._slot_loop: SlotLoop | None = None
        self._memory = Memory()
        self._name = "cpu"
        self._app: Celery
        self._setup: Setup
        self._models: ModelPool
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
        self._name = main_device(setup.device)
        if app is None:
            self._app = import_app(setup)
        else:
            check_device(setup.device)
            self._app = app
        self._memory = find_memory(setup.device, setup.memory_fraction)
        self._reuse = SingleFlight(ResultCache(self._app.backend))
        self._pieces = PieceWriter(self._app.backend, partial(broker_client, self._app))
        self._started = StartedStates(self._app)
        self._answerer = Answerer(
            *(self._app, setup.name, self._reuse, self._pieces, self.tell, self._settle)
        )
        if app is None:
            # Celery's own pools send it in each process: apps open clients and profilers here.
            signals.worker_process_init.send(sender=None)
        self._versions = dict(setup.versions)
        self._models = ModelPool(self._load, self._estimate, setup, self._memory)
        if setup.slots:
            task = cast(ModelTask, self._app.tasks[setup.task])
            model = load_model(task, setup.device, self._versions.get(task.name))
            self._slot_loop = SlotLoop(
                *(cast(StepModel, model), setup, self._finish, self._free_slot, self.tell),
                *(self._pieces, read_version(model)),
            )
        else:
            self._models.load_first(setup.load)
        if app is None:
            # After the models: the progress bars of their loading are no log.
            redirect_prints(self._app)
        resumes = self._slot_loop is None or self._slot_loop.resumes
        self.feed = Feed(self._app, setup, self._prepare, self.tell, self.figures, resumes=resumes)
        source = self.feed.source
        source.on_parted = lambda holder: self.tell(Parted(holder))
        source.on_refused = lambda error: self.tell(NotReady(type(error).__name__, str(error)))
        return Ready(os.getpid(), time.monotonic() - started_s, self.figures())

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
        # A function, so that an idle device holds no batch, and with it a model that was replaced.
        self._look_ahead()
        batch = self._ahead.popleft() if self._ahead else self.feed.take()
        if self._lasted_ms.get(batch.work.task, LONG_MS) >= LONG_MS:
            self.feed.read_ahead()
        with self._reloader.turn.gate:
            pass  # A thread that builds a model may hold it.
        with self._reloader.turn.running:
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
        self._answerer.hand_over(batch, at_once=at_once)

    def _settle(self, batch: DeviceBatch) -> None:
        """Settles the jobs of a batch that is answered; on whichever thread has done that."""
        if batch.work.id in self._told:
            self._told.discard(batch.work.id)
            self._write(Ended(batch.work.id))
        self.feed.end(batch)
        self._reloader.unanswered.discard(batch.work.id)

    # Jobs in slots

    def _finish(self, batch: DeviceBatch, is_last: bool) -> None:
        """Has a job answered that has left its slots; on the commit thread, if others go on."""
        self._hand_over(batch, at_once=is_last)

    def _free_slot(self, batch_id: int) -> None:
        self.feed.free_slot(batch_id)

    # Preparing, beside what runs

    def _prepare(self, batch: DeviceBatch | Cancel) -> DeviceBatch | SlotJob | Cancel:
        """Prepares what runs next; on either of two threads, never on both at once."""
        if isinstance(batch, Cancel):
            return batch
        work = batch.work
        if self._slot_loop is not None:
            with self._excused(work):
                self._started.store(work)
                pieces = self._pieces.read(work) if work.pieces is not None else ()
            return self._slot_loop.prepare(batch, pieces)
        # Before its model is chosen: that one is not freed until then.
        self._reloader.unanswered.add(work.id)
        started_s = time.perf_counter()
        batch.served = self._models.loaded.get(work.task)
        self._choose_items(batch)
        if work.contexts:
            # Before the function, which may set states of its own.
            with self._excused(work):
                self._started.store(work)
        batch.ended_s = time.perf_counter()
        batch.prepare_ms = (batch.ended_s - started_s) * 1e3
        if work.pieces is not None:
            self._pieces.open(work)
        return batch

    def _choose_items(self, batch: DeviceBatch) -> None:
        """Finds the items that have to be computed; prepares them if their model is loaded."""
        work, served = batch.work, batch.served
        items = [item for _, part, _ in work.jobs for item in part]
        if work.cache is not None:
            with self._excused(work):
                identity = served.identity if served is not None else ""
                batch.deduped = self._reuse.begin(work, work.cache, items, identity)
            items = [items[position] for position in batch.deduped.positions]
        batch.items = items if served is None else prepare(served.model, items, work.keywords)

    @contextmanager
    def _excused(self, work: Work) -> Iterator[None]:
        """Keeps the time in which Redis is asked out of the time of a batch: it may be away."""
        self.tell(ResultsWait(work.id))
        yield
        self.tell(ResultsWait(work.id, is_over=True))

    # Running

    def _forward(self, batch: DeviceBatch, resolve: Callable[[Any], Any]) -> None:
        """Fills in the outcomes of a batch."""
        work = batch.work
        if work.urgent:
            self.tell(Began(work.id))
        batch.queued_ms = (time.perf_counter() - batch.ended_s) * 1e3
        if batch.served is None or not batch.served.is_loaded:
            try:
                if isinstance(batch.task, ModelTask):
                    self._make_ready(batch)
            except BatcheryError as error:
                batch.outcomes = [Failed(error) for _, part, _ in work.jobs for _ in part]
                batch.deduped, batch.ended_s = None, time.perf_counter()
                return
        self.feed.note_begun(batch)
        items, served, deduped = batch.items, batch.served, batch.deduped
        started_s = time.perf_counter()
        interrupted_s = 0.0

        def run_urgent() -> None:
            nonlocal interrupted_s
            interrupted_s -= time.perf_counter()
            if not work.urgent:
                self._run_urgent(resolve)
            interrupted_s += time.perf_counter()

        def run(part: list[Any]) -> list[Any]:
            if served is None:
                return self._run_function(batch, part, resolve, run_urgent)
            limit = partial(soft_time_limit, work.soft_time_limit_s)
            # Behind an urgent batch comes the rest of what it has interrupted.
            start_next = (lambda: None) if work.urgent else self._start_next
            outcomes, tokens, computed_tokens = served.compute(
                part, work, limit, start_next, run_urgent
            )
            batch.tokens += tokens
            batch.computed_tokens += computed_tokens
            return outcomes

        self.current = work
        batch.outcomes = self._reuse.run(deduped, items, run)
        self.current = None
        batch.ended_s = time.perf_counter()
        batch.forward_ms = (batch.ended_s - started_s - interrupted_s) * 1e3
        batch.version = served.version if served is not None else ""

    def _run_function(
        self,
        batch: DeviceBatch,
        items: list[Any],
        resolve: Callable[[Any], Any],
        run_urgent: Callable[[], None],
    ) -> list[Any]:
        # Of results that are cached or shared there are no pieces.
        is_streamed = batch.work.pieces is not None and batch.deduped is None
        receive = self._pieces.receive(batch.work) if is_streamed else drop_pieces
        outcomes = run_batch(
            batch.task, batch.work, self._name, items, resolve, run_urgent, receive
        )
        if Failed in map(type, outcomes):
            # As for models: where the context of the device is dead, this ends the process.
            self._memory.wait()
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
        """Whether a batch loads no model, for which the one that it interrupts might have to go."""
        if batch.served is not None:
            return batch.served.is_loaded
        return not isinstance(batch.task, ModelTask)

    def _start_next(self) -> None:
        """Starts the first pass of the next batch, if that batch is prepared."""
        self._look_ahead()
        if not self._ahead:
            return
        batch = self._ahead[0]
        # An urgent one runs before the passes that were started. Single flight: which items are
        # left to compute depends on the batch before.
        if not (batch.served and batch.served.is_loaded):
            return
        if batch.deduped is None and not batch.work.urgent:
            batch.served.start(batch.items, batch.work)

    # Models

    def _make_ready(self, batch: DeviceBatch) -> None:
        """Loads the model of a batch, if it is not there, and prepares the items with it.

        Raises:
            BatcheryError: The model cannot be loaded.
        """
        served = self._serve(batch)
        if served is not batch.served:
            batch.served = served
            self._choose_items(batch)

    def _serve(self, batch: DeviceBatch) -> LoadedModel:
        """Makes the model of a batch ready; the worker must not take that for a pass that hangs."""
        work = batch.work
        if work.task in self._models.loaded:
            return self._models.loaded[work.task]
        began_s = time.monotonic()
        self.tell(Loads(work.id, self._models.expect_load_s(work.task)))
        try:
            return self._models.serve(work.task, self.feed.find_wanted())
        finally:
            batch.load_s = time.monotonic() - began_s
            self.tell(Loaded(work.id, self.figures()))

    def _load(self, name: str) -> LoadedModel:
        served = self._load_version(name, None)
        self._reloader.note_threads()
        return served

    def reload(self, order: Reload) -> None:
        """Loads another version of a model beside the one that serves; the worker is told."""
        self._reloader.begin(order)

    def _swap(
        self, new: LoadedModel, settings: ModelSettings | None, load_s: float
    ) -> LoadedModel | None:
        """Puts another version into the place of a model; while no batch runs."""
        old = self._models.replace(new, load_s)
        if settings is not None:
            self._versions[new.name] = settings
        return old

    def _estimate(self, name: str) -> int | None:
        task = cast(ModelTask, self._app.tasks[name])
        return estimate_bytes(self._versions.get(name) or task.model_settings, self._name)

    def _load_version(self, name: str, settings: ModelSettings | None) -> LoadedModel:
        task = cast(ModelTask, find_task(self._app, name))
        make_model = partial(task.make_model, settings or self._versions.get(name))
        served = serve_model(name, make_model, self._setup.device, self._memory, gives_json=True)
        # Each batch has it, too; but somebody may look before the first one.
        own = get_installation(self._app).settings.max_batch_tokens
        served.limit(task.max_batch_tokens or own)
        served.identity = build_identity(task, served.model)
        served.version = read_version(served.model)
        return served

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
        models = self._models.figures()
        if self._slot_loop is not None:
            models[self._setup.task].update(state="loaded", **self._slot_loop.figures())
        return {"models": models, "memory": self._memory.figures()}


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
    except Exception as error:
        logger.debug("start failed", exc_info=True)
        name, text = type(error).__name__, str(error)
        if not isinstance(error, BatcheryError):
            text = f"{setup.app or setup.device}: {name}: {error}"
            name = "AppNotImportable"
        device.tell(NotReady(name, text))
        return False
    device.tell(ready)
    return True

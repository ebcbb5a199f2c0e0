"""The device process: one per device, spawned, and the only one that imports torch.

Three threads work on three batches: one reads and tokenizes the next one, the main thread runs the
forward passes, `commit` encodes and sends the last one. A device with nothing else to do leaves all
of that to the main thread. Between two passes the main thread
looks whether an urgent batch has come, and runs it first. The process ends with its parent, and
with any of its threads. The parent runs again what the process had not answered.
"""

import logging
import math
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
from batchery.task import BatchTask
from batchery_worker.commit.committer import RedisCommitter, broker_client
from batchery_worker.device.functions import EventLoop, run_batch, soft_time_limit
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
from batchery_worker.device.reply import DeviceBatch, answer, report_dropped
from batchery_worker.device.served_model import LoadedModel
from batchery_worker.device.started import StartedStates
from batchery_worker.device.steps import SlotJob, StepLoop
from batchery_worker.device_pool.weights import estimate_bytes
from batchery_worker.ipc.framing import write_frame
from batchery_worker.ipc.logs import redirect_prints
from batchery_worker.ipc.messages import (
    Began,
    Cancel,
    Loaded,
    Loads,
    NotReady,
    Ready,
    Reply,
    ResultsWait,
    Setup,
    Work,
    dump_reply,
)
from batchery_worker.memory import Memory
from batchery_worker.result_cache import DedupedBatch, ResultCache, SingleFlight

logger = logging.getLogger("batchery.device")

#: How often the parent is told how much memory the models take, in seconds.
REPORT_S = 1.0

#: From how long on a batch is worth a second thread, which prepares the next one meanwhile; to wake
#: that thread takes 0.1 ms.
LONG_MS = 2.0

#: Exit code after the failure of a thread; the parent treats it like any other death.
EX_SOFTWARE = 70


@contextmanager
def excused(work: Work, tell: Callable[[Reply], None], *, asks: bool) -> Iterator[None]:
    """Keeps the time in which Redis is asked out of the time of a batch: Redis may be away.

    Args:
        work: The batch.
        tell: Sends a message to the parent.
        asks: Whether Redis may be asked for this batch.
    """
    if asks and work.is_timed:
        tell(ResultsWait(work.id))
    yield
    if asks and work.is_timed:
        tell(ResultsWait(work.id, is_over=True))


class Device:
    """Runs batches on one device, whoever brings them."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        #: Two threads may have something to tell at once.
        self._telling = threading.Lock()
        #: The batch whose function runs.
        self.current: Work | None = None
        #: How long the last batch of each task took.
        self._lasted_ms: dict[str, float] = {}
        #: Batches that the main thread has taken in, in the order in which they run.
        self._ahead: deque[DeviceBatch] = deque()
        self._computed: queue.SimpleQueue[DeviceBatch] = queue.SimpleQueue()
        self._models = ModelPool(self._load, self._estimate)
        #: By name of a task: the settings of its model, where they are not those of the app.
        self._versions: dict[str, ModelSettings] = {}
        self._reloader = Reloader(
            lambda name: self._models.find_dimensions(name),
            self._load_version,
            self._swap,
            lambda: self._memory.release(),
            self.tell,
        )
        #: Number of batches given to the commit thread, and answered by it; one thread writes each.
        self._given = self._answered = 0
        #: Id of the batch that is being committed.
        self._committing = 0
        #: What was last reported of the models, and when.
        self._reported: dict[str, Any] = {}
        self._reported_s = -math.inf
        self._app: Celery
        self._committer: RedisCommitter
        self._pieces: PieceWriter
        self._name = "cpu"
        self._setup: Setup
        self._memory = Memory()
        self._reuse: SingleFlight
        self._started: StartedStates
        #: The loop over the steps of its model, if that runs in slots.
        self._steps: StepLoop | None = None

    def start(self, setup: Setup, app: Celery | None = None) -> Ready:
        """Imports the app, loads the models and warms them up.

        Args:
            setup: From the parent.
            app: The parent's own, where this is a thread of its process; None imports it.

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
        connect_broker = partial(broker_client, self._app)
        self._committer = RedisCommitter(self._app.backend, connect_broker, self._report_waiting)
        self._pieces = PieceWriter(self._app.backend, connect_broker)
        self._started = StartedStates(self._app)
        if app is None:
            # Celery's own pools send it in each process: apps open clients and profilers here.
            signals.worker_process_init.send(sender=None)
        self._versions = dict(setup.versions)
        self._models = ModelPool(self._load, self._estimate, setup, self._memory)
        if setup.slots:
            task = cast(ModelTask, self._app.tasks[setup.task])
            model = load_model(task, setup.device, self._versions.get(task.name))
            told = self._finish, self.tell, self._pieces, read_version(model)
            self._steps = StepLoop(cast(StepModel, model), setup, *told)
        else:
            self._models.load_first(setup.load)
        if app is None:
            # After the models: the progress bars of their loading are no log.
            redirect_prints(self._app)
        resumes = self._steps is None or self._steps.resumes
        return Ready(os.getpid(), time.monotonic() - started_s, self._figures(), resumes)

    def tell(self, reply: Reply) -> None:
        """Writes a message to the parent.

        Raises:
            OSError: The parent is gone.
        """
        self._write(reply)

    def _write(self, reply: Reply) -> None:
        frame = dump_reply(reply)
        with self._telling:
            write_frame(self._end, frame)

    def run(self) -> None:
        """Works until no more batches come."""
        for stage in (self._intake.run, self._commit):
            threading.Thread(target=run_or_die, args=(stage,), daemon=True).start()
        try:
            if self._steps is not None:
                self._steps.run(self._intake)
            loop = EventLoop()
            while True:
                self._run_next(loop)
        except EOFError:
            # It may come from the code of a model.
            if not self._intake.closed.is_set():
                raise

    def _run_next(self, loop: EventLoop) -> None:
        # A function, so that an idle device holds no batch, and with it a model that was replaced.
        self._look_ahead()
        batch = self._ahead.popleft() if self._ahead else self._intake.take()
        if self._lasted_ms.get(batch.work.task, LONG_MS) >= LONG_MS:
            self._intake.read_ahead()
        with self._reloader.turn.gate:
            pass  # A thread that builds a model may hold it.
        with self._reloader.turn.running:
            computed = self._forward(batch, loop.run)
        self._lasted_ms[batch.work.task] = computed.forward_ms
        # With nothing else to do meanwhile: another thread would start later.
        # Nor behind a short one: both threads would wait for the interpreter.
        is_free = not self._ahead and self._intake.is_empty
        self._hand_over(computed, at_once=is_free or computed.forward_ms < LONG_MS)

    @property
    def _intake(self) -> Any:
        """Brings batches: its `take` waits for one, its `take_arrived` does not."""
        raise NotImplementedError

    def prepare_step(self, message: Work | Cancel) -> SlotJob | Cancel:
        """Makes a job of a message to a device with slots."""
        assert self._steps is not None
        if isinstance(message, Cancel):
            return message
        resumed = message.pieces and message.pieces.resumed
        with excused(message, self.tell, asks=bool(message.contexts or resumed)):
            self._started.store(message)
            pieces = self._pieces.read(message)
        return self._steps.prepare(message, pieces)

    def _finish(self, batch: DeviceBatch, is_last: bool) -> None:
        """Answers a job that has left its slots; on the commit thread, if others go on."""
        batch.figures = self._figures()
        self._hand_over(batch, at_once=is_last)

    def _hand_over(self, batch: DeviceBatch, *, at_once: bool = False) -> None:
        """Has a batch answered: at once if the last one was, or on the commit thread."""
        if batch.work.is_timed:
            # Its time must not count while it waits for Redis, or behind one that does.
            self.tell(ResultsWait(batch.work.id))
        if at_once and self._given == self._answered:
            self._answer(batch)
        else:
            self._given += 1
            self._computed.put(batch)

    def _look_ahead(self) -> None:
        """Takes all batches that have arrived; an urgent one goes to the front."""
        with suppress(queue.Empty):
            while True:
                batch = self._intake.take_arrived()
                if batch.work.urgent:
                    self._ahead.appendleft(batch)
                else:
                    self._ahead.append(batch)

    def _run_urgent(self, resolve: Callable[[Any], Any]) -> None:
        """Runs the urgent batches that have come, in the midst of another one."""
        self._look_ahead()
        while self._ahead and self._ahead[0].work.urgent and self._can_begin(self._ahead[0]):
            interrupted = self.current
            computed = self._forward(self._ahead.popleft(), resolve)
            self.current = interrupted
            self._hand_over(computed)
            self._look_ahead()

    def _can_begin(self, batch: DeviceBatch) -> bool:
        """Whether a batch loads no model, for which the one that it interrupts might have to go."""
        if batch.served is not None:
            return batch.served.is_loaded
        return not isinstance(self._app.tasks.get(batch.work.task), ModelTask)

    def prepare_work(self, work: Work) -> DeviceBatch:
        """Prepares a batch; on either of two threads, never on both at once."""
        # Before its model is chosen: that one is not freed until then.
        self._reloader.unanswered.add(work.id)
        started_s = time.perf_counter()
        served = self._models.loaded.get(work.task)
        items, deduped = self._choose(work, served)
        # Before the function, which may set states of its own.
        with excused(work, self.tell, asks=bool(work.contexts)):
            self._started.store(work)
        prepared_s = time.perf_counter()
        prepare_ms = (prepared_s - started_s) * 1e3
        self._pieces.open(work)
        return DeviceBatch(work, items, served, deduped, prepare_ms, prepared_s)

    def _choose(
        self, work: Work, served: LoadedModel | None
    ) -> tuple[list[Any], DedupedBatch | None]:
        """The items that have to be computed, prepared if their model is loaded."""
        items = [item for _, part, _ in work.jobs for item in part]
        with excused(work, self.tell, asks=work.cache is not None):
            deduped = self._reuse.begin(work, items, served.identity if served is not None else "")
        if deduped is not None:
            items = [items[position] for position in deduped.positions]
        if served is not None:
            items = prepare(served.model, items, work.keywords)
        return items, deduped

    def _forward(self, batch: DeviceBatch, resolve: Callable[[Any], Any]) -> DeviceBatch:
        work = batch.work
        if work.urgent:
            self.tell(Began(work.id))
        started_s = time.perf_counter()
        batch.queued_ms, batch.ended_s = (started_s - batch.ended_s) * 1e3, started_s
        if batch.served is None or not batch.served.is_loaded:
            try:
                task = find_task(self._app, work.task)
                if isinstance(task, ModelTask):
                    self._make_ready(batch)
            except BatcheryError as error:
                batch.outcomes = [Failed(error) for _, part, _ in work.jobs for _ in part]
                batch.deduped = None
                return batch
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
                # Of results that are cached or shared there are no pieces.
                receive = self._pieces.receive(None if deduped else work)
                return self._run_function(task, work, part, resolve, run_urgent, receive)
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
        self.current, batch.deduped = None, deduped
        batch.ended_s = time.perf_counter()
        batch.forward_ms = (batch.ended_s - started_s - interrupted_s) * 1e3
        batch.version = served.version if served is not None else ""
        batch.figures = self._figures()
        return batch

    def _make_ready(self, batch: DeviceBatch) -> None:
        """Loads the model of a batch, if it is not there, and prepares the items with it.

        Raises:
            BatcheryError: The model cannot be loaded.
        """
        served = self._serve(batch.work)
        if served is not batch.served:
            batch.served = served
            batch.items, batch.deduped = self._choose(batch.work, served)

    def _run_function(self, task: BatchTask, work: Work, *parts: Any) -> list[Any]:
        outcomes = run_batch(task, work, self._name, *parts)
        if Failed in map(type, outcomes):
            # As for models: where the context of the device is dead, this ends the process.
            self._memory.wait()
        return outcomes

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

    def _commit(self) -> None:
        while True:
            self._answer(self._computed.get())
            self._answered += 1

    def _answer(self, batch: DeviceBatch) -> None:
        self._committing = batch.work.id
        batch.queued_ms += (time.perf_counter() - batch.ended_s) * 1e3
        self._pieces.flush(batch.work)
        if batch.dropped is not None:
            done = report_dropped(batch, batch.dropped)
        else:
            done = answer(batch, self._setup.name, self._committer, self._app.backend, self._reuse)
        self.tell(done)
        self._reloader.unanswered.discard(batch.work.id)
        self._pieces.end(batch.work, [status for status, _ in done.jobs])

    def _report_waiting(self) -> None:
        self.tell(ResultsWait(self._committing))

    def _serve(self, work: Work) -> LoadedModel:
        """Makes the model of a batch ready; the parent must not take that for a pass that hangs."""
        if work.task in self._models.loaded:
            return self._models.loaded[work.task]
        self.tell(Loads(work.id, self._models.expect_load_s(work.task)))
        try:
            return self._models.serve(work.task, work.wanted)
        finally:
            self.tell(Loaded(work.id, self._figures()))

    def _load(self, name: str) -> LoadedModel:
        served = self._load_version(name, None)
        self._reloader.note_threads()
        return served

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

    def _figures(self) -> dict[str, Any] | None:
        """Figures for the parent; None if it got the same a moment ago."""
        models = self._models.figures() if self._models.records else {}
        if self._steps is not None:
            models[self._setup.task].update(state="loaded", **self._steps.figures())
        now_s = time.monotonic()
        if models == self._reported and now_s - self._reported_s < REPORT_S:
            return None
        self._reported, self._reported_s = models, now_s
        return {"models": models, "memory": self._memory.figures()}


def run_or_die(stage: Callable[[], None]) -> None:
    """Ends the process if the thread fails: its batches would never be answered."""
    try:
        stage()
    except BaseException:
        logger.critical("device thread failed; the process ends", exc_info=True)
        os._exit(EX_SOFTWARE)


def begin(device: Device, setup: Setup, app: Celery | None = None) -> bool:
    """Starts a device, and reports that to its parent; see `Device.start`.

    Returns:
        Whether it is ready.

    Raises:
        OSError: The parent is gone.
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

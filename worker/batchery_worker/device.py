"""The device process: one per device, spawned, and the only one that imports torch.

Three threads work on three batches: `prepare` reads and tokenizes the next one, the main thread
runs the forward pass, `commit` encodes and sends the last one. The process ends with its parent,
and with any of its threads; what it had not answered is the parent's to run again.
"""

import ctypes
import importlib
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

from batchery.errors import BatcheryError, ModelLoadError
from batchery.execute import compute, prepare
from batchery.model import Model
from batchery.outcome import Failed
from batchery.task import ModelTask
from batchery_worker.answers import Computed, answer
from batchery_worker.functions import run_batch
from batchery_worker.link import read_frame, write_frame
from batchery_worker.locate import find_task
from batchery_worker.planner import plan
from batchery_worker.redis_commit import RedisCommitter
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

#: Tokens of one forward pass where no setting says otherwise. On a CPU small micro-batches pad
#: less and cost no more per token (docs/benchmarks.md); a GPU wants its thousands of lanes filled.
DEFAULT_MAX_BATCH_TOKENS = {"cpu": 512, "mps": 8_192, "cuda": 16_384}

#: Exit code after the failure of a thread; the parent treats it like any other death.
EX_SOFTWARE = 70


@dataclass(slots=True)
class Prepared:
    """A batch between two threads."""

    work: Work
    items: list[Any]
    model: Model | None


class Device:
    """Runs batches on one device until its parent closes the pipe."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._prepared: queue.Queue[Prepared] = queue.Queue(maxsize=1)
        self._computed: queue.Queue[Computed] = queue.Queue(maxsize=1)
        self._models: dict[str, Model] = {}
        #: Id of the batch on the commit thread.
        self._committing = 0
        self._app: Celery
        self._name = "cpu"

    def start(self, setup: Setup) -> Ready:
        """Imports the app, loads the models and warms them up.

        Raises:
            BatcheryError: In one line, what is missing.
        """
        started_s = time.monotonic()
        self._name = setup.device
        self._app = import_app(setup)
        # As in each process of Celery's own pools: apps open their clients and profilers here.
        signals.worker_process_init.send(sender=None)
        for name in setup.load:
            self._model(cast(ModelTask, self._app.tasks[name]))
        return Ready(pid=os.getpid(), load_s=time.monotonic() - started_s)

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
            items = [item for _, part, _ in work.jobs for item in part]
            model = self._models.get(work.task)
            if model is not None:
                items = prepare(model, items, work.keywords)
            self._prepared.put(Prepared(work, items, model))

    def _forward(self, batch: Prepared, resolve: Callable[[Any], Any]) -> Computed:
        work, items, model = batch.work, batch.items, batch.model
        try:
            task = find_task(self._app, work.task)
            if model is None and isinstance(task, ModelTask):
                # A model of a queue that this worker got to know only after its start.
                model = self._model(task)
                items = prepare(model, items, work.keywords)
        except BatcheryError as error:
            return Computed(work, [Failed(error) for _ in items], 0.0)
        tokens = computed_tokens = 0
        started_s = time.perf_counter()
        if model is not None:
            budget = work.max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS[self._name.split(":")[0]]
            limit = partial(soft_time_limit, work.soft_time_limit_s)
            cut = partial(plan, max_batch_tokens=budget, max_batch_size=work.max_batch_size)
            outcomes, tokens, computed_tokens = compute(
                model, items, work.keywords, cut, limit=limit
            )
        else:
            outcomes = run_batch(task, work, items, resolve)
        forward_ms = (time.perf_counter() - started_s) * 1e3
        return Computed(work, outcomes, forward_ms, tokens, computed_tokens)

    def _commit(self) -> None:
        # Celery gives each thread a backend of its own.
        backend: Any = self._app.backend
        committer = RedisCommitter(backend, self._tell_waiting)
        while True:
            batch = self._computed.get()
            self._committing = batch.work.id
            done = answer(batch, self._name, committer, backend)
            write_frame(self._end, dump_reply(done))

    def _tell_waiting(self) -> None:
        write_frame(self._end, dump_reply(Waiting(self._committing)))

    def _model(self, task: ModelTask) -> Model:
        if task.name not in self._models:
            self._models[task.name] = load_model(task, self._name)
        return self._models[task.name]


def load_model(task: ModelTask, device: str) -> Model:
    """Loads the model of a task and runs its warm-up.

    Raises:
        ModelLoadError: It cannot be loaded, or fails on its own warm-up items.
        DeviceUnavailable: The device does not exist.
    """
    check_device(device)
    started_s = time.monotonic()
    try:
        model = task.make_model()
        model.load(device)
        items = list(model.warm_up())
        if items:
            whole = [range(len(items))]
            outcomes, _, _ = compute(model, prepare(model, items, {}), {}, lambda _: whole)
            for outcome in outcomes:
                if isinstance(outcome, Failed):
                    raise outcome.exception
    except BatcheryError:
        raise
    except Exception as error:
        logger.debug("loading %s", task.name, exc_info=True)
        raise ModelLoadError(
            f"model {task.name!r} cannot be loaded on {device}: {type(error).__name__}: {error}"
        ) from error
    logger.info("%s loaded on %s in %.1f s", task.name, device, time.monotonic() - started_s)
    return model


def check_device(device: str) -> None:
    """Makes sure that torch can use a device.

    Raises:
        DeviceUnavailable: It cannot; says which ones there are.
    """
    if device == "cpu":
        return
    import torch

    from batchery_worker.models.hardware import device_named

    device_named(device)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def import_app(setup: Setup) -> Celery:
    """Imports the Celery app and the modules of its tasks, as the worker did."""
    sys.path[:] = list(setup.sys_path)
    module, _, attribute = setup.app.partition(":")
    app: Celery = getattr(importlib.import_module(module), attribute)
    app.set_current()
    app.set_default()
    app.loader.import_default_modules()
    for each in setup.modules:
        importlib.import_module(each)
    app.finalize()
    return app


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

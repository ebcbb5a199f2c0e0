"""The worker's pool: ordinary tasks run on the app's own pool, batch tasks on devices beside it."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

from celery import Celery
from celery.concurrency import asynpool
from kombu.asynchronous import Hub
from kombu.utils.imports import symbol_by_name

from batchery.errors import StartError
from batchery.installation import get_installation
from batchery.task import BatchTask
from batchery_worker.commit.eligibility import warn_of_tracer
from batchery_worker.device_pool.process import (
    DeviceProcess,
    StartProcess,
    share_models,
    start_process,
)
from batchery_worker.device_pool.startup import device_setups, task_modules
from batchery_worker.dispatch.dispatcher import Dispatcher
from batchery_worker.event_loop import is_cold_shutdown, is_in_signal_handler
from batchery_worker.in_flight import TaskCall
from batchery_worker.request import BatchRequest, cancel_active

_asynpool: Any = asynpool

logger = logging.getLogger("batchery.pool")

#: How long the processes of ordinary tasks have to say that they have begun a job, in seconds. They
#: do so at once; one that was stopped does not.
ACCEPT_S = 2.0

#: A device on a thread; an import path, because the code of devices imports torch.
DEVICE_THREAD = "batchery_worker.device.thread:DeviceThread"


class PrivateHub:
    """Runs a hub on a thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub: Any = hub
        self._thread = threading.Thread(target=self._run, name="batchery-hub", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def _run(self) -> None:
        # The main thread has turned this loop until the devices were ready. The loop would not wake
        # up for calls from the thread that it takes for its own.
        self._hub._loop_thread = threading.get_ident()
        self._hub.run_forever()

    def stop(self) -> None:
        """Ends the loop after what it is doing, and the thread with it."""
        self._hub.stop()
        self._thread.join()


class HybridPool:
    """Celery's pool for ordinary tasks, with devices for batch tasks.

    What is not said here is the ordinary pool's own: processes, limits, growth, statistics.
    """

    #: Devices are stopped step by step, which is too much for a signal handler.
    signal_safe = False

    def __init__(
        self,
        ordinary: Any,
        app: Celery,
        tasks: Sequence[BatchTask],
        devices: Sequence[str],
        *,
        in_process: bool = False,
        has_other_work: bool = False,
    ) -> None:
        """Starts nothing yet.

        Args:
            ordinary: Any pool of Celery's that has not started.
            app: The worker's app.
            tasks: Those that go to devices.
            devices: Names of the devices.
            in_process: Whether devices are threads of this process.
            has_other_work: Whether the worker has ordinary tasks, or a beat, which need not wait
                for models.
        """
        self._in_process = in_process
        self._has_other_work = has_other_work
        self._ordinary = ordinary
        self._app = app
        self._tasks = tasks
        self._devices = devices
        self._dispatcher: Dispatcher | None = None
        self._private_hub: PrivateHub | None = None
        default = get_installation(app).settings.max_batch_size
        self._max_batch_size = max(task.max_batch_size or default for task in tasks)
        #: Called once the processes of ordinary tasks are forked, when threads may start.
        self.on_forked: Callable[[], None] = _ignore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ordinary, name)

    # Start

    def start(self) -> None:
        """Starts the ordinary pool, then the devices; one that has no other work waits for models.

        The pool comes first: its processes are forked before there is a thread of ours.
        """
        try:
            self._ordinary.start()
            self.on_forked()
            self._start_devices()
        except StartError as error:
            self.terminate()
            logger.critical("%s", error)
            raise SystemExit(error.exit_code) from None
        except BaseException:
            self.terminate()
            raise

    def _start_devices(self) -> None:
        warn_of_tracer(self._app, self._tasks)
        settings = get_installation(self._app).settings
        setups = device_setups(
            self._app, self._tasks, settings, self._devices, in_process=self._in_process
        )
        start: StartProcess = start_process
        if self._in_process:
            start = partial(symbol_by_name(DEVICE_THREAD), self._app)
        devices = [DeviceProcess(setup, start) for setup in setups]
        share_models(devices)
        self._dispatcher = Dispatcher(self._app, settings, devices, self._max_batch_size)
        has_loop = not self._ordinary.options.get("threads")
        if self._has_other_work and has_loop and any(setup.load for setup in setups):
            self._dispatcher.begin()
            return
        self._dispatcher.start()
        if not has_loop:
            # Celery has no event loop for this broker: the dispatcher goes on with its own.
            self._private_hub = PrivateHub(self._dispatcher.hub)
            self._private_hub.start()

    def register_with_event_loop(self, loop: Any) -> None:
        """Moves to Celery's event loop; called again after each reconnect to the broker."""
        self._ordinary.register_with_event_loop(loop)
        if self._dispatcher is not None:
            self._dispatcher.attach(loop)

    # Jobs

    def apply_async(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Takes a job from Celery: batch tasks wait for a device, others go to the pool."""
        task = self._app.tasks.get(args[0]) if len(args) > 2 else None
        if self._dispatcher is None or not isinstance(task, BatchTask):
            return self._ordinary.apply_async(target, args, kwargs, **options)
        callback = options.get("callback")
        request = getattr(callback, "__self__", None)
        call = TaskCall(
            target=target,
            args=args,
            callback=callback or _ignore,
            accept_callback=options.get("accept_callback") or _ignore,
            error_callback=options.get("error_callback") or _ignore,
            request=request if isinstance(request, BatchRequest) else None,
        )
        soft, hard = options.get("soft_timeout"), options.get("timeout")
        if call.request is not None:
            # Celery reads a task's limits once; the remote command `time_limit` sets them later.
            hard, soft = call.request.time_limits
            soft, hard = soft or task.soft_time_limit, hard or task.time_limit
        # Those of the command line are options of a pool.
        known = self._ordinary.options
        limits = soft or known.get("soft_timeout"), hard or known.get("timeout")
        self._on_loop(partial(self._dispatcher.admit, call, task, limits))
        return None

    def flush(self) -> None:
        """The broker's connection is gone: drops what was not accepted, it will come again."""
        if self._ordinary.flush is not None:
            self._ordinary.flush()
        if self._dispatcher is not None:
            # On its own thread, if it has one, and after the jobs that were handed over before.
            self._on_loop(self._dispatcher.forget_waiting)

    def restart(self) -> None:
        """Gives pool and devices fresh processes, with the code as it is now, and loses no job.

        The remote control command `pool_restart` asks for it.
        """
        try:
            self._ordinary.restart()
        except NotImplementedError:
            logger.info("ordinary tasks go on with the old code: threads cannot start anew")
        if self._dispatcher is not None:
            self._on_loop(partial(self._dispatcher.recycle, task_modules(self._tasks)))

    def reload(self, number: str, task: str, **options: Any) -> dict[str, Any] | None:
        """Begins to load another version of a model, and says how far that is; for `DeviceControl`.

        Returns:
            None before the start and after the end.
        """
        if self._dispatcher is None:
            return None
        control = self._dispatcher.control
        self._on_loop(partial(control.reload, number, task, **options))
        return control.report(number)

    def finish_answered(self) -> None:
        """Settles what the devices have answered by now; returns when the results are stored.

        For the main thread, where the event loop was held up: by the wait of a soft shutdown.
        """
        if self._dispatcher is not None and self._private_hub is None:
            self._dispatcher.finish_answered()

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Kills an ordinary job's process; a device has jobs of others, too, and is not killed."""
        if self._dispatcher is not None and pid in (each.pid for each in self._dispatcher.devices):
            logger.info("a job of the batch on pid %s was revoked: its outcome is dropped", pid)
        else:
            # A solo pool refuses. The process may be one that died, and its job waits for another.
            with suppress(NotImplementedError):
                self._ordinary.terminate_job(pid, signal)

    def cancel_job(self, job_id: str) -> None:
        """Ends what a job that was terminated while it runs has for itself: slots, or a batch."""
        if self._dispatcher is not None:
            self._on_loop(partial(self._dispatcher.cancel, job_id))

    def _on_loop(self, function: Callable[[], None]) -> None:
        if self._private_hub is None:
            function()
        elif self._dispatcher is not None:
            self._dispatcher.deliver(function)

    # End

    def close(self) -> None:
        """Takes no more ordinary jobs."""
        await_accepts(getattr(self._ordinary, "_pool", None))
        self._ordinary.close()

    def stop(self) -> None:
        """Finishes what is on a device, unless the shutdown is a cold one; then ordinary jobs.

        In the handler of a signal, devices are left for `terminate`, which Celery calls next.
        """
        self._ordinary.close()
        if self._dispatcher is not None and not is_in_signal_handler():
            if self._private_hub is not None:
                self._private_hub.stop()
            if not is_cold_shutdown():
                self._dispatcher.drain()
                if is_cold_shutdown():
                    cancel_active(self)
            self._leave(kill_at_once=is_cold_shutdown())
        self._ordinary.stop()

    def terminate(self) -> None:
        """Cold shutdown: kills the devices; what they held was not acknowledged."""
        if self._dispatcher is not None and self._private_hub is not None:
            self._private_hub.stop()
        self._leave(kill_at_once=True)
        self._ordinary.terminate()

    def _leave(self, *, kill_at_once: bool) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.stop(kill_at_once=kill_at_once)

    @property
    def devices(self) -> Sequence[DeviceProcess] | None:
        """The devices, for any thread to look at; None before the start and after the end."""
        dispatcher = self._dispatcher
        return None if dispatcher is None else tuple(dispatcher.devices)

    def deliver(self, function: Callable[[], None]) -> None:
        """Calls a function on the event loop's thread, if devices are there; from any thread."""
        dispatcher = self._dispatcher
        if dispatcher is not None:
            dispatcher.deliver(function)

    @property
    def ordinary(self) -> Any:
        """The pool of ordinary tasks."""
        return self._ordinary

    # Statistics

    def figures(self) -> dict[str, Any] | None:
        """Devices, waiting jobs and batches; None before the start and after the end."""
        return self._dispatcher.info() if self._dispatcher is not None else None

    @property
    def info(self) -> dict[str, Any]:
        """What `celery inspect stats` shows of the pool."""
        return {**self._ordinary.info, **(self.figures() or {})}


def _ignore(*_: Any) -> None:
    """For a caller that does not want to know."""


def await_accepts(pool: Any) -> None:
    """Waits until each job that a process has been sent counts as begun.

    At a shutdown Celery forgets those that do not. Then nobody reads their results, for which their
    processes wait half a minute before they end.

    Args:
        pool: That of Celery's processes; another one, or one that sends jobs to busy processes, has
            nothing to wait for.
    """
    due_s = monotonic() + ACCEPT_S
    is_fair = getattr(pool, "sched_strategy", None) == _asynpool.SCHED_STRATEGY_FAIR
    while is_fair and monotonic() < due_s:
        sent = [job._write_to for job in pool._cache.values() if not job._accepted]
        processes = [each for each in sent if each and each._is_alive()]
        if not processes:
            return
        for fd in wait([each.outqR_fd for each in processes], ACCEPT_S / 10):
            pool.handle_result_event(fd)

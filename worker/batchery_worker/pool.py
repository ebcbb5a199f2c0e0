"""The Celery pool: where Celery's worker and the dispatcher meet.

Batch tasks go to the devices; ordinary tasks run beside them on threads, as with `-P threads`.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.concurrency.thread import TaskPool as ThreadPool
from celery.worker.request import Request
from kombu.asynchronous import Hub

from batchery.errors import StartError
from batchery.install import installation_of
from batchery.task import BatchTask
from batchery_worker.completion.backend import for_completion
from batchery_worker.completion.redis_retry import is_backend_away
from batchery_worker.device_pool.process import ChildLimits
from batchery_worker.device_pool.startup import device_setups, task_modules
from batchery_worker.dispatch.dispatcher import Dispatcher, is_cold_shutdown
from batchery_worker.request import BatchRequest, give_back
from batchery_worker.task_call import TaskCall

logger = logging.getLogger("batchery.pool")


class PrivateHub:
    """Runs a hub on a thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._thread = threading.Thread(target=hub.run_forever, name="batchery-hub", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after what it is doing, and the thread with it."""
        self._hub.stop()
        self._thread.join()


if TYPE_CHECKING:
    _ThreadPool: Any
else:
    _ThreadPool = ThreadPool


class BatchPool(_ThreadPool):  # type: ignore[misc]
    """`worker_pool = "batchery_worker.pool:BatchPool"`; `install(app)` sets it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dispatcher: Dispatcher | None = None
        self._private_hub: PrivateHub | None = None
        #: Ordinary jobs that wait for a thread, or run on one.
        self._futures: set[Future[Any]] = set()

    def on_start(self) -> None:
        """Starts the devices and waits for their models; the worker is ready only after that."""
        tasks = [task for task in self.app.tasks.values() if isinstance(task, BatchTask)]
        if not tasks:
            return
        try:
            settings = installation_of(self.app).settings
            setups = device_setups(self.app, tasks, settings)
            limits = ChildLimits(
                self.options.get("maxtasksperchild"), self.options.get("max_memory_per_child")
            )
            self._dispatcher = Dispatcher(self.app, settings, setups, limits)
            self._dispatcher.start()
        except StartError as error:
            self._leave(kill_at_once=True)
            logger.critical("%s", error)
            raise SystemExit(error.exit_code) from None
        except BaseException:
            self._leave(kill_at_once=True)
            raise
        if self.options.get("threads"):
            # Celery has no event loop for this broker: the dispatcher goes on with its own.
            self._private_hub = PrivateHub(self._dispatcher.hub)
            self._private_hub.start()

    def register_with_event_loop(self, loop: Any) -> None:
        """Moves to Celery's event loop; called again after each reconnect to the broker."""
        if self._dispatcher is not None:
            self._dispatcher.attach(loop)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """Takes a job from Celery: batch tasks wait for a device, the rest run on threads."""
        task = self.app.tasks.get(args[0]) if len(args) > 2 else None
        if self._dispatcher is None or not isinstance(task, BatchTask):
            run = partial(self._run_ordinary, target)
            result = super().on_apply(run, args, kwargs, callback, accept_callback, **options)
            self._futures.add(result.f)
            request = getattr(callback, "__self__", None)
            result.f.add_done_callback(partial(self._on_thread_done, request))
            return result
        request = getattr(callback, "__self__", None)
        call = TaskCall(
            target=target,
            args=args,
            callback=callback or _ignore,
            accept_callback=accept_callback or _ignore,
            error_callback=options.get("error_callback") or _ignore,
            request=request if isinstance(request, BatchRequest) else None,
        )
        limits = (options.get("soft_timeout"), options.get("timeout"))
        if call.request is not None:
            # Celery reads a task's limits once; the remote command `time_limit` sets them later.
            hard, soft = call.request.time_limits
            limits = (soft or task.soft_time_limit, hard or task.time_limit)
        if self._private_hub is None:
            self._dispatcher.admit(call, task, limits)
        else:
            self._dispatcher.deliver(partial(self._dispatcher.admit, call, task, limits))
        return None

    def _run_ordinary(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an ordinary job, whose result waits while its backend is away."""
        for_completion(self.app.backend)
        return target(*args, **kwargs)

    def _on_thread_done(self, request: Any, future: Future[Any]) -> None:
        """An ordinary job has left its thread; one whose result found no backend is given back.

        Celery forgets such a job, and with a lease, which a living worker never loses, so would the
        queue.
        """
        self._futures.discard(future)
        error = None if future.cancelled() else future.exception()
        if error is None:
            return
        away = is_backend_away(self.app.backend, error)
        if away and isinstance(request, Request) and request.task.acks_late:
            logger.warning("%s[%s] is given back: %r", request.name, request.id, error)
            give_back(request)
        else:
            logger.error("a job ended without an outcome", exc_info=error)

    def flush(self) -> None:
        """The broker's connection is gone: drops what was not accepted, it will come again."""
        for future in list(self._futures):
            # Refused by those that run.
            future.cancel()
        if self._dispatcher is None:
            return
        if self._private_hub is None:
            self._dispatcher.forget_waiting()
        else:
            # On its own thread, and after the jobs that were handed over before.
            self._dispatcher.deliver(self._dispatcher.forget_waiting)

    def restart(self) -> None:
        """Gives the devices fresh processes, with the code as it is now, and loses no job.

        The remote control command `pool_restart` asks for it.
        """
        if self._dispatcher is None:
            return
        tasks = [task for task in self.app.tasks.values() if isinstance(task, BatchTask)]
        renew = partial(self._dispatcher.recycle, task_modules(tasks))
        if self._private_hub is None:
            renew()
        else:
            self._dispatcher.deliver(renew)

    def on_stop(self) -> None:
        """Finishes what is on a device, unless the shutdown is a cold one."""
        # Ordinary tasks that wait are dropped now, but those that run are waited for at the end:
        # nobody would listen to the devices meanwhile.
        self.executor.shutdown(wait=False, cancel_futures=True)
        if self._dispatcher is not None:
            if self._private_hub is not None:
                self._private_hub.stop()
            if not is_cold_shutdown():
                self._dispatcher.drain()
            self._leave(kill_at_once=is_cold_shutdown())
        super().on_stop()

    def finish_answered(self) -> None:
        """Settles what the devices have answered by now; returns when the results are stored.

        For the main thread, where the event loop was held up: by the wait of a soft shutdown.
        """
        if self._dispatcher is not None and self._private_hub is None:
            self._dispatcher.finish_answered()

    def on_terminate(self) -> None:
        """Cold shutdown: kills the devices; what they held was not acknowledged."""
        self._leave(kill_at_once=True)

    def terminate_job(self, pid: int, signal: Any = None) -> None:  # noqa: ARG002
        """Kills nothing, as one process serves a whole batch: the job's outcome will be dropped."""
        logger.info("a job of the batch on pid %s was revoked: its outcome is dropped", pid)

    def figures(self) -> dict[str, Any] | None:
        """Devices, waiting jobs and batches; None where the app has no batch task."""
        return self._dispatcher.info() if self._dispatcher is not None else None

    def grow(self, n: int = 1) -> None:
        """Refuses: threads and devices are as many as at the start.

        Raises:
            NotImplementedError: Always; the remote control command answers with it.
        """
        raise NotImplementedError(
            "the pool cannot grow or shrink: restart the worker with another -c or other `devices`"
        )

    shrink = grow

    def _leave(self, *, kill_at_once: bool) -> None:
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.stop(kill_at_once=kill_at_once)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        info.update(self.figures() or {})
        return info


def _ignore(*_: Any) -> None:
    """For a caller that does not want to know."""

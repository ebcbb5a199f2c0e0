"""What a worker does before it starts: checks the settings, finds room for batches, adds queues."""

import gc
import logging
import math
import os
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.backends.redis import RedisBackend

from batchery.errors import SettingsError, StartError
from batchery.install import installation_of
from batchery.settings import Settings
from batchery.task import BatchTask, ModelTask
from batchery_worker import remote_control  # noqa: F401 - registers the command
from batchery_worker.device_pool.process import resident_kib
from batchery_worker.dispatch.dead_letters import tell_callers
from batchery_worker.events import use_batch_events
from batchery_worker.pool import BatchPool

if TYPE_CHECKING:
    _Step: Any
else:
    _Step = bootsteps.Step

logger = logging.getLogger("batchery.worker")

#: Python's own thresholds of its garbage collector, before version 3.14; and those in their place.
#: A worker that holds a thousand jobs makes them by the ten thousand, and none of it is garbage: a
#: sixth of the main process's time went into looking (docs/performance.md).
STOCK_GC_THRESHOLDS = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
GC_THRESHOLDS = (20_000, 20, 20)


class BatchStep(_Step):  # type: ignore[misc]
    """Prepares a Celery worker for batches; runs after its pool exists, before it consumes."""

    requires = ("celery.worker.components:Pool",)

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`; a setting that is wrong ends the worker."""
        try:
            self._prepare(parent)
        except StartError as error:
            logger.debug("start failed", exc_info=True)
            logger.critical("%s", error)
            raise SystemExit(error.exit_code) from None

    def _prepare(self, worker: Any) -> None:
        installation = installation_of(worker.app)
        if installation.error is not None:
            raise installation.error
        settings = installation.settings
        tell_callers(worker.app)
        tasks = [task for task in worker.app.tasks.values() if isinstance(task, BatchTask)]
        if not tasks:
            return
        for task in tasks:
            check_options(task)
        if not isinstance(worker.pool, BatchPool):
            logger.warning(
                "pool %s runs batch tasks one job at a time; start the worker without -P to batch",
                type(worker.pool).__module__,
            )
        elif worker.app.conf.worker_disable_prefetch:
            raise SettingsError(
                "worker_disable_prefetch lets no batch grow beyond the concurrency;"
                " switch it off for workers that run batch tasks"
            )
        elif worker.autoscale:
            raise SettingsError(
                "--autoscale does not go with batches, as devices are as many as there are;"
                " say -c for the threads of ordinary tasks"
            )
        else:
            _widen_prefetch(worker, prefetch_jobs(tasks, settings))
            _share_prefetch(worker.app, tasks, settings)
            _warn_of_memory_limit(worker)
            _look_for_garbage_less_often()
        _consume_model_queues(worker.app, tasks)
        use_batch_events(worker.app)


def _look_for_garbage_less_often() -> None:
    # Somebody who has chosen others knows why.
    if gc.get_threshold() in STOCK_GC_THRESHOLDS:
        gc.set_threshold(*GC_THRESHOLDS)


def check_options(task: BatchTask) -> None:
    """Looks at what was given to `@app.task`, which no settings class has seen.

    Raises:
        SettingsError: A limit of the task is impossible.
    """
    for name, kinds, least in (
        ("max_batch_size", (int,), 1),
        ("max_batch_tokens", (int,), 1),
        ("max_wait_ms", (int, float), 0),
        ("cache_ttl_s", (int, float), 1),
        ("cache_max_bytes", (int,), 1),
    ):
        value = getattr(task, name)
        if value is None:
            continue
        if not isinstance(value, kinds) or isinstance(value, bool) or not value >= least:
            raise SettingsError(
                f"task {task.name!r}: {name} = {value!r}; expected a number from {least} on"
            )
    if task.cache is not None:
        _check_cache(task)


def _check_cache(task: BatchTask) -> None:
    if not isinstance(task.cache, str) or not task.cache:
        raise SettingsError(
            f"task {task.name!r}: cache = {task.cache!r}; expected a version of its results, such"
            ' as "1", that is changed whenever they are'
        )
    if task.sees_request:
        raise SettingsError(
            f"task {task.name!r}: its function sees the requests of its jobs (bind=True), so equal"
            " items need not have equal results: take away bind=True, or cache"
        )
    if not isinstance(task.app.backend, RedisBackend):
        raise SettingsError(
            f"task {task.name!r}: cache needs Celery's result backend for Redis, in which it is"
        )


def prefetch_jobs(tasks: list[BatchTask], settings: Settings) -> int:
    """How many unfinished jobs the worker must hold for full batches.

    Every task may have its waiting batches, whichever queue they come from.
    """
    return sum(
        (task.max_batch_size or settings.max_batch_size) * (1 + settings.prefetch_batches)
        for task in tasks
    )


def _widen_prefetch(worker: Any, jobs: int) -> None:
    """Raises the prefetch count, which Celery takes as concurrency times multiplier.

    A multiplier of 0 means no limit: then there is nothing to raise.
    """
    multiplier = worker.prefetch_multiplier
    needed = math.ceil(jobs / worker.concurrency)
    if multiplier and needed > multiplier:
        worker.prefetch_multiplier = needed
        logger.info("prefetch raised to %d jobs, so that batches fill", needed * worker.concurrency)


def _warn_of_memory_limit(worker: Any) -> None:
    if worker.max_memory_per_child and resident_kib(os.getpid()) is None:
        logger.warning("max_memory_per_child has no effect: only Linux tells what a process holds")


def _share_prefetch(app: Any, tasks: list[BatchTask], settings: Settings) -> None:
    """Gives each model's queue its own part: jobs for a slow one must not keep out all others.

    And takes no more at once than one task needs: what is behind may be another worker's.
    """
    parts: dict[str, int] = {}
    for task in tasks:
        if isinstance(task, ModelTask):
            queue = str(task.model_queue)
            parts[queue] = parts.get(queue, 0) + prefetch_jobs([task], settings)
    options = app.conf.broker_transport_options
    app.conf.broker_transport_options = {
        "drain_messages": max(prefetch_jobs([task], settings) for task in tasks),
        **options,
        "queue_prefetch": {**parts, **options.get("queue_prefetch", {})},
    }


def _consume_model_queues(app: Any, tasks: list[BatchTask]) -> None:
    """Without -Q a worker consumes the queues of all its models; with -Q, what it was told."""
    queues = app.amqp.queues
    if queues._consume_from is None:
        for task in tasks:
            if isinstance(task, ModelTask):
                queues.select_add(queues[task.model_queue])

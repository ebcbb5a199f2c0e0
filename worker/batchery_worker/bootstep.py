"""What a worker does before it starts: checks settings, and plans how jobs come to its devices."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import click
from celery import bootsteps
from celery.backends.redis import RedisBackend
from kombu.exceptions import SerializerNotInstalled
from kombu.serialization import prepare_accept_content

import batchery.app as standalone
from batchery.cli.app import check_broker
from batchery.errors import RedisUnavailable, SettingsError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.model_task import ModelTask
from batchery.settings import (
    FILE_VARIABLE,
    Settings,
    describe_file,
    nearest_name,
    settings_file,
)
from batchery.task import SIGNED, BatchTask
from batchery_worker import remote_control  # noqa: F401 - registers the command
from batchery_worker.batching.batch_times import AHEAD_BATCHES
from batchery_worker.devices_step import failing_in_one_line
from batchery_worker.queue_plan import (
    comes_by_any,
    find_queue,
    has_redis_broker,
    list_own_tasks,
    may_lease,
    plan_queues,
)

_Step: Any = bootsteps.Step

logger = logging.getLogger("batchery.worker")


class BatchStep(_Step):  # type: ignore[misc]
    """Prepares a Celery worker for batches; runs after its pool exists, before it consumes."""

    requires = ("celery.worker.components:Pool",)

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`; a setting that is wrong ends the worker."""
        with failing_in_one_line():
            self._prepare(parent)

    def _prepare(self, worker: Any) -> None:
        worker.queue_plan = None
        installation = get_installation(worker.app)
        if installation.error is not None:
            raise installation.error
        settings = installation.settings
        logger.info("file of settings: %s", describe_file())
        refuse_no_models(worker.app)
        warn_of_unused_queues(worker.app)
        all_tasks = [task for task in worker.app.tasks.values() if isinstance(task, BatchTask)]
        for task in all_tasks:
            check_options(task)
        _consume_model_queues(worker.app, all_tasks)
        tasks = [task for task in all_tasks if is_served(task)]
        if not tasks:
            return
        if not may_lease(worker) and worker.app.conf.worker_disable_prefetch:
            raise SettingsError(
                "worker_disable_prefetch lets no batch grow beyond the concurrency;"
                " switch it off for workers that run batch tasks"
            )
        for task in tasks:
            check_is_accepted(worker.app, task)
        report_broker_away(worker.app)
        worker.queue_plan = plan = plan_queues(worker, all_tasks, tasks, settings)
        if plan.jobs.is_handed:
            _widen_prefetch(worker, tasks, settings, len(plan.places))


def report_broker_away(app: Any) -> None:
    """Logs that Redis does not answer, before models are loaded for half a minute.

    The worker goes on, as Celery's does: the broker may be there when its models are.

    Raises:
        SettingsError: It never will be, as its URL is wrong.
    """
    if not has_redis_broker(app):
        return
    try:
        check_broker(app)
    except RedisUnavailable as error:
        logger.error("%s. The worker loads its models, then it tries again", error)


def refuse_no_models(app: Any) -> None:
    """A worker of `batchery.app` without models would take jobs, and fail each of them.

    Raises:
        SettingsError: Neither the settings nor modules that it includes have a task for it.
    """
    if app is standalone.app and not list_own_tasks(app):
        path = settings_file()
        problem = "has no [models.NAME]" if path.exists() else "does not exist"
        raise SettingsError(
            f"no model is configured: {path.absolute()} {problem};"
            f" start in the folder of the file, or name it in {FILE_VARIABLE}"
        )


def warn_of_unused_queues(app: Any) -> None:
    """Warns of queues of `-Q` to which no task is routed: most of them are misspelt."""
    tasks = list_own_tasks(app)
    routed = {find_queue(task) for task in tasks}
    by_any = any(comes_by_any(task) for task in tasks)
    if app.amqp.queues._consume_from is None or not tasks:
        return
    names = {str(name) for name in routed if name is not None}
    for queue in app.amqp.queues._consume_from:
        # Jobs of a task without a route may come by any queue; a near miss is hardly meant.
        may_be_meant = by_any and not nearest_name(queue, names)
        if queue not in names and not may_be_meant:
            logger.warning(
                "queue %r of -Q: no task of this worker is routed to it%s; there are %s",
                queue,
                nearest_name(queue, names),
                ", ".join(sorted(names)),
            )


def is_served(task: BatchTask) -> bool:
    """Whether jobs of a task come to this worker's queues."""
    consumed = {str(name) for name in task.app.amqp.queues.consume_from}
    if find_queue(task) in consumed:
        return True
    # The gateway's queue has none of them, and its worker needs no device.
    others = {find_queue(each) for each in task.app.tasks.values() if isinstance(each, BatchTask)}
    return comes_by_any(task) and not consumed <= {JOBS_QUEUE, *others}


def check_options(task: BatchTask) -> None:
    """Looks at what was given to `@app.task`, which no settings class has seen.

    Raises:
        SettingsError: A limit of the task is impossible.
    """
    for name, kinds, least in (
        ("max_batch_size", (int,), 1),
        ("slots", (int,), 1),
        ("max_batch_tokens", (int,), 1),
        ("max_wait_ms", (int, float), 0),
        ("target_latency_ms", (int, float), 0.001),
        ("cache_ttl_s", (int, float), 1),
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


def check_is_accepted(app: Any, task: BatchTask) -> None:
    """A worker that does not accept a task's jobs would make each of them a dead letter.

    Raises:
        SettingsError: The app's `accept_content` lacks the serializer of the task, or a serializer
            is not known in this process.
    """
    conf = app.conf
    try:
        # Both are names, such as json, or content types.
        [written_in] = prepare_accept_content([task.serializer]) or [task.serializer]
        accepted = prepare_accept_content(conf.accept_content)
    except SerializerNotInstalled as error:
        raise SettingsError(
            f"task {task.name!r}: {error}; call app.setup_security() if messages are signed, and"
            " kombu.serialization.register() for a serializer of your own"
        ) from None
    if written_in in (accepted or [written_in]):
        return
    if conf.task_serializer == SIGNED:
        raise SettingsError(
            f"task {task.name!r}: its jobs are not signed, as task_serializer was set after the"
            " task was made; set it, and call app.setup_security(), before the first task"
        )
    raise SettingsError(
        f"task {task.name!r}: its jobs are written in {task.serializer}, which this worker"
        f" refuses; add {task.serializer!r} to accept_content = {list(conf.accept_content)!r}"
    )


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


def _widen_prefetch(
    worker: Any, tasks: Sequence[BatchTask], settings: Settings, devices: int
) -> None:
    """Raises the prefetch count, which Celery takes as concurrency times multiplier.

    Every task may have its waiting batches on every device, whichever queue they come from. What
    runs in slots has no waiting ones. Each class has a part of its own, so that no job waits behind
    those of another class that were taken in advance. A multiplier of 0 means no limit.
    """
    if not worker.prefetch_multiplier:
        return
    batches = 1 + AHEAD_BATCHES
    jobs = devices * sum(
        task.slots or batches * (task.max_batch_size or settings.max_batch_size) for task in tasks
    )
    # The solo pool has one process, whatever the concurrency says.
    needed = math.ceil(jobs / (worker.pool.limit or 1))
    multiplier = max(worker.prefetch_multiplier, needed) * len(settings.classes)
    if worker.app.conf.worker_eta_task_limit is not None:
        # It is a limit of the whole prefetch, to which the first job with an ETA would lower it.
        raised = multiplier - worker.prefetch_multiplier
        raised *= worker.max_concurrency or worker.concurrency
        worker.app.conf.worker_eta_task_limit += raised
    worker.prefetch_multiplier = multiplier


def _consume_model_queues(app: Any, tasks: list[BatchTask]) -> None:
    """Without -Q a worker consumes its models' queues, but those of -X; else what it was told."""
    queues, context = app.amqp.queues, click.get_current_context(silent=True)
    if queues._consume_from is not None:
        return
    left_out = (context and context.params.get("exclude_queues")) or ()
    for task in tasks:
        own = task.model_queue if isinstance(task, ModelTask) else task.own_queue
        if own is not None and own not in left_out:
            try:
                queues.select_add(queues[own])
            except KeyError as name:
                text = f"task {task.name!r}: its queue {name} is not among task_queues, and the app"
                text += " creates no others (task_create_missing_queues); add it there"
                raise SettingsError(text) from None

"""What the device processes of a worker are told when they start."""

import logging
import os
import sys
from collections.abc import Sequence

from celery import Celery

from batchery.settings import Settings, default_cache_dir
from batchery.task import BatchTask, ModelTask
from batchery_worker.devices import choose
from batchery_worker.locate import app_path, task_modules
from batchery_worker.wire import Setup


def device_setups(app: Celery, tasks: Sequence[BatchTask], settings: Settings) -> list[Setup]:
    """One setup per device.

    Models are loaded at the start if this worker consumes their queue, else at their first job.

    Raises:
        AppNotImportable: A fresh process could not import the app or a task.
    """
    consumed = app.amqp.queues.consume_from
    models = [task for task in tasks if isinstance(task, ModelTask)]
    load = [task.name for task in models if task.model_queue in consumed]
    calibrate = [
        task.name
        for task in models
        if task.max_batch_tokens is None and settings.max_batch_tokens is None
    ]
    path = app_path(app)
    modules = task_modules(tasks)
    level = logging.getLogger().getEffectiveLevel()
    return [
        Setup(
            device=name,
            # The `celery` command has the working directory on its path only while it imports.
            sys_path=(os.getcwd(), *sys.path),
            app=path,
            modules=modules,
            load=load,
            log_level=level,
            calibrate=calibrate if _measures(settings, name) else (),
            cache_dir=settings.cache_dir or default_cache_dir(),
            memory_fraction=settings.memory_fraction,
        )
        for name in choose(settings.devices)
    ]


def _measures(settings: Settings, device: str) -> bool:
    """Whether budgets are measured on a device.

    By default not on a CPU, which is never alone: of one model, a busy machine measured anything
    from a quarter to ten times the default budget.
    """
    if settings.calibrate == "auto":
        return device.startswith("cuda")
    return settings.calibrate == "always"

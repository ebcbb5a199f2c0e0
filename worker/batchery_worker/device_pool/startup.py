"""What the device processes of a worker are told when they start."""

import logging
import os
import sys
from collections.abc import Iterable, Sequence

from celery import Celery

from batchery.errors import AppNotImportable
from batchery.settings import Settings
from batchery.task import BatchTask, ModelTask
from batchery_worker.ipc.messages import Setup


def app_path(app: Celery) -> str:
    """The import path of an app, as `module:attribute`.

    Raises:
        AppNotImportable: It is defined in `__main__`, or is no module's attribute.
    """
    in_main = False
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "celery":
            # Celery notes the current app in a module of its own, which a fresh process lacks.
            continue
        # Some packages put objects into sys.modules that are no modules.
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is app:
                # Which multiprocessing also enters as `__mp_main__`.
                if module is not sys.modules.get("__main__"):
                    return f"{name}:{attribute}"
                in_main = True
    where = "defined in __main__" if in_main else "not an attribute of any module"
    raise AppNotImportable(
        f"Celery app {app.main!r} is {where}, so a device process cannot import it;"
        " put it into a module and start the worker with `celery -A that_module worker`"
    )


def task_modules(tasks: Iterable[BatchTask]) -> list[str]:
    """The modules that define these tasks, sorted.

    Raises:
        AppNotImportable: One of them is `__main__`.
    """
    modules = set()
    for task in tasks:
        if task.__module__ == "__main__":
            raise AppNotImportable(
                f"task {task.name!r} is defined in __main__, so a device process cannot import it;"
                " put it into a module and start the worker with `celery -A that_module worker`"
            )
        modules.add(task.__module__)
    return sorted(modules)


def device_setups(
    app: Celery,
    tasks: Sequence[BatchTask],
    settings: Settings,
    devices: Sequence[str],
    *,
    in_process: bool = False,
) -> list[Setup]:
    """One setup per device.

    Models are loaded at the start if this worker consumes their queue, else at their first job.

    Args:
        app: The worker's.
        tasks: Those that go to devices.
        settings: Of the worker.
        devices: Their names.
        in_process: Whether devices are threads of this process, and import nothing.

    Raises:
        AppNotImportable: A fresh process could not import the app or a task.
    """
    consumed = app.amqp.queues.consume_from
    models = [task for task in tasks if isinstance(task, ModelTask)]
    load = [task.name for task in models if task.model_queue in consumed]
    path = "" if in_process else app_path(app)
    modules = [] if in_process else task_modules(tasks)
    levels = levels_of_loggers()
    return [
        Setup(
            device=name,
            # The `celery` command has the working directory on its path only while it imports.
            sys_path=(os.getcwd(), *sys.path),
            app=path,
            modules=modules,
            load=load,
            log_levels=levels,
            memory_fraction=settings.memory_fraction,
        )
        for name in devices
    ]


def levels_of_loggers() -> dict[str, int]:
    """The levels that were set in this process, by name; the root logger has an empty name."""
    levels = {"": logging.getLogger().getEffectiveLevel()}
    for name, found in logging.root.manager.loggerDict.items():
        if isinstance(found, logging.Logger) and found.level:
            levels[name] = found.level
    return levels

"""Where a device process can import an app and its tasks from."""

import sys
from collections.abc import Iterable
from typing import cast

from celery import Celery

from batchery.errors import AppNotImportable
from batchery.task import BatchTask


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


def find_task(app: Celery, name: str) -> BatchTask:
    """A batch task, in a device process.

    Raises:
        AppNotImportable: The app has it in the worker, but not where it was imported afresh.
    """
    task = app.tasks.get(name)
    if task is None:
        raise AppNotImportable(
            f"task {name!r} is not there when a device process imports the app and"
            " the modules of its tasks; define it where an import alone makes it"
        )
    return cast(BatchTask, task)

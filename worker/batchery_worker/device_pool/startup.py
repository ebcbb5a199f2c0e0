"""The devices of this machine, and what their processes are told when they start."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from celery import Celery

from batchery.errors import AppNotImportable
from batchery.model_task import ModelTask
from batchery.settings import Settings
from batchery.task import BatchTask
from batchery_worker.batching.placement import place_models
from batchery_worker.devstack.guarded_process import python_command
from batchery_worker.ipc.messages import JobsSetup, Setup

logger = logging.getLogger("batchery.pool")

#: Counts the CUDA devices that torch will see, given the driver and CUDA_VISIBLE_DEVICES.
_COUNT = "import torch; print(torch.cuda.device_count())"

#: Celery's settings that say where messages and results are, and for how long.
PLACES = ("broker_url", "broker_read_url", "broker_write_url", "result_backend", "result_expires")

#: What to do with what a device process cannot import.
HINT = "put it into a module and start the worker with `celery -A that_module worker`"

#: Long enough for a cold import of torch from a slow disk, in seconds.
_COUNT_TIMEOUT_S = 120


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
        f"Celery app {app.main!r} is {where}, so a device process cannot import it; {HINT}"
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
                f" {HINT}"
            )
        modules.add(task.__module__)
    return sorted(modules)


def device_setups(
    app: Celery,
    tasks: Sequence[BatchTask],
    settings: Settings,
    places: Mapping[str, Mapping[str, str]],
    *,
    in_process: bool = False,
    jobs: JobsSetup,
) -> list[Setup]:
    """One setup per device for all tasks that run in batches, and others for those with their own.

    A task with slots has one more. A model with feeders has one for the process of the card, and
    one for each feeder, but not where Celery's consumer hands the jobs over.

    Models are loaded at the start if this worker consumes their queue, there is memory, and the
    devices are processes, else at their first job.

    Args:
        app: The worker's.
        tasks: Those that go to devices.
        settings: Of the worker.
        places: Device -> the models that it serves -> why.
        in_process: Whether devices are threads of this process, and import nothing.
        jobs: What all of them must know of jobs.
    """
    consumed = app.amqp.queues.consume_from
    models = [task for task in tasks if isinstance(task, ModelTask)]
    # A test of one task need not wait for the models of the settings.
    first = [] if in_process else models
    load = [task.name for task in first if task.model_queue in consumed and not task.slots]
    shared: dict[str, Any] = {
        # The `celery` command has the working directory on its path only while it imports.
        "sys_path": (os.getcwd(), *sys.path),
        "app": "" if in_process else app_path(app),
        "modules": [] if in_process else task_modules(tasks),
        "conf": {name: each for name, each in (app.conf.changes or {}).items() if name in PLACES},
        "log_levels": levels_of_loggers(),
        "memory_fraction": settings.memory_fraction,
        "pinned": frozenset(task.name for task in models if task.pinned),
        "model_memory_bytes": settings.model_memory_bytes,
        "jobs": jobs,
    }
    setups = []
    for device, here in places.items():
        mine = [task for task in tasks if task.name in here or task not in models]
        own = [task for task in mine if task.slots or (task.has_own_process and not jobs.is_handed)]
        kinds = [(task.name, task.slots, [task.name]) for task in own]
        if shared_tasks := [task.name for task in mine if task not in own]:
            kinds.insert(0, ("", 0, shared_tasks))
        for name, slots, served in kinds:
            setup = Setup(
                device=device,
                load=[each for each in served if each in load or name],
                task=name,
                slots=slots or 0,
                models={each: why for each, why in here.items() if each in served},
                elsewhere=frozenset(task.name for task in tasks) - {*served},
                **shared,
            )
            task = app.tasks.get(name)
            if isinstance(task, ModelTask) and not slots:
                setups += list_feeders(setup, task)
            else:
                setups.append(setup)
    return setups


def list_feeders(setup: Setup, task: ModelTask) -> list[Setup]:
    """What the process of a card is told, and its feeders.

    Args:
        setup: Of a process that has the model to itself.
        task: Of the model.
    """
    numbers = range(1, task.feeders + 1)
    # The card is none of their business: they need no torch.
    feeder = replace(setup, device="cpu", card=setup.device, load=[])
    return [
        replace(setup, computes=task.model_settings),
        *(replace(feeder, feeder=number) for number in numbers),
    ]


def find_places(tasks: Sequence[ModelTask], devices: Sequence[str]) -> dict[str, dict[str, str]]:
    """Chooses the devices of each model; see `place_models`."""
    return place_models({task.name: task.devices for task in tasks}, devices)


def levels_of_loggers() -> dict[str, int]:
    """The levels that were set in this process, by name; the root logger has an empty name."""
    levels = {"": logging.getLogger().getEffectiveLevel()}
    for name, found in list(logging.root.manager.loggerDict.items()):
        if isinstance(found, logging.Logger) and found.level:
            levels[name] = found.level
    return levels


def choose_devices(devices: Literal["auto"] | Sequence[str]) -> list[str]:
    """Resolves the `devices` setting, without importing torch into this process.

    Args:
        devices: Names; or `auto` for every CUDA device, or the CPU if there is none.

    Returns:
        One name per device process, such as `["cuda:0", "cuda:1"]`.
    """
    if devices != "auto":
        return ["cuda:0" if name == "cuda" else name for name in devices]
    return [f"cuda:{index}" for index in range(_cuda_count())] or ["cpu"]


def _cuda_count() -> int:
    # To ask torch takes seconds. Without a driver there is no device file, and nothing to ask.
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    try:
        answer = subprocess.run(
            [*python_command(), "-c", _COUNT],
            capture_output=True,
            text=True,
            timeout=_COUNT_TIMEOUT_S,
            check=True,
        )
        return int(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        if find_spec("torch") is not None:
            said = str(getattr(error, "stderr", None) or error).splitlines()[-1]
            text = "torch finds no GPU, and this worker computes on the CPU: %s; set devices"
            logger.error(text, said)
        return 0

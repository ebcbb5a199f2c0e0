"""The start of a device process: its app, and its hardware."""

import importlib
import logging
import sys
from importlib.util import find_spec
from typing import cast

from celery import Celery

from batchery.device_names import device_type, main_device
from batchery.errors import AppNotImportable, BatcheryError
from batchery.task import BatchTask
from batchery_worker.ipc.messages import NotReady, Setup
from batchery_worker.memory import Memory

logger = logging.getLogger("batchery.device")


def refuse_start(error: Exception, what: str) -> NotReady:
    """What the worker is told where a process cannot start: one line.

    Args:
        error: Why.
        what: What is named with an error that is none of ours.
    """
    logger.debug("start failed", exc_info=error)
    is_ours = isinstance(error, BatcheryError)
    return NotReady(str(error) if is_ours else f"{what}: {type(error).__name__}: {error}")


def check_device(device: str) -> None:
    """Makes a device torch's default on this thread, before anything opens a context on another."""
    if not _is_torch_device(device):
        return
    # It imports torch, and a worker on a CPU may have none.
    from batchery_worker.models.hardware.devices import use_device

    use_device(device)


def _is_torch_device(device: str) -> bool:
    """Whether torch has a say: batch functions may use a GPU by another library alone."""
    return device_type(device) != "cpu" and find_spec("torch") is not None


def import_app(setup: Setup) -> Celery:
    """Imports the Celery app and the modules of its tasks, as the worker did."""
    sys.path[:] = list(setup.sys_path)
    # First of all: an import that touches CUDA opens its context on the default device.
    check_device(setup.device)
    module, _, attribute = setup.app.partition(":")
    app: Celery = getattr(importlib.import_module(module), attribute)
    app.conf.update(setup.conf)
    app.set_current()
    app.set_default()
    app.loader.import_default_modules()
    for each in setup.modules:
        importlib.import_module(each)
    app.finalize()
    return app


def find_task(app: Celery, name: str) -> BatchTask:
    """A batch task, in a device process.

    Raises:
        AppNotImportable: The worker's app has the task, but a freshly imported app has not.
    """
    task = app.tasks.get(name)
    if task is None:
        raise AppNotImportable(
            f"task {name!r} is not there when a device process imports the app and"
            " the modules of its tasks; define it where an import alone makes it"
        )
    return cast(BatchTask, task)


def find_memory(device: str, fraction: float = 1.0) -> Memory:
    """The memory of a device, and on CUDA the fraction of it that this process may use."""
    if not device.startswith("cuda") or not _is_torch_device(device):
        return Memory()
    # It imports torch, and a worker on a CPU may have none.
    from batchery_worker.models.hardware.devices import CudaMemory

    return CudaMemory(main_device(device), fraction)

"""`task.map` and `task.starmap` of a batch task: multi-item jobs for a device.

Celery has a task of its own for them, which calls the named task once per item, in a child of the
ordinary pool: there a model would be loaded a second time. `task.chunks` sends `starmap` jobs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery
from celery.worker.strategy import default, hybrid_to_proto2  # type: ignore[attr-defined]
from kombu.serialization import dumps

from batchery.protocol.headers import HEADER, VERSION
from batchery.task import BatchTask

#: Celery's tasks, and whether each element of what they are given is a list of arguments.
IS_STARRED = {"celery.map": False, "celery.starmap": True}


def use_devices(app: Celery) -> None:
    """Sends the jobs of `map` and `starmap` to devices, where they name a batch task."""
    for name in IS_STARRED:
        app.tasks[name].Strategy = f"{__name__}:strategy"


def strategy(task: Any, app: Celery, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Makes the function that Celery's consumer calls with each job of `map` or `starmap`."""
    stock = default(task, app, consumer, **options)

    def handle(message: Any, body: Any, *rest: Any) -> Any:
        payload, headers = message.payload, message.headers
        if isinstance(payload, Mapping):
            payload, headers, *_ = hybrid_to_proto2(message, payload)
        given, keywords, embed = payload
        given = {**dict(zip(("task", "it"), given, strict=False)), **keywords}
        mapped, elements = given.get("task"), given.get("it")
        name = mapped.get("task") if isinstance(mapped, Mapping) else mapped
        is_batch = isinstance(name, str) and isinstance(app.tasks.get(name), BatchTask)
        # For no elements, nothing is called.
        if not elements or not is_batch:
            return stock(message, body, *rest)
        args, header = _read_arguments(list(elements), is_starred=IS_STARRED[task.name])
        # It becomes a message of the batch task itself.
        header = {"v": VERSION, **(headers.get(HEADER) or {}), **header}
        message.headers = {**headers, "task": name, HEADER: header}
        payload = message._decoded_cache = (args, {}, embed)
        message.content_type, message.content_encoding, message.body = dumps(payload, "json")
        return consumer.strategies[name](message, None, *rest)

    return handle


def _read_arguments(elements: list[Any], *, is_starred: bool) -> tuple[Any, dict[str, Any]]:
    """The arguments of a multi-item job, and what its header says of them."""
    # As `task(*each)` reads them.
    arguments = [list(each) if is_starred else [each] for each in elements]
    for each in arguments:
        if len(each) != 1:
            # The task refuses them, as it would refuse them from a caller.
            return each, {}
    return [[item for (item,) in arguments]], {"n": len(arguments), "values": True}

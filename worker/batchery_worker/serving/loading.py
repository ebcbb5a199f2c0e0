"""From a task to its model: loaded, warmed up, on an existing device."""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchery.errors import ModelLoadError, StartError
from batchery.execution.batch import compute, prepare
from batchery.execution.steps import run_steps
from batchery.model import Model, StepModel
from batchery.model_task import ModelTask
from batchery.outcomes import Failed
from batchery_worker.device.start import check_device
from batchery_worker.memory import Memory
from batchery_worker.serving.served_model import LoadedModel

logger = logging.getLogger("batchery.device")


def load_model(task: ModelTask, device: str) -> Model:
    """Loads the model of a task and runs its warm-up. Its results are for Redis.

    Raises:
        ModelLoadError: It cannot be loaded, or fails on its own warm-up items.
        DeviceUnavailable: The device does not exist.
    """
    kind = StepModel if task.slots else Model
    return _load(task.name, task.make_model, device, gives_json=True, kind=kind)


def check_kind(name: str, model: Model, kind: type[Model]) -> None:
    """Makes sure that a model has slots where they are expected, and only there.

    Raises:
        ModelLoadError: It is not so; says what to do.
    """
    if isinstance(model, StepModel) and not issubclass(kind, StepModel):
        raise ModelLoadError(
            f"model {name!r}: a {type(model).__name__} is a StepModel, which runs in slots: no"
            " Engine runs it, but a worker; give its class or slots=... to batchery.register"
        )
    if not isinstance(model, kind):
        raise ModelLoadError(
            f"model {name!r}: a {type(model).__name__} is no batchery.StepModel, so it has no"
            " slots; take away the option slots"
        )


def serve_model(
    name: str,
    make_model: Callable[[], Model],
    device: str,
    memory: Memory,
    *,
    gives_json: bool,
) -> LoadedModel:
    """Loads a model, warms it up, and weighs it.

    Args:
        name: Its name in errors and figures.
        make_model: Makes it, not loaded.
        device: As torch spells it.
        memory: Memory of that device.
        gives_json: Whether its results leave for Redis, so that it may encode them itself.

    Raises:
        ModelLoadError: It cannot be loaded, or fails on its own warm-up items.
        DeviceUnavailable: The device does not exist.
    """
    before_bytes = memory.allocated_bytes()
    model = _load(name, make_model, device, gives_json=gives_json)
    held_bytes = memory.allocated_bytes() - before_bytes
    return LoadedModel(name, model, device, memory, weigh_model(model) or held_bytes)


def weigh_model(model: Model) -> int | None:
    """The memory of a model by its own account, or on a CPU by its weights; None if unknown."""
    if model.memory_bytes is not None or "torch" not in sys.modules:
        return model.memory_bytes
    # It imports torch, and this model may be of another library.
    from batchery_worker.models.hardware.devices import sum_cpu_bytes

    return sum_cpu_bytes(vars(model).values())


def _load(
    name: str,
    make_model: Callable[[], Model],
    device: str,
    *,
    gives_json: bool,
    kind: type[Model] = Model,
) -> Model:
    check_device(device)
    started_s = time.monotonic()
    logger.info("loading model %s on %s", name, device)
    try:
        model = make_model()
        check_kind(name, model, kind)
        model.load(device)
        give_json = getattr(model, "give_json", None)
        if gives_json and give_json is not None:
            give_json()
        items = list(model.warm_up())
        if items:
            for outcome in _warm_up(model, items):
                if isinstance(outcome, Failed):
                    raise outcome.exception
    except StartError:
        raise
    except Exception as error:
        logger.debug("loading %s", name, exc_info=True)
        raise ModelLoadError(
            f"model {name!r} cannot be loaded on {device}: {type(error).__name__}: {error}"
        ) from error
    logger.info("%s loaded on %s in %.1f s", name, device, time.monotonic() - started_s)
    return model


def _warm_up(model: Model, items: Sequence[Any]) -> list[Any]:
    keywords = sample_keywords(model)
    prepared = prepare(model, items, keywords)
    if isinstance(model, StepModel):
        return run_steps(model, prepared, keywords)
    return compute(model, prepared, keywords, lambda _: [range(len(items))])[0]


def sample_items(model: Model, texts: Sequence[Any]) -> Sequence[Any]:
    """Items that are made of texts: some built-in kinds take more than a text."""
    make = getattr(model, "sample_item", None)
    return texts if make is None else [make(text) for text in texts]


def sample_keywords(model: Model) -> Mapping[str, Any]:
    """Keywords of items that nobody sent: some built-in kinds need a few."""
    keywords: Mapping[str, Any] = getattr(model, "sample_keywords", {})
    return keywords


def build_identity(task: ModelTask, model: Model) -> str:
    """What the results of a model depend on; empty if they are not cached.

    Raises:
        ModelLoadError: The model's `identity` raised.
    """
    if task.cache is None:
        return ""
    try:
        return str(model.identity())
    except Exception as error:
        raise ModelLoadError(
            f"model {task.name!r}: its results cannot be kept, as it does not say what they depend"
            f" on: {type(error).__name__}: {error}"
        ) from error

"""The task of a model: a batch task with a queue of its own, whose function is a `Model`."""

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from celery.utils.imports import symbol_by_name

from batchery.execution.batch import compute, prepare
from batchery.execution.steps import run_steps
from batchery.media_settings import MEDIA_KINDS
from batchery.model import Model, StepModel
from batchery.settings import ModelSettings
from batchery.task import BatchTask

#: Guards the loading of a model: threads of an ordinary pool must share one copy.
_loading = threading.Lock()


class ModelTask(BatchTask):
    """A batch task that runs a `Model`; made by `register`."""

    abstract = True

    #: See `BatchTask`; and what makes the loop of a model that runs in slots.
    Runner = "batchery_worker.serving.model_runner:ModelRunner"
    SlotLoop = "batchery_worker.serving.slot_loop:SlotLoop"

    #: Characters of a result in logs and events: enough to tell vectors apart, not to read them.
    resultrepr_maxsize = 128

    #: Queue that its jobs are sent to, unless the call names another. Celery's own attribute is
    #: `queue`, which Celery 6 will ignore.
    model_queue: str

    #: Devices of a worker that have it; None for all.
    devices: Sequence[str] | None = None
    #: Whether it stays loaded, whatever else needs the memory of its devices.
    pinned: bool = False
    #: How many processes take its jobs for each device; 0 for that of the device itself.
    feeders: int = 0

    #: The class, or its import path: a producer does not need the model's code.
    model: type[Model] | str
    #: Keyword arguments of its constructor.
    model_options: Mapping[str, Any] = {}

    _loaded: Model | None = None

    @cached_property
    def sees_request(self) -> bool:
        """Always False: a model gets items, and no task."""
        return False

    def run(self, items: list[Any], **keywords: Any) -> list[Any]:
        """Runs one batch on a model in this process, loaded on the CPU at the first call.

        For tests, scripts and workers without devices, which run a model in their own processes.
        """
        model = self._local_model
        prepared = prepare(model, items, keywords)
        if isinstance(model, StepModel):
            with _loading:
                # It has the items of one batch at a time.
                try:
                    return run_steps(model, prepared, keywords)
                except BaseException:
                    # Some are still in its slots, and nothing is known of them.
                    self._loaded = None
                    model.unload()
                    raise
        outcomes, _, _ = compute(model, prepared, keywords, lambda lengths: [range(len(lengths))])
        return outcomes

    @property
    def Readers(self) -> str | None:  # type: ignore[override]
        """Of pictures and sound: the models of these kinds take what was read."""
        settings = self.model_settings
        if settings is None or settings.kind not in MEDIA_KINDS:
            return None
        return "batchery_worker.media.reading:Readers"

    @property
    def has_own_process(self) -> bool:
        """Also a model with feeders has one."""
        return bool(self.feeders) or super().has_own_process

    @property
    def own_queue(self) -> str | None:
        """None: it has `model_queue`, as by a route."""
        return None

    def _get_exec_options(self) -> dict[str, Any]:
        # Celery asks here for a task's default options, in `delay` as in `send_task`.
        options = super()._get_exec_options()
        return {**options, "queue": self.model_queue}

    @property
    def model_settings(self) -> ModelSettings | None:
        """The settings of a built-in model, as they were at the start; None for an own class."""
        settings = self.model_options.get("settings")
        return settings if isinstance(settings, ModelSettings) else None

    def make_model(self) -> Model:
        """A new model, not loaded yet."""
        model = symbol_by_name(self.model) if isinstance(self.model, str) else self.model
        return cast(type[Model], model)(**self.model_options)

    @property
    def _local_model(self) -> Model:
        with _loading:
            if self._loaded is None:
                model = self.make_model()
                model.load("cpu")
                self._loaded = model
        return self._loaded

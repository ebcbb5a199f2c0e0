"""Runs the batches of models that a device has loaded, or loads at demand."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from batchery.execution.batch import prepare
from batchery.installation import get_installation
from batchery.model_task import ModelTask
from batchery_worker.batch import DeviceBatch
from batchery_worker.device.functions import soft_time_limit
from batchery_worker.device.runner import Between, RunnerContext
from batchery_worker.device.start import find_task
from batchery_worker.device_pool.weights import estimate_bytes
from batchery_worker.ipc.messages import Loaded, Loads
from batchery_worker.serving.loading import build_identity, serve_model
from batchery_worker.serving.model_pool import ModelPool
from batchery_worker.serving.served_model import LoadedModel


class ModelRunner:
    """The models of a device; see `Runner`."""

    def __init__(self, context: RunnerContext) -> None:
        """Loads nothing yet."""
        self._context = context
        self._pool = ModelPool(self._load, self._estimate, context.setup, context.memory)

    def start(self) -> None:
        """Loads the models that must be there, and of the others those for which there is room.

        Raises:
            ModelLoadError: One of the first cannot be loaded.
        """
        setup = self._context.setup
        self._pool.load_first(setup.load)
        if setup.reloaded:
            self._pool.serve(setup.reloaded)

    def choose(self, batch: DeviceBatch) -> str:
        """Chooses the model that is loaded now, if it is; returns its identity."""
        return self._use(batch, self._pool.loaded.get(batch.work.task))

    def _use(self, batch: DeviceBatch, served: LoadedModel | None) -> str:
        batch.served = served
        if served is None:
            return ""
        batch.version = served.version
        return served.identity

    def prepare(self, batch: DeviceBatch, items: list[Any]) -> Sequence[Any]:
        """Validates and tokenizes items, if their model is loaded."""
        served: LoadedModel | None = batch.served
        return items if served is None else prepare(served.model, items, batch.work.keywords)

    def make_ready(self, batch: DeviceBatch) -> bool:
        """Loads the model of a batch, if it is not there; returns whether it is another one.

        Raises:
            BatcheryError: The model cannot be loaded.
        """
        if batch.served is not None and batch.served.is_loaded:
            return False
        before = batch.served
        self._use(batch, self._serve(batch))
        return batch.served is not before

    def _serve(self, batch: DeviceBatch) -> LoadedModel:
        """The worker must not take a load for a pass that hangs."""
        name, tell = batch.work.task, self._context.tell
        if name in self._pool.loaded:
            return self._pool.loaded[name]
        began_s = time.monotonic()
        tell(Loads(batch.work.id, self._pool.expect_load_s(name)))
        try:
            return self._pool.serve(name, self._context.find_wanted())
        finally:
            batch.load_s = time.monotonic() - began_s
            tell(Loaded(batch.work.id, self._pool.report()))

    def may_interrupt(self, batch: DeviceBatch) -> bool:
        """Whether its model is loaded: another one might have to go for that."""
        return batch.served is not None and batch.served.is_loaded

    def run(self, batch: DeviceBatch, items: list[Any], between: Between) -> list[Any]:
        """Runs the forward passes of prepared items."""
        served: LoadedModel = batch.served
        limit = partial(soft_time_limit, batch.work.soft_time_limit_s)
        outcomes, tokens, computed_tokens = served.compute(
            items, batch.work, limit, between.start_next, between.run_urgent
        )
        batch.tokens += tokens
        batch.computed_tokens += computed_tokens
        return outcomes

    def start_ahead(self, batch: DeviceBatch) -> None:
        """Starts the first pass of a batch, if its model is loaded."""
        if self.may_interrupt(batch):
            batch.served.start(batch.items, batch.work)

    def figures(self) -> dict[str, Any]:
        """Of each model, loaded or not."""
        return self._pool.figures()

    def _load(self, name: str) -> LoadedModel:
        context = self._context
        task = cast(ModelTask, find_task(context.app, name))
        device = context.setup.device
        served = serve_model(name, task.make_model, device, context.memory, gives_json=True)
        # Each batch has it, too; but somebody may look before the first one.
        own = get_installation(context.app).settings.max_batch_tokens
        served.limit(task.max_batch_tokens or own)
        served.identity = build_identity(task, served.model)
        served.version = served.model.version()
        return served

    def _estimate(self, name: str) -> int | None:
        task = cast(ModelTask, self._context.app.tasks[name])
        return estimate_bytes(task.model_settings, self._context.device)

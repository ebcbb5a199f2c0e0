"""`install(app)`: one call, and an existing Celery app can run batch tasks."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from celery import Celery

from batchery.cluster_backend import use_cluster_results
from batchery.errors import BatchArgumentError, StartError
from batchery.installation import get_installation, remember
from batchery.media_settings import MEDIA_KINDS
from batchery.model import Model, StepModel
from batchery.model_settings import PLACE_OPTIONS, TASK_OPTIONS, ModelSettings
from batchery.model_task import ModelTask
from batchery.settings import Settings
from batchery.transport import use_transport

logger = logging.getLogger(__name__)

STEP = "batchery_worker.bootstep:BatchStep"
DEVICES_STEP = "batchery_worker.devices_step:DevicesStep"
WATCH_STEP = "batchery_worker.operations.watch:WatchStep"
REFUSALS_STEP = "batchery_worker.devices_step:RefusalsStep"

#: Import paths of the built-in kinds; a path, so that a producer never imports torch.
KINDS = {
    "embedding": "batchery_worker.models.embedding:EmbeddingModel",
    "classification": "batchery_worker.models.classification:ClassificationModel",
    "rerank": "batchery_worker.models.classification:RerankModel",
    "sparse_embedding": "batchery_worker.models.embedding:SparseEmbeddingModel",
    "multi_vector_embedding": "batchery_worker.models.embedding:MultiVectorEmbeddingModel",
    "generation": "batchery_worker.models.generation.model:GenerationModel",
    "image_embedding": "batchery_worker.models.vision.embedding:ImageEmbeddingModel",
    "image_classification": "batchery_worker.models.vision.classification:ImageClassificationModel",
    "zero_shot_image_classification": (
        "batchery_worker.models.vision.classification:ZeroShotImageClassificationModel"
    ),
    "object_detection": "batchery_worker.models.vision.detection:ObjectDetectionModel",
    "audio_classification": "batchery_worker.models.audio.sounds:AudioClassificationModel",
    "audio_embedding": "batchery_worker.models.audio.sounds:AudioEmbeddingModel",
    "transcription": "batchery_worker.models.audio.transcription:TranscriptionModel",
}

#: The same for what computes texts, and how many at once where the settings do not say.
ENGINES = {
    "transformers": (KINDS["generation"], 16),
    "openai": ("batchery_worker.models.openai_server.model:OpenAIServerModel", 256),
    "vllm": ("batchery_worker.models.openai_server.vllm_server:VllmModel", 64),
}

#: How many jobs of other kinds with slots run at once where the settings do not say.
SLOTS = {"transcription": 16}


def install(app: Celery, **settings: Any) -> Celery:
    """Makes an app able to run batch tasks; ordinary tasks and clients notice nothing.

    Ordinary tasks keep the pool that the app or the command line names. Batch tasks run on devices
    beside it. Models named in the settings become tasks when the app is finalized; nothing is read
    before that.

    Args:
        app: Any Celery app, configured or not.
        settings: Settings by name; they outrank `app.conf.batchery_*`, environment and file.

    Returns:
        The same app.
    """
    remember(app, settings)
    app.steps["worker"].update((STEP, DEVICES_STEP, WATCH_STEP))
    app.steps["consumer"].add(REFUSALS_STEP)
    use_transport()
    use_cluster_results(app)
    if getattr(app, "finalized", False):
        _register_models(app)
    else:
        app.on_after_finalize.connect(_on_after_finalize, weak=False)
    return app


def register(
    app: Celery,
    name: str,
    model: type[Model] | str,
    *,
    queue: str | None = None,
    options: Mapping[str, Any] | None = None,
    **task_options: Any,
) -> ModelTask:
    """Registers a model as a Celery task with a queue of its own.

    Args:
        app: An app that `install` was called with.
        name: Name of the task.
        model: A subclass of `Model`, or its import path as `package.module:Class`.
        queue: Name of its queue; None for the name of the task.
        options: Keyword arguments of the model's constructor.
        task_options: As for `app.task`: `max_batch_size`, `time_limit` and so on. A `StepModel` has
            `slots` in place of all limits of batches; given by path, it must have it here. Also
            `devices` and `pinned`, as in the settings of a model.

    Returns:
        The task: `register(...).delay("some text").get()`.

    Raises:
        BatchArgumentError: A model with slots is given limits of batches.
    """
    if isinstance(model, type) and issubclass(model, StepModel):
        task_options["slots"] = task_options.get("slots") or model.slots
    if task_options.get("slots"):
        task_options = _without_batches(name, task_options)
    attributes = {
        "name": name,
        "model_queue": queue or name,
        "model": model,
        "model_options": options or {},
        "__doc__": model.__doc__ if isinstance(model, type) else None,
        # The caller's module: a device process imports it to get this task.
        "__module__": sys._getframe(1).f_globals.get("__name__", __name__),
        **task_options,
    }
    task: ModelTask = app.register_task(type("ModelTask", (ModelTask,), attributes)())
    return task


def _without_batches(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a task whose jobs have no batch: each of them is its own."""
    for given in ("max_batch_size", "max_batch_tokens", "target_latency_ms", "cache"):
        if options.get(given) is not None:
            raise BatchArgumentError(
                f"task {name!r}: {given} = {options[given]!r} has no meaning for a model with"
                " slots; take it away, and say how many items run at once by slots"
            )
    return {**options, "max_batch_size": 1}


def _on_after_finalize(sender: Celery, **_: Any) -> None:
    # Celery only logs an error of a signal handler. The worker must stop with it, so it is kept.
    try:
        _register_models(sender)
    except StartError as error:
        get_installation(sender).error = error
        # A worker logs it as it ends. Clients do without this import.
        import click

        context = click.get_current_context(silent=True)
        if context is None or context.find_root().invoked_subcommand != "worker":
            logger.error("%s", error)


def _register_models(app: Celery) -> None:
    for name, settings in get_installation(app).settings.models.items():
        if isinstance(app.tasks.get(name), ModelTask):
            # An earlier `install` registered it; the last call wins.
            app.tasks.unregister(name)
        _register_builtin(app, name, settings)


def find_options(model: ModelSettings, settings: Settings) -> dict[str, Any]:
    """Keyword arguments of the constructor of a built-in model."""
    media = {"media": settings.media} if model.kind in MEDIA_KINDS else {}
    return {"settings": model, **media}


def _register_builtin(app: Celery, name: str, settings: ModelSettings) -> None:
    model, slots = KINDS[settings.kind], SLOTS.get(settings.kind)
    if settings.kind == "generation":
        model, slots = ENGINES[settings.engine]
    register(
        app,
        name,
        model,
        queue=settings.queue,
        options=find_options(settings, get_installation(app).settings),
        # The rest of the version is the model's own: see `Model.identity`.
        cache="built-in" if settings.cache else None,
        slots=slots and (settings.slots or slots),
        **{each: getattr(settings, each) for each in PLACE_OPTIONS},
        # `max_batch_tokens` is the model's own matter there.
        **{each: getattr(settings, each) for each in (() if slots else TASK_OPTIONS)},
    )

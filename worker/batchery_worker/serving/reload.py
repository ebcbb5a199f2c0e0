"""Other versions of models: loaded beside those that serve, and put into their places.

A thread of its own loads the new version and warms it up, while the device goes on with the old
one. From then on batches are prepared with the new one. Those that were prepared before run on the
old one, which is freed when they are answered.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

from batchery.errors import BatcheryError, ModelLoadError
from batchery.execution.bisect_failures import has_run_out
from batchery.settings import ModelSettings
from batchery_worker.device.runner import PassTurn, RunnerContext
from batchery_worker.ipc.messages import Reload, Reloaded
from batchery_worker.serving.model_pool import ModelPool
from batchery_worker.serving.served_model import LoadedModel

#: How often the thread looks whether batches of the old version are answered, in seconds.
LOOK_S = 0.01

#: Loads the model of a task, by its name, with other settings than its own unless they are None.
LoadVersion = Callable[[str, ModelSettings | None], LoadedModel]


class Reloader:
    """Swaps the models of a device."""

    def __init__(
        self,
        context: RunnerContext,
        pool: ModelPool,
        load: LoadVersion,
        versions: dict[str, ModelSettings],
    ) -> None:
        """Starts no thread yet.

        Args:
            context: Of the device.
            pool: Its models.
            load: Loads a version.
            versions: By name of a task, the settings of its model; gets those of a version.
        """
        self._context = context
        self._pool = pool
        self._load = load
        self._versions = versions
        self._threads: int | None = None

    def note_threads(self) -> None:
        """Notes how many threads of torch this one has; on the main thread, after a load.

        A new thread would have as many as a pass that is one of several side by side.
        """
        if (torch := sys.modules.get("torch")) is not None:
            self._threads = int(torch.get_num_threads())

    def begin(self, order: Reload) -> None:
        """Begins to load a version; the parent hears when it is served, or why it is not."""
        threading.Thread(
            target=self._reload, args=(order,), daemon=True, name="batchery-reload"
        ).start()

    def _reload(self, order: Reload) -> None:
        started_s = time.monotonic()
        if self._threads is not None:
            sys.modules["torch"].set_num_threads(self._threads)
        old = None
        try:
            with _in_turn(self._context.turn):
                new = self._load(order.task, order.settings)
            if not order.force:
                check_dimensions(self._pool.find_dimensions(order.task), new)
            load_s = time.monotonic() - started_s
            # While no batch runs.
            with self._context.turn:
                old = self._pool.replace(new, load_s)
                if order.settings is not None:
                    self._versions[order.task] = order.settings
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent waits
            answer = Reloaded(order.task, "", 0.0, describe(error))
            # What was loaded until then may refer to itself. It holds up all threads for a moment.
            gc.collect()
        else:
            answer = Reloaded(order.task, new.version, load_s)
            if old is not None:
                self._retire(old)
        # Nothing else refers to them any more.
        old = new = None  # type: ignore[assignment]
        self._context.memory.release()
        with suppress(OSError):  # The parent is gone.
            self._context.tell(answer._replace(figures=self._pool.report()))

    def _retire(self, old: LoadedModel) -> None:
        """Waits for the last batch of a version."""
        held = set(self._context.unanswered)
        while held & self._context.unanswered:
            time.sleep(LOOK_S)
        old.unload()


def check_dimensions(before: int | None, new: LoadedModel) -> None:
    """Refuses vectors that cannot be compared with those that callers have.

    Args:
        before: Dimensions of the vectors until now; None if there are none.
        new: The version that shall take the place.

    Raises:
        ModelLoadError: They have another number of dimensions.
    """
    if before is not None and before != new.dimensions:
        raise ModelLoadError(
            f"model {new.name!r}: the vectors of the new version have {new.dimensions} dimensions,"
            f" and not {before} as before; --force loads it nevertheless"
        )


def describe(error: BaseException) -> str:
    """Why a version was not loaded, in one line."""
    text = str(error) if isinstance(error, BatcheryError) else f"{type(error).__name__}: {error}"
    if "out of memory" in text or has_run_out(error):
        text += "; while a model is reloaded, its device holds it twice"
    return text


def _in_turn(turn: PassTurn) -> AbstractContextManager[None]:
    if "transformers" not in sys.modules:
        return nullcontext()
    # It imports torch and transformers.
    from batchery_worker.models.source import built_within

    return built_within(turn)

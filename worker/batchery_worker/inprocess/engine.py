"""`Engine`: a model of the settings in the caller's own process, without a broker."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Self

from kombu.utils.imports import symbol_by_name

from batchery.device_names import is_device
from batchery.errors import BatchArgumentError, DeviceDied, SettingsError
from batchery.execution.batch import prepare
from batchery.installer import KINDS, find_options
from batchery.model import Model
from batchery.outcomes import Failed
from batchery.settings import ModelSettings, Settings
from batchery_worker.device.start import check_device, find_memory
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.inprocess.batch_runner import BatchRunner
from batchery_worker.inprocess.batcher import BatchedCall, make_thread
from batchery_worker.inprocess.options import (
    BatcherOptions,
    CallOptions,
    check_names,
    check_number,
)
from batchery_worker.serving.loading import serve_model
from batchery_worker.serving.served_model import LoadedModel
from batchery_worker.work import Work

#: Settings that a model may have of its own, and that an engine's keywords outrank.
BATCH_SETTINGS = ("max_batch_size", "max_wait_ms", "target_latency_ms")

#: Options of `batched` that engines have not, or have as arguments.
NOT_OF_ENGINES = ("length", "max_batch_tokens")


class EngineCall(BatchedCall[Any, Any]):
    """How an engine is called: awaited, with `call`, or with `submit`.

    Calling it makes a coroutine, other than with `batched`. Engines stand in asyncio servers, where
    a call that blocks by mistake stops everybody, and a forgotten `await` is found at once.
    """

    async def __call__(  # type: ignore[override]
        self, item: Any, /, *others: Any, **keywords: Any
    ) -> Any:
        """The result of one item; of a list of items, the list of results.

        Args:
            item: A text, or what else the model takes. A list counts as many items.
            others: None: one positional argument, and the rest as keywords.
            keywords: Of the model, such as `dimensions`. Only calls with equal ones share a batch.

        Raises:
            InvalidItem: The item or a keyword is wrong.
            OutOfMemory: The device has no memory for this item alone.
            DeviceDied: The device computes nothing any more, as after a fault of CUDA.
            ModelLoadError: The model cannot be loaded.
            DeviceUnavailable: The device does not exist.
            NoResult: None came within `timeout_s`.
            QueueFull: `max_waiting` items wait already, and callers are refused.
            BatcherClosed: It is closed, or belongs to the parent of this process.
            Exception: What the model raised for this item.
        """
        return await self.acall(item, *others, **keywords)

    def call(self, item: Any, /, *others: Any, **keywords: Any) -> Any:
        """The same for threads: waits for the result. Raises what a call that is awaited raises."""
        return super().__call__(item, *others, **keywords)

    def options(self, **options: Any) -> "EngineCall":
        """The same engine, called with other options: those of `CallOptions`.

        Raises:
            BatchArgumentError: There is no such option, or its value is impossible.
        """
        chosen: CallOptions = super().options(**options)._call_options
        return EngineCall(self._thread, self._owner, chosen)


class Engine(EngineCall):
    """A model in this process: batched, planned and packed as in a worker, without a broker.

    ```python
    async with Engine("embed") as engine:       # a name in [models] of batchery.toml
        vector = await engine("some text")
        vectors = await engine(["a", "b"])

    with Engine("embed") as engine:             # from threads
        engine.call("some text")
        engine.submit("some text")              # a concurrent.futures.Future
    ```

    A result is what the model's `postprocess` gives. The model runs on one thread of this process.

    Entering the `with` loads the model; otherwise the first call does. The setting `cache` has no
    effect, as results are kept in Redis.
    """

    def __init__(
        self,
        model: str | ModelSettings | Model,
        /,
        *,
        device: str | None = None,
        max_batch_tokens: int | None = None,
        **options: Any,
    ) -> None:
        """Reads the settings; loads nothing yet.

        Args:
            model: A name in `[models]` of the settings; or the settings of a model; or a model of
                your own, not loaded yet.
            device: As torch spells it; None for the first one of the setting `devices`.
            max_batch_tokens: Maximum tokens of one forward pass, with padding; None for the
                settings.
            options: Those of `batched`, but for `length`; by default the settings of their names.

        Raises:
            SettingsError: There is no such model or device, it runs in slots, or a setting is
                wrong.
            BatchArgumentError: There is no such option, or its value is impossible.
        """
        check_number("max_batch_tokens", max_batch_tokens, whole=True, optional=True)
        settings = Settings.load()
        name, own, make_model = _find(model, settings)
        if own is not None and own.kind == "generation":
            raise SettingsError(
                f"Engine({name!r}): is of kind generation, which runs in slots, and an Engine has"
                " none; run a worker: celery -A batchery.app worker"
            )
        chosen = _options(name, settings, own, options)
        self._device = _Device(
            name,
            make_model,
            settings.devices if device is None else [_checked(device)],
            chosen.max_batch_size,
            max_batch_tokens or (own and own.max_batch_tokens) or settings.max_batch_tokens,
            settings.memory_fraction,
        )
        thread = make_thread(self, BatchRunner(_run, name, chosen))
        # The thread must not keep the engine alive.
        thread.load, thread.unload = self._device.load, self._device.close
        super().__init__(thread, self)

    @property
    def figures(self) -> dict[str, Any]:
        """What `batchery stats` would show of the model: its budget, its costs, its memory.

        Empty before the model is loaded and after `close`.
        """
        return self._device.figures()

    def __enter__(self) -> Self:
        """Loads the model.

        Raises:
            ModelLoadError: It cannot be loaded, or fails on its own warm-up items.
            DeviceUnavailable: The device does not exist.
            BatcherClosed: The engine is closed.
        """
        try:
            self._thread.start().result()
        except BaseException:
            self._thread.close(wait=False)
            raise
        return self

    async def __aenter__(self) -> Self:
        """The same, without blocking the event loop."""
        try:
            await asyncio.wrap_future(self._thread.start())
        except BaseException:
            self._thread.close(wait=False)
            raise
        return self


@dataclass
class _Device:
    """Computes on the calling thread, always the same one: CUDA knows a device per thread.

    Attributes:
        name: That of the model in errors.
        make_model: Makes the model, not loaded.
        devices: The first one is taken; `auto` is the first CUDA device, or the CPU.
        max_batch_size: Maximum items of a forward pass.
        max_batch_tokens: Maximum tokens of a forward pass, with padding; by device if None.
        memory_fraction: Share of a CUDA device's memory that may be used.
        problem: Why it computes nothing any more, until it is closed; empty while it does.
    """

    name: str
    make_model: Callable[[], Model]
    devices: Literal["auto"] | Sequence[str]
    max_batch_size: int
    max_batch_tokens: int | None
    memory_fraction: float
    problem: str = ""
    _served: LoadedModel | None = None

    def load(self) -> None:
        """Loads the model and warms it up."""
        device = choose_devices(self.devices)[0]
        check_device(device)
        memory = find_memory(device, self.memory_fraction)
        self._served = serve_model(self.name, self.make_model, device, memory, gives_json=False)
        self._served.limit(self.max_batch_tokens)

    def run(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[list[Any], int, int]:
        """Computes one batch.

        Returns:
            One outcome per item, in order; the tokens of the items, and those that were computed,
            with padding.
        """
        served = self._served
        assert served is not None
        if self.problem:
            return self._refuse(items)
        # A batch as `LoadedModel` knows it.
        work = Work(0, self.name, keywords, (), self.max_batch_size, self.max_batch_tokens)
        try:
            return served.compute(prepare(served.model, items, keywords), work, nullcontext)
        except DeviceDied as error:
            self.problem = f"{error}; only a new process can use this device"
            return self._refuse(items)

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` would show of the model."""
        return {} if self._served is None else self._served.figures()

    def close(self) -> None:
        """Frees the model."""
        served, self._served = self._served, None
        if served is not None and not self.problem:
            served.model.unload()

    def _refuse(self, items: Sequence[Any]) -> tuple[list[Any], int, int]:
        # Not raised: halves of the batch would try it again.
        return [Failed(DeviceDied(self.problem)) for _ in items], 0, 0


def _run(engine: Engine, items: Sequence[Any], /, **keywords: Any) -> list[Any]:
    """The function of the batcher: computes one batch."""
    thread, device = engine._thread, engine._device
    outcomes, tokens, computed_tokens = device.run(items, keywords)
    if device.problem:
        thread.close(wait=False, problem=device.problem)
    thread.runner.stats.tokens += tokens
    thread.runner.stats.computed_tokens += computed_tokens
    return outcomes


def _find(
    model: str | ModelSettings | Model, settings: Settings
) -> tuple[str, ModelSettings | None, Any]:
    """The name of a model, its settings if it has some, and what makes it."""
    if isinstance(model, Model):
        return type(model).__name__, None, lambda: model
    if isinstance(model, ModelSettings):
        return model.model, model, lambda: _make_builtin(model, settings)
    if not isinstance(model, str):
        raise BatchArgumentError(
            f"Engine({model!r:.80}): give the name of a model in the settings, ModelSettings(...),"
            " or an instance of a subclass of Model"
        )
    own = settings.models.get(model)
    if own is None:
        there = ", ".join(settings.models) or "none; name it in [models] of batchery.toml"
        raise SettingsError(f"Engine({model!r}): no such model in the settings; there is {there}")
    return model, own, lambda: _make_builtin(own, settings)


def _make_builtin(model: ModelSettings, settings: Settings) -> Model:
    # By path: importing the class imports torch.
    made: Model = symbol_by_name(KINDS[model.kind])(**find_options(model, settings))
    return made


def _options(
    name: str, settings: Settings, own: ModelSettings | None, given: Mapping[str, Any]
) -> BatcherOptions:
    """How batches are formed: keywords first, then the model's own settings, then all others."""
    usual: dict[str, Any] = {"classes": settings.shares}
    for each in BATCH_SETTINGS:
        of_model = getattr(own, each, None)
        usual[each] = getattr(settings, each) if of_model is None else of_model
    known = [each for each in BatcherOptions.__dataclass_fields__ if each not in NOT_OF_ENGINES]
    check_names(name, given, ["device", *known])
    return BatcherOptions(**{**usual, **given})


def _checked(device: str) -> str:
    if not isinstance(device, str) or not is_device(device):
        raise SettingsError(f"device={device!r}: not a device; use 'cpu', 'cuda:0' or 'mps'")
    return device

"""How a model lies on its device: whole, or layer by layer on several parts.

A device of several parts is spelled with `+`, such as `cuda:0+cuda:1`. To all but this module it is
one device.

In a pipeline each part computes another pass at the same time. A stage is the layers of one part.
Each pass has a thread, goes from stage to stage, and has the stage for itself where it is. On cards
that thread only launches, on streams of its own: those that torch has by default would make a card
wait for all that the next one has to do. There an event is the end of a stage, and the next pass
waits for it on the card.
"""

import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any, ClassVar

import psutil
import torch
from torch import Tensor, nn

from batchery.device_names import main_device
from batchery.settings import ModelSettings
from batchery_worker.models.hardware.devices import device_named, dtype_for
from batchery_worker.models.hardware.transfers import DeviceToHost

logger = logging.getLogger(__name__)

#: Share of the free memory that weights may take: passes need the rest.
WEIGHTS_SHARE = 0.8

#: What a map calls the places of layers -> what people do.
PLACES = {"cpu": "main memory", "disk": "the model's files"}


class Whole:
    """A model whole on one device.

    Attributes:
        device: Where its inputs go, and its results come from.
        stages: Number of parts that compute different passes at the same time.
        options: Keyword arguments of `from_pretrained`.
        is_whole: Whether it may be moved and captured as on a device of its own.
    """

    stages = 1
    is_whole: ClassVar[bool] = True

    def __init__(self, device: str) -> None:
        self.device: torch.device = device_named(device)
        self.options: dict[str, Any] = {}

    def begin(self, model: Any, config: Any) -> None:
        """Looks whether the model of this config fits, before weights are loaded.

        Raises:
            ValueError: It does not; says what to use instead.
        """

    def place(self, model: nn.Module) -> None:
        """Moves a model of transformers, once loaded."""
        model.to(self.device)

    def settle_thread(self) -> None:
        """Gets a thread ready to compute passes."""

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Runs a pass on a thread of several that compute; returns its values, on the CPU."""
        return compute()


class Layers(Whole):
    """The layers of a model, each where there was room; those that fit nowhere are fetched in turn.

    One process computes all of them, so that one card works at a time: for models that are too
    large, not for speed. accelerate moves the activations, and fetches layers from main memory or
    from the model's files when it is their turn.
    """

    is_whole: ClassVar[bool] = False

    def __init__(self, device: str, settings: ModelSettings) -> None:
        """Looks how much each part of the device may hold.

        Raises:
            ValueError: The kind of the model needs all layers on one card.
        """
        if settings.kind == "generation" and device.count("cuda") > 1:
            raise ValueError(
                f"texts are written from one cache, and the layers of {device} would need one each;"
                " name one card, or set engine = 'vllm'"
            )
        super().__init__(main_device(device))
        self._name = device
        self._settings = settings
        self._parts = device.split("+")
        parts = [device_named(part) for part in self._parts if part != "disk"]
        self._budget = {self.budget_key(part): self._find_room(part) for part in parts}
        self.options: dict[str, Any] = {"device_map": "auto", "max_memory": self._budget}

    @staticmethod
    def budget_key(part: torch.device) -> int | str:
        """What accelerate calls a part."""
        return part.index if part.type == "cuda" else "cpu"

    def _find_room(self, part: torch.device) -> int:
        if part == self.device and self._settings.layer_memory_bytes:
            return self._settings.layer_memory_bytes
        if part.type != "cuda":
            return int(psutil.virtual_memory().available * WEIGHTS_SHARE)
        # By the setting `memory_fraction`, which the process has set for its first card.
        share = float(torch.cuda.get_per_process_memory_fraction(self.device))
        torch.cuda.set_per_process_memory_fraction(share, part)
        free_bytes, total_bytes = torch.cuda.mem_get_info(part)
        return int(min(free_bytes, total_bytes * share) * WEIGHTS_SHARE)

    def place(self, model: nn.Module) -> None:
        """Looks where the layers are. Raises ValueError: some are where none must be."""
        count = Counter(str(where) for where in getattr(model, "hf_device_map", {}).values())
        spilled = [place for place in PLACES if count[place] and place not in self._parts]
        if spilled:
            sums = ", ".join(f"{size / 2**30:.2f} GiB on {at}" for at, size in self._budget.items())
            raise ValueError(
                f"{count[spilled[0]]} of its parts do not fit into {self._name} ({sums}): name more"
                " cards, or end the name in +cpu, +disk or both for layers that wait in main"
                " memory or in the model's files"
            )
        if self._settings.kind == "generation" and next(model.parameters()).is_meta:
            raise ValueError(
                f"not even its first layer fits into {self.device}, where the texts that grow are;"
                " set more layer_memory_bytes"
            )
        found = ", ".join(
            f"{each} in {PLACES.get(place, f'cuda:{place}')}" for place, each in count.items()
        )
        logger.info("model %s: parts by place: %s", self._settings.model, found)


class Pipeline(Layers):
    """The layers of a model in equal shares, one for each part."""

    def __init__(self, device: str, settings: ModelSettings) -> None:
        """Looks how much each part of the device may hold.

        Raises:
            ValueError: The device, or the kind of the model, is not for a pipeline.
        """
        if device.endswith(("+cpu", "+disk")):
            raise ValueError(
                f"split = 'pipeline' is for layers that stay on cards, not for {device}; set split"
                " = 'layers', or name cards alone"
            )
        if settings.kind == "generation":
            raise ValueError(
                "split = 'pipeline' is for passes side by side, and texts are written one token"
                " after the other; name one card, or set engine = 'vllm'"
            )
        super().__init__(device, settings)
        self._devices = [device_named(part) for part in self._parts]
        self.stages = len(self._devices)
        self._to_host = DeviceToHost(self.device, waiters=self.stages + 1)
        self._locks = [threading.Lock() for _ in self._devices]
        #: Of each stage, on cards: where its last pass has left it.
        self._ends: list[torch.cuda.Event | None] = [None] * self.stages
        #: Name of each layer -> its part, once `begin` has found them.
        self._layer_parts: dict[str, int] = {}
        #: Of each thread: the stage where its pass is; nothing or None if it has no pass.
        self._here = threading.local()

    def begin(self, model: Any, config: Any) -> None:
        """Decides which part gets which layers. Raises ValueError: they do not fit."""
        if config.is_encoder_decoder:
            raise ValueError(
                f"split = 'pipeline' is for one stack of layers, and a {config.model_type} has two;"
                " set split = 'layers'"
            )
        whole = build_empty(model.auto_class, config, self._settings)
        layers = find_layers(whole)
        if len(layers) < self.stages:
            raise ValueError(
                f"{self._name} is {self.stages} parts, and a {config.model_type} has {len(layers)}"
                " layers that can be shared; name fewer, or set split = 'layers'"
            )
        item_bytes = dtype_for(self._settings.dtype, self.device).itemsize
        needed: Counter[int] = Counter()
        places = list(assign_parts(whole, layers, self.stages))
        for _, part, weights in places:
            needed[part] += weights * item_bytes
        budget = [self._budget[self.budget_key(each)] for each in self._devices]
        if any(needed[part] > budget[part] for part in needed):
            sums = ", ".join(
                f"{needed[part] / 2**30:.2f} of {budget[part] / 2**30:.2f} GiB on {where}"
                for part, where in enumerate(self._parts)
            )
            raise ValueError(
                f"its layers in equal shares do not fit into {self._name} ({sums}): name more"
                " cards, or set split = 'layers' and end the name in +cpu"
            )
        self._layer_parts = {name: part for name, part, _ in places if name in layers}
        self.options = {}
        if self.device.type == "cuda":
            self.options["device_map"] = {
                each: self._devices[part].index for each, part, _ in places
            }

    def place(self, model: torch.nn.Module) -> None:
        """Has each layer report to its stage."""
        for name, part in self._layer_parts.items():
            # Before accelerate fetches its inputs: it calls that the layer's forward.
            model.get_submodule(name).register_forward_pre_hook(partial(self._go_on, part))
        count = Counter(self._layer_parts.values())
        found = ", ".join(f"{count[part]} on {each}" for part, each in enumerate(self._parts))
        logger.info("model %s: layers by stage: %s", self._settings.model, found)

    def settle_thread(self) -> None:
        """Gives this thread streams of its own; the first part is its current device."""
        for device in reversed(self._devices if self.device.type == "cuda" else ()):
            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def run(self, compute: Callable[[], Tensor]) -> Tensor:
        """Takes a pass through all stages; returns its values, on the CPU."""
        is_main = threading.current_thread() is threading.main_thread()
        # A time limit in the midst of a change of stage would leave one taken for ever.
        with undisturbed() if is_main else nullcontext():
            self._enter(0)
            try:
                values = compute()
            finally:
                self._leave()
        return self._to_host.start(values).wait()

    def _go_on(self, stage: int, *_: Any) -> None:
        here = getattr(self._here, "stage", None)
        # None: passes that check the model run alone, and not by `run`.
        if here is not None and here != stage:
            self._leave()
            self._enter(stage)

    def _enter(self, stage: int) -> None:
        self._locks[stage].acquire()
        self._here.stage = stage
        end = self._ends[stage]
        if end is not None:
            torch.cuda.current_stream(self._devices[stage]).wait_event(end)

    def _leave(self) -> None:
        stage, self._here.stage = self._here.stage, None
        if stage is None:
            return
        try:
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self._devices[stage])
                self._ends[stage] = stream.record_event()
        finally:
            self._locks[stage].release()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Has a soft time limit wait for the end of the block."""
    expire = signal.getsignal(signal.SIGALRM)
    expired: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGALRM, lambda *args: expired.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, expire)
        if expired and callable(expire):
            expire(*expired[0])


def find_layers(model: nn.Module) -> list[str]:
    """Names of the layers of a model, in their order: what is in its lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        within = tuple(f"{layer}." for layer in found)
        if isinstance(module, nn.ModuleList) and not name.startswith(within):
            found += [f"{name}.{index}" for index in range(len(module))]
    return found


def assign_parts(
    model: nn.Module, layers: Sequence[str], parts: int
) -> Iterator[tuple[str, int, int]]:
    """Shares a model out.

    The weights of layers say how long they take. All else costs next to nothing, and is where the
    layers before it are. Modules without weights are used from the first layer on.

    Args:
        model: Of transformers; may be without data.
        layers: Names of its layers, as `find_layers` has them.
        parts: Number of parts.

    Yields:
        Name of a module or tensor; its part, counted from 0; the number of its weights.
    """
    total = sum(_count_weights(model.get_submodule(each)) for each in layers)
    part = before = 0
    for name, weights in _list_units(model, layers):
        if name in layers:
            part = int((before + weights / 2) * parts / total)
            before += weights
        yield name, part if weights else 0, weights


def _list_units(
    module: nn.Module, layers: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, int]]:
    """What must stay together, in order: layers, and modules and tensors with no layers in them."""
    for name, tensor in chain(
        module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    ):
        yield prefix + name, tensor.numel()
    for name, child in module.named_children():
        whole = prefix + name
        if any(layer.startswith(f"{whole}.") for layer in layers):
            yield from _list_units(child, layers, f"{whole}.")
        else:
            yield whole, _count_weights(child)


def _count_weights(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def open_split(device: str, settings: ModelSettings) -> Whole:
    """Opens the device of a model.

    Raises:
        ValueError: The model's settings do not go together with several parts.
    """
    if "+" not in device:
        return Whole(device)
    if settings.engine == "onnx":
        raise ValueError(f"engine = 'onnx' is for one device, not {device}")
    if find_spec("accelerate") is None:
        raise ValueError(f"{device} needs accelerate: pip install 'batchery[split]'")
    kind = Pipeline if settings.split == "pipeline" else Layers
    return kind(device, settings)


def build_empty(auto_class: Any, config: Any, settings: ModelSettings) -> Any:
    """Builds a model of transformers that lies nowhere: it has no weights, only its parts."""
    # Any other number format would be torch's default meanwhile, on all threads.
    options = {"dtype": torch.float32, "trust_remote_code": settings.trust_remote_code}
    with torch.device("meta"):
        return auto_class.from_config(config, **options)

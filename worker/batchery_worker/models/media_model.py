"""What models of pictures and of sound share: their items, and how they are loaded."""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from batchery.errors import InvalidItem
from batchery.media_settings import MediaSettings
from batchery.model import Model
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.media.reader import Reader, ReadItem
from batchery_worker.models.hardware.devices import device_named, dtype_for, settle_cuda
from batchery_worker.models.hardware.transfers import DeviceToHost, HostToDevice, PendingCopy
from batchery_worker.models.inputs import Keywords, check_text, read_each, read_keywords
from batchery_worker.models.source import (
    ModelSource,
    check_weights,
    load_tokenizer,
    loading,
    reason,
)


class Prepared(NamedTuple):
    """A picture, a sound or a text as it goes through a model."""

    #: Inputs of the model, without their batch dimension; those of a text are not filled up.
    inputs: Mapping[str, Any]
    is_text: bool = False
    #: Whether the end of a text was cut off.
    truncated: bool = False
    #: Height and width of a picture before it was scaled, in pixels.
    size: tuple[int, int] = (0, 0)


class ModelReader(Reader):
    """Reads items by what the files of a model say."""

    #: The `Auto...` class of transformers that loads what prepares the kind's own medium.
    processor_class: ClassVar[Any]

    def open(self) -> None:
        """Loads the processor.

        Raises:
            ModelLoadError: The model's files have none.
        """
        with loading(self.settings.model):
            source = ModelSource(self.settings)
            self.config: Any = AutoConfig.from_pretrained(source.name, **source.options)
            try:
                self.processor = self.processor_class.from_pretrained(source.name, **source.options)
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = f"has no {self.medium} processor, so it is none of this kind: {reason(error)}"
                raise ValueError(why) from error


class TextReader(ModelReader):
    """Reads texts, too, for models that have them in the same space; stands before its medium's."""

    def open(self) -> None:
        """Loads the processor, and the tokenizer of a model that takes texts."""
        super().open()
        self.tokenizer: Any = None
        if not hasattr(self.config, "text_config"):
            return
        self.tokenizer = load_tokenizer(ModelSource(self.settings))
        longest = self.config.text_config.max_position_embeddings
        longest = min(longest, self.tokenizer.model_max_length)
        #: Maximum length of a text, in tokens.
        self._max_length = min(longest, self.settings.max_length or longest)
        # SigLIP was trained with texts that are filled up, and so does transformers' pipeline.
        self._padding = "max_length" if "siglip" in self.config.model_type else False

    def read(self, data: bytes | str) -> Any:
        """Reads one item; see `Reader.read`."""
        if isinstance(data, bytes):
            return super().read(data)
        if self.tokenizer is None:
            raise InvalidItem(f"text: this model takes the field {self.medium} alone")
        return self.tokenize(check_text("text", data, self.settings.max_chars))

    def tokenize(self, text: str) -> Prepared:
        """Tokenizes a text as transformers' pipeline does.

        Raises:
            InvalidItem: It is too long, and the settings refuse such texts.
        """
        found = self.tokenizer(
            text, truncation=True, max_length=self._max_length, padding=self._padding
        )
        truncated = any(each.overflowing for each in found.encodings or ())
        if truncated and self.settings.overflow == "refuse":
            raise InvalidItem(f"text: has more than {self._max_length} tokens")
        return Prepared(dict(found), is_text=True, truncated=truncated)


class Part(NamedTuple):
    """What a pass makes of the items of a micro-batch that are of one shape."""

    items: Sequence[Prepared]
    #: Their places in the micro-batch.
    places: Sequence[int]
    #: Values on their way to the CPU, one row per item, float32.
    pending: PendingCopy


class MediaItems(Model):
    """Takes items that were read beside the device; others it reads itself.

    It stands beside `Model` or `StepModel` among the classes of a kind.
    """

    #: Reads its items, wherever that happens.
    Reader: ClassVar[type[ModelReader]]

    #: The keywords that a job of it may have.
    keywords: ClassVar[type[Keywords]]

    #: The part without which it has learned nothing, and what it has learned with it.
    trained_part: ClassVar[tuple[str, str]] = ("encoder", "embeddings")

    def __init__(self, settings: ModelSettings, media: MediaSettings | None = None) -> None:
        """Loads nothing yet.

        Args:
            settings: Of the model.
            media: Where items may come from that this process reads; by default with their jobs
                alone.
        """
        self.settings = settings
        self.reader: Any = self.Reader(settings, media or MediaSettings())

    def _open(self, device: str) -> None:
        """Loads what reads its items, and the weights.

        Raises:
            ValueError: It is none of this kind, or lacks weights.
        """
        self._device = device_named(device)
        if self._device.type == "cuda":
            settle_cuda()
        self._source = source = ModelSource(self.settings)
        config = AutoConfig.from_pretrained(source.name, **source.options)
        auto_class = self._choose_class(config)
        self.reader.open()
        dtype = dtype_for(self.settings.dtype, self._device)
        self.model, missing = source.load(auto_class, config=config, dtype=dtype)
        self._check_missing(missing)
        self.model.to(self._device).eval()

    def _choose_class(self, config: Any) -> Any:
        """The `Auto...` class of transformers that loads it.

        Raises:
            ValueError: A model with such a config is none of this kind.
        """
        raise NotImplementedError

    def _check_missing(self, missing: Sequence[str]) -> None:
        """Refuses a model whose files lack weights. Raises ValueError."""
        check_weights(missing, *self.trained_part)

    def version(self) -> str:
        """Changes with the model's files and options."""
        return self._source.version()

    def _read_keywords(self, keywords: Mapping[str, Any]) -> Any:
        """Reads and checks the keywords of a batch. Raises InvalidItem."""
        return read_keywords(self.keywords, keywords)

    def preprocess(self, items: Sequence[Any], **keywords: Any) -> list[Any]:
        """Reads the items that nobody has read yet, on this thread.

        Returns:
            One prepared item per item, in order: see `Reader.read` of its reader. `Failed` with an
            `InvalidItem` of one line for each item that cannot run. A wrong keyword fails all.
        """
        try:
            self._read_keywords(keywords)
        except InvalidItem as error:
            return [Failed(InvalidItem(str(error))) for _ in items]

        def read(item: Any) -> Any:
            if isinstance(item, ReadItem):
                return item.value
            return item if isinstance(item, Failed) else self.reader.read_here(item)

        return read_each(items, read)


class MediaModel(MediaItems):
    """A transformers model of pictures or sound that runs batches."""

    #: The `Auto...` class of transformers that loads it.
    auto_class: ClassVar[Any]

    # Passes have items of one shape, so nothing is filled up.
    pads = False

    #: Tokens of a pass without a setting, by type of device. On a CPU all threads share a pass, and
    #: larger ones take a quarter less of them (benchmarks.images).
    usual_pass_tokens: ClassVar[Mapping[str, int]] = {"cpu": 8_192}

    #: How many passes may be started before `postprocess` of the current one.
    passes_ahead = 0

    #: Keywords of the passes that check, warm up or measure the model.
    sample_keywords: ClassVar[Mapping[str, Any]] = {}

    #: What computes vectors of its medium, in models that have one for texts, too.
    _tower = "forward"

    def load(self, device: str) -> None:
        """Loads what reads its items, and the weights, and runs one item as a check.

        Raises:
            ModelLoadError: There is no model, none of this kind, no safetensors, not all weights,
                not enough memory, or an impossible setting; one line says which.
        """
        with loading(self.settings.model):
            self._open(device)
            self.passes_ahead = int(self._device.type == "cuda")
            self._to_device = HostToDevice(self._device)
            self._to_host = DeviceToHost(self._device)
            tower = getattr(self.model, self._tower, self.model.forward)
            self._parameters = inspect.signature(tower).parameters
            self._finish_load()
            self._check()

    def _choose_class(self, config: Any) -> Any:
        if type(config) not in self.auto_class._model_mapping:
            kind = self.settings.kind
            raise ValueError(f"a {config.model_type} model is none of the kind {kind}")
        return self.auto_class

    def _finish_load(self) -> None:
        """Reads what else the kind needs. Raises ValueError."""

    def sample(self) -> bytes:
        """An item to check, warm up or measure the model with."""
        raise NotImplementedError

    def warm_up(self) -> Sequence[Any]:
        """A few items alike."""
        return [self.sample()] * 4

    def _check(self) -> None:
        """Runs an item, so that a model that is none of the kind is found out at once.

        Raises:
            ValueError: It is none.
        """
        (prepared,) = self.preprocess([self.sample()], **self.sample_keywords)
        if isinstance(prepared, Failed):
            raise prepared.exception
        outputs = self.forward([prepared], **self.sample_keywords)
        (result,) = self.postprocess(outputs, **self.sample_keywords)
        if isinstance(result, Failed):
            raise result.exception

    def tokens(self, prepared: Prepared) -> int:
        """The patches of a picture, the frames of a sound, or the tokens of a text."""
        return len(prepared.inputs["input_ids"]) if prepared.is_text else self._count(prepared)

    def _count(self, prepared: Prepared) -> int:
        """The tokens of a picture or a sound."""
        raise NotImplementedError

    def head(self, prepared: Prepared) -> dict[str, Any]:
        """The fields that every result has, of one item."""
        head: dict[str, Any] = {"tokens": self.tokens(prepared)}
        return {**head, "truncated": True} if prepared.truncated else head

    def _shape(self, prepared: Prepared) -> Any:
        """What items have in common that may share a pass."""
        if prepared.is_text:
            return "text"
        return tuple((name, each.shape) for name, each in prepared.inputs.items())

    @torch.inference_mode()
    def forward(self, batch: Sequence[Prepared], **keywords: Any) -> list[Part]:
        """Starts the passes over a micro-batch, and the copy of what they make to the CPU."""
        options = self._read_keywords(keywords)
        groups = defaultdict[Any, list[int]](list)
        for place, prepared in enumerate(batch):
            groups[self._shape(prepared)].append(place)
        parts = []
        for places in groups.values():
            items = [batch[place] for place in places]
            values = self._compute(items, options).float()
            parts.append(Part(items, places, self._to_host.start(values)))
        return parts

    def _compute(self, items: Sequence[Prepared], options: Any) -> Tensor:
        """Runs a pass over items of one shape; returns one row per item."""
        raise NotImplementedError

    def _stack(self, items: Sequence[Prepared]) -> dict[str, Tensor]:
        """Inputs of a pass over pictures or sounds of one shape, on the device."""
        names = [name for name in items[0].inputs if name in self._parameters]
        return self._send({name: np.stack([each.inputs[name] for each in items]) for name in names})

    def _send(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs of a pass on the device, numbers with a point in the model's format."""
        sent = {name: self._to_device.send(numbers) for name, numbers in inputs.items()}
        dtype = self.model.dtype
        return {
            name: each.to(dtype) if each.is_floating_point() else each
            for name, each in sent.items()
        }

    def postprocess(self, outputs: Sequence[Part], **keywords: Any) -> list[Any]:
        """Waits for the values of a micro-batch and makes its results, in batch order."""
        options = self._read_keywords(keywords)
        results: list[Any] = [None] * sum(len(part.places) for part in outputs)
        for items, places, pending in outputs:
            values = pending.wait()
            # JSON has no NaN, and no caller can use one.
            finite = values.isfinite().flatten(1).all(dim=1).tolist()
            made = self._results(items, values, options)
            for place, result, is_finite in zip(places, made, finite, strict=True):
                bad = Failed(f"the model's output is not finite in {self.model.dtype}")
                results[place] = result if is_finite else bad
        return results

    def _results(self, items: Sequence[Prepared], values: Tensor, options: Any) -> Sequence[Any]:
        """Makes one result per item, each of which begins with its head.

        Args:
            items: Prepared, of one pass.
            values: What the pass made, on the CPU.
            options: The keywords of the batch.
        """
        raise NotImplementedError

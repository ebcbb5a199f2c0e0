"""What models of pictures and of sound share: their items, and how they are loaded."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

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
from batchery_worker.models.inputs import Keywords, read_each, read_keywords
from batchery_worker.models.source import ModelSource, check_weights, loading


class TokenizedText(NamedTuple):
    """A text as it goes through a model, not filled up."""

    #: Inputs of the model: numbers of the text's tokens, and others of that length.
    inputs: Mapping[str, list[int]]
    #: Whether its end was cut off.
    truncated: bool


def tokenize(
    tokenizer: Any, text: str, settings: ModelSettings, options: Mapping[str, Any]
) -> TokenizedText:
    """Tokenizes a text for a model that knows texts, too.

    Args:
        tokenizer: Of transformers.
        text: Not empty.
        settings: Of the model; `overflow` says what becomes of a text that is too long.
        options: Of the tokenizer, `max_length` among them.

    Raises:
        InvalidItem: It is too long, and the settings refuse such texts.
    """
    found = tokenizer(text, **options)
    truncated = any(each.overflowing for each in found.encodings or ())
    if truncated and settings.overflow == "refuse":
        raise InvalidItem(f"text: has more than {options['max_length']} tokens")
    return TokenizedText({name: [*numbers] for name, numbers in found.items()}, truncated)


class Part(NamedTuple):
    """What a pass makes of the items of a micro-batch that are of one size."""

    #: Their places in the micro-batch.
    places: Sequence[int]
    #: Values on their way to the CPU, one row per item each, float32.
    pending: Sequence[PendingCopy]


class Outputs(NamedTuple):
    """What the passes over a micro-batch give."""

    batch: Sequence[Any]
    parts: Sequence[Part]


class MediaItems(Model):
    """Takes items that were read beside the device; others it reads itself.

    It stands beside `Model` or `StepModel` among the classes of a kind.
    """

    #: Reads its items, wherever that happens.
    Reader: ClassVar[type[Reader]]

    #: The keywords that a job of it may have.
    keywords: ClassVar[type[Keywords]]

    def __init__(self, settings: ModelSettings, media: MediaSettings | None = None) -> None:
        """Loads nothing yet.

        Args:
            settings: Of the model.
            media: Where items may come from that this process reads; by default with their jobs
                alone.
        """
        self.settings = settings
        self.reader = self.Reader(settings, media or MediaSettings())

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
            return item if isinstance(item, Failed) else self.reader.read_here(item, keywords)

        return read_each(items, read)


class MediaModel(MediaItems):
    """A transformers model of pictures or sound that runs batches."""

    #: The `Auto...` class of transformers that loads it.
    auto_class: ClassVar[Any]

    #: The part without which it has learned nothing, and what it has learned with it.
    trained_part: ClassVar[tuple[str, str]] = ("encoder", "embeddings")

    # Passes have items of one shape, so nothing is filled up.
    pads = False

    #: Tokens of a pass without a setting, by type of device. On a CPU all threads share a pass, and
    #: larger ones take a quarter less of them (benchmarks.images).
    usual_pass_tokens: ClassVar[Mapping[str, int]] = {"cpu": 8_192}

    #: How many passes may be started before `postprocess` of the current one.
    passes_ahead = 0

    #: Keywords of the passes that check, warm up or measure the model.
    sample_keywords: ClassVar[Mapping[str, Any]] = {}

    def load(self, device: str) -> None:
        """Loads what reads its items, and the weights, and runs one item as a check.

        Raises:
            ModelLoadError: There is no model, none of this kind, no safetensors, not all weights,
                not enough memory, or an impossible setting; one line says which.
        """
        with loading(self.settings.model):
            self._device = device_named(device)
            if self._device.type == "cuda":
                settle_cuda()
                self.passes_ahead = 1
            self._to_device = HostToDevice(self._device)
            self._to_host = DeviceToHost(self._device)
            self._source = source = ModelSource(self.settings)
            config = AutoConfig.from_pretrained(source.name, **source.options)
            self._check_config(config)
            self.reader.open()
            dtype = dtype_for(self.settings.dtype, self._device)
            self.model, missing = source.load(self.auto_class, config=config, dtype=dtype)
            self._check_missing(missing)
            self.model.to(self._device).eval()
            self._finish_load()
            self._check()

    def _check_config(self, config: Any) -> None:
        """Refuses a model that is none of this kind.

        Raises:
            ValueError: It is none.
        """
        if type(config) not in self.auto_class._model_mapping:
            kind = self.settings.kind
            raise ValueError(f"a {config.model_type} model is none of the kind {kind}")

    def _check_missing(self, missing: Sequence[str]) -> None:
        """Refuses a model whose files lack weights. Raises ValueError."""
        check_weights(missing, *self.trained_part)

    def _finish_load(self) -> None:
        """Reads what else the kind needs. Raises ValueError."""

    def sample(self) -> bytes:
        """An item to check, warm up or measure the model with."""
        raise NotImplementedError

    def warm_up(self) -> Sequence[Any]:
        """A few items alike."""
        return [self.sample()] * 4

    def version(self) -> str:
        """Changes with the model's files and options."""
        return self._source.version()

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

    def _send(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Inputs of a pass on the device, numbers with a point in the model's format."""
        sent = {name: self._to_device.send(numbers) for name, numbers in inputs.items()}
        dtype = self.model.dtype
        return {
            name: each.to(dtype) if each.is_floating_point() else each
            for name, each in sent.items()
        }

    @torch.inference_mode()
    def forward(self, batch: Sequence[Any], **keywords: Any) -> Any:
        """Starts the passes over a micro-batch, and the copy of what they make to the CPU."""
        return self._start(batch, self._read_keywords(keywords))

    def head(self, prepared: Any) -> dict[str, Any]:
        """The fields that every result has, of one item."""
        head: dict[str, Any] = {"tokens": self.tokens(prepared)}
        if isinstance(prepared, TokenizedText) and prepared.truncated:
            head["truncated"] = True
        return head

    def _shape(self, prepared: Any) -> Any:
        """What items have in common that may share a pass."""
        if isinstance(prepared, TokenizedText):
            return None
        return tuple((name, each.shape) for name, each in prepared.inputs.items())

    def _start(self, batch: Sequence[Any], options: Any) -> Outputs:
        groups = defaultdict[Any, list[int]](list)
        for place, prepared in enumerate(batch):
            groups[self._shape(prepared)].append(place)
        parts = []
        for places in groups.values():
            values = self._compute([batch[place] for place in places], options)
            parts.append(Part(places, [self._to_host.start(each.float()) for each in values]))
        return Outputs(batch, parts)

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:
        """Runs a pass over items of one size.

        Returns:
            What is read of its output, one row per item each.
        """
        raise NotImplementedError

    def _stack(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """Inputs of a pass over pictures or sounds of one shape, on the device."""
        raise NotImplementedError

    def _embed(self, items: Sequence[Any]) -> Tensor:
        """Runs a pass over items of one shape; returns vectors, (B, D)."""
        raise NotImplementedError

    def _embed_texts(self, texts: Sequence[TokenizedText]) -> Tensor:
        reader: Any = self.reader
        filled = reader.tokenizer.pad(
            {name: [each.inputs[name] for each in texts] for name in texts[0].inputs},
            return_tensors="np",
        )
        vectors: Tensor = self.model.get_text_features(**self._send(filled)).pooler_output
        return vectors

    def postprocess(self, outputs: Outputs, **keywords: Any) -> list[Any]:
        """Waits for the values of a micro-batch and makes its results, in batch order."""
        options = self._read_keywords(keywords)
        results: list[Any] = [None] * len(outputs.batch)
        for places, pending in outputs.parts:
            values = [each.wait() for each in pending]
            items = [outputs.batch[place] for place in places]
            # JSON has no NaN, and no caller can use one.
            finite = [each.isfinite().flatten(1).all(dim=1).tolist() for each in values]
            made = self._results(items, values, options)
            for place, result, *good in zip(places, made, *finite, strict=True):
                bad = Failed(f"the model's output is not finite in {self.model.dtype}")
                results[place] = result if all(good) else bad
        return results

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> Sequence[Any]:
        """Makes one result per item, each of which begins with its head.

        Args:
            items: Prepared, of one pass.
            values: What the pass made, on the CPU.
            options: The keywords of the batch.
        """
        raise NotImplementedError

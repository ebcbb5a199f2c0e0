"""What all text models share: loading, validation of texts, tokenizing, padding."""

import inspect
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.forward import Forward, RandomTexts, Reading
from batchery_worker.models.forward.cuda_graphs import (
    Capture,
    Graph,
    Graphed,
    Shape,
    captured,
    shapes,
)
from batchery_worker.models.forward.padded import Padded
from batchery_worker.models.forward.selection import TOLERANCE, Candidate, choose, find_masks
from batchery_worker.models.hardware.cpu_threads import PassStreams, PendingPass
from batchery_worker.models.hardware.devices import dtype_for, settle_cuda
from batchery_worker.models.hardware.transfers import DeviceToHost, PendingCopy
from batchery_worker.models.onnx_session import OnnxSession
from batchery_worker.models.source import (
    ModelSource,
    check_weights,
    load_tokenizer,
    loading,
)
from batchery_worker.models.split import build_empty, open_split
from batchery_worker.models.text_items import TextItems
from batchery_worker.models.text_length import longest_text
from batchery_worker.models.tokenizer import Prepared, TextTokenizer

logger = logging.getLogger(__name__)

#: Rest of a pass that is worth no early pass, as a share of the time that launching one takes.
IDLE_SOON_SHARE = 0.1

#: Words in the texts of a warm-up: libraries choose kernels by length.
WARM_UP_WORDS = (1, 8, 32, 128)


class Outputs(NamedTuple):
    """What a forward pass gives.

    Attributes:
        heads: The fields that every result has, one dictionary per text, in batch order: `tokens`,
            its length with special ones; and `truncated`, but only where the text lost its end.
        pending: Values on their way to the CPU, in batch order, float32: one row per text,
            (B, ...), or one per token, (T, ...), as `TextModel.per_token` says.
        launch_s: How long the host took to launch the pass, in seconds.
        batch: The prepared items.
    """

    heads: list[dict[str, Any]]
    pending: PendingCopy | PendingPass
    launch_s: float = 0.0
    batch: Sequence[Any] = ()


class TextModel(TextItems):
    """A transformers model whose items are texts; subclasses say what becomes of its output."""

    #: The `Auto...` class of transformers that loads it.
    auto_class: ClassVar[Any]

    #: The part without which it has learned nothing, and what it has learned with it.
    trained_part: ClassVar[tuple[str, str]] = ("encoder", "embeddings")

    #: What it reads of a forward pass.
    reading: Reading

    #: What transformers calls the output that is read.
    _field = "logits"

    #: How many numbers a pass makes of a text, or, if `per_token`, of a token.
    _width: int

    #: Whether values have a row per token; otherwise they have one per text.
    per_token: ClassVar[bool] = False

    #: Keywords of the passes that check, warm up or measure the model.
    sample_keywords: ClassVar[Mapping[str, Any]] = {}

    #: Why the loaded model is not packed; empty if it is.
    why_padded = ""

    #: How many forward passes are computed side by side. Batches are cut into as many.
    pass_streams = 1

    #: Whether passes are of an urgent batch, for which those of other batches must not be waited.
    is_urgent = False

    #: How many passes may be started before `postprocess` of the current one.
    passes_ahead = 0

    #: A multiplication and an addition with each weight that is not looked up. Attention itself is
    #: left out.
    flops_per_token = 0

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self._gives_json = False
        self._session: OnnxSession | None = None

    def load(self, device: str) -> None:
        """Loads tokenizer and weights, and runs one short text as a check.

        Raises:
            ModelLoadError: There is no model, no text model, no safetensors, not all weights, not
                enough memory, or an impossible setting; one line says which.
        """
        with loading(self.settings.model):
            self._open_device(device)

    def _open_device(self, device: str) -> None:
        self._split = open_split(device, self.settings)
        self._device = self._split.device
        self._to_host = DeviceToHost(self._device)
        self._streams: PassStreams | None = None
        if self._device.type == "cuda":
            settle_cuda()
            self.passes_ahead = 1
        elif self._device.type == "cpu" and self._split.is_whole:
            self._open_streams(self.settings.cpu_streams or torch.get_num_threads())
        if self._split.stages > 1:
            # One pass more than there are stages, so that the first stage never waits for one.
            self._open_streams(self._split.stages, extra=1)
        self._source = ModelSource(self.settings)
        self._load()

    def _open_streams(self, streams: int, extra: int = 0) -> None:
        self.pass_streams = streams
        if streams > 1:
            threads = torch.get_num_threads()
            self._streams = PassStreams(streams + extra, threads, self._split.settle_thread)
            # With the pass in turn, that is one more than there are streams: a stream that has
            # ended its pass goes on at once.
            self.passes_ahead = streams

    def _load(self) -> None:
        missing = self._open()
        if self.model.main_input_name != "input_ids":
            raise ValueError(f"is not a text model: it takes {self.model.main_input_name}")
        weights = int(self.model.num_parameters(exclude_embeddings=True))
        self.flops_per_token = 2 * weights
        check_weights(missing, *self.trained_part)
        self._finish_load()
        self.max_length = self._find_max_length()
        self._choose_padding()
        taken = self._place()
        self._tokenize = TextTokenizer(
            self.tokenizer,
            [name for name in self._padding if name in taken],
            vocabulary=self._vocabulary,
            max_length=self.max_length,
            truncate=self.settings.overflow == "truncate",
        )
        padding = {name: self._padding[name] for name in self._tokenize.names}
        computing = self._session or self.model
        padded = Padded(computing, self._device, padding=padding, side=self._padding_side)
        self._pass: Forward = padded
        self._settle()
        trial = self.preprocess([self.sample_item("a")], **self.sample_keywords)[0]
        if isinstance(trial, Failed):
            raise ValueError(f"cannot even take 'a': {trial.exception}")  # noqa: TRY004 (no argument)
        values = self.forward([trial], **self.sample_keywords).pending.wait()
        if problem := self._find_problem(values):
            raise ValueError(problem)
        usual = np.setdiff1d(np.arange(self._vocabulary), self.tokenizer.all_special_ids)
        texts = RandomTexts(len(self._tokenize.names), usual)
        if self._session is None:
            self._choose_forward(padded, texts)
        else:
            compute = partial(padded.values, reading=self.reading)
            self._session.check_longest(compute, texts, self.max_length)
            self.why_padded = "since ONNX Runtime pads"
        self.pads = self._pass.pads
        streams = f"{self.pass_streams} passes side by side" if self.pass_streams > 1 else ""
        where = ", ".join(each for each in (self._device.type, streams, self.why_padded) if each)
        logger.info("model %s: %s on %s", self._source.name, self._pass.name, where)

    def _open(self) -> Sequence[str]:
        """Makes tokenizer and model of transformers; returns the weights that its files lack."""
        source = self._source
        # The config comes first: errors in it would confuse what follows.
        config = AutoConfig.from_pretrained(source.name, **source.options)
        self._split.begin(self, config)
        self.tokenizer = load_tokenizer(source)
        if self.settings.engine == "onnx":
            self.model = build_empty(self.auto_class, config, self.settings)
            return ()
        # transformers chooses the attention: sdpa if the model supports it.
        dtype = dtype_for(self.settings.dtype, self._device)
        self.model, missing = source.load(
            self.auto_class, config=config, dtype=dtype, **self._split.options
        )
        return missing

    def _find_max_length(self) -> int | None:
        """Maximum length of a text in tokens, special ones included; None if unlimited."""
        return longest_text(self.settings, self.tokenizer, self.model)

    def _settle(self) -> None:
        """Looks whether the padded pass is right, and says why no other can be taken.

        Raises:
            ValueError: It is wrong.
        """

    def _place(self) -> Collection[str]:
        """Gets ready what computes, on its device; returns the names of what that takes."""
        if self.settings.engine == "onnx":
            threads = max(1, torch.get_num_threads() // self.pass_streams)
            self._session = OnnxSession(
                self._source, self.settings.onnx_file, self._field, self._device, threads
            )
            self._source.others = self._session.paths
            self.memory_bytes = self._session.held_bytes
            self.model.to(self._session.dtype)
            return self._session.inputs
        self._split.place(self.model)
        self.model.eval()
        return inspect.signature(self.model.forward).parameters

    def _choose_padding(self) -> None:
        """Chooses the token to pad with and the side; decoders often have no such token."""
        config = self.model.config
        self._vocabulary = self.model.get_input_embeddings().weight.shape[0]
        known = (config.pad_token_id, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        # The config comes first, because some models search for the padding. Old ones say -1.
        config.pad_token_id = next(
            each for each in known if each is not None and 0 <= each < self._vocabulary
        )
        # Padded on the right, a text keeps its positions and its first token. The tokenizer's side
        # is meant for generation, except for models such as XLNet, which read the last token.
        last = getattr(config, "summary_type", None) == "last"
        self._padding_side = "left" if last else "right"
        for module in self.model.modules():
            # It looks for padding on the device, and the host waits. Our padding is always masked.
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                module.warn_if_padding_and_no_attention_mask = lambda *_: None
        # Nothing is generated, so keys and values need not be kept.
        config.use_cache = False
        self._padding = {
            "input_ids": config.pad_token_id,
            "token_type_ids": self.tokenizer.pad_token_type_id,
        }

    def _choose_forward(self, padded: Padded, texts: RandomTexts) -> None:
        setting = self.settings.forward
        # To prove another one takes tens of passes, which are slow where layers are fetched.
        if self.why_padded or (setting == "auto" and not self._split.is_whole):
            setting = "padded"
        candidate = Candidate(
            *(setting, self.model, self.max_length),
            *(padded, self._values_by_text, texts),
        )
        if self._device.type == "cuda":
            padded.masks = find_masks(candidate)
        # Graphs come first: packing changes the model's attention.
        graphs = self._capture(padded, texts)
        forward, why = choose(candidate)
        self.why_padded = self.why_padded or why
        self._pass = Graphed(forward, graphs) if graphs else forward

    def _capture(self, padded: Padded, texts: RandomTexts) -> Mapping[Shape, Graph]:
        if self._device.type != "cuda" or self.settings.cuda_graphs == "never":
            return {}
        # With `per_token`, how many tokens are no padding is different in each batch.
        if self.per_token or not self._split.is_whole:
            return {}
        # What a kind makes of it comes after the graph, as after any pass.
        read = partial(TextModel._values, self)
        capture = Capture(padded, read, texts, TOLERANCE[self.model.dtype])
        return captured(self.settings.model, self._device, capture, shapes(self.max_length))

    def _finish_load(self) -> None:
        """Reads what else the kind needs. Raises ValueError."""

    def _find_problem(self, values: Tensor) -> str:
        """Why the values of one text are none of this kind; empty if they are."""
        shape = tuple(values.shape[1:])
        if shape == (self._width,):
            return ""
        kind = self.settings.kind
        return f"gives {shape} numbers, not {self._width}; it is no model of the kind {kind}"

    def _values(self, forward: Forward, batch: Sequence[Prepared]) -> Tensor:
        """What a forward pass makes of a batch, before keywords have a say.

        Returns:
            One row per text, or, if `per_token`, per token; in batch order.
        """
        return forward.values(batch, self.reading)

    def _values_by_text(self, forward: Forward, batch: Sequence[Prepared]) -> Sequence[Tensor]:
        lengths = [prepared.shape[1] for prepared in batch]
        return self.by_text(self._values(forward, batch), lengths)

    def by_text(self, values: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
        """Cuts the values of a pass into those of each text.

        Args:
            values: One row per text, or, if `per_token`, per token.
            lengths: Tokens of each text.
        """
        return torch.split(values, list(lengths)) if self.per_token else values.unbind()

    def sample_item(self, text: str) -> Any:
        """An item that has this text, to check, warm up or measure the model with."""
        return text

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> Sequence[Any]:
        """Makes one result per item, each of which begins with its head.

        Args:
            values: What the pass made, on the CPU.
            outputs: The rest of what it gave.
            keywords: Of the batch.
        """
        raise NotImplementedError

    def give_json(self) -> None:
        """Makes results `Encoded` from now on, if the kind can: where they leave the process."""
        # A subclass that changes results needs them as they are.
        self._gives_json = type(self).postprocess is TextModel.postprocess

    def identity(self) -> str:
        """The content of the model's files, and how it is run."""
        engine = "" if self._session is None else version("onnxruntime")
        run = {"device": self._device.type, "forward": self._pass.name, "onnx": engine}
        return self._source.identity(self.model, run)

    def version(self) -> str:
        """Changes with the model's files and options."""
        return self._source.version()

    def unload(self) -> None:
        """Ends the threads that compute passes side by side."""
        if self._streams is not None:
            self._streams.close()

    def warm_up(self) -> Sequence[Any]:
        """Items of several lengths, within the limits of this model."""
        items = [self.sample_item(" ".join(["word"] * count)) for count in WARM_UP_WORDS]
        prepared = self.preprocess(items, **self.sample_keywords)
        return [
            item for item, each in zip(items, prepared, strict=True) if not isinstance(each, Failed)
        ]

    def _finish(self, values: Tensor, options: Any) -> Tensor:  # noqa: ARG002 (for kinds with some)
        """What keywords make of the values of a pass, on the device."""
        return values

    def forward(self, batch: Sequence[Any], **keywords: Any) -> Outputs:
        """Starts a pass over a micro-batch, and the copy of its values to the CPU."""
        options = self._read_keywords(keywords)

        def compute() -> Tensor:
            return self._finish(self._values(self._pass, batch), options)

        heads = [self.head(prepared) for prepared in batch]
        if self._streams is not None:
            take = self._streams.run_now if self.is_urgent else self._streams.submit
            return Outputs(heads, take(partial(self._split.run, compute)), batch=batch)
        started_s = time.perf_counter()
        with torch.inference_mode():
            pending = self._to_host.start(compute())
        return Outputs(heads, pending, time.perf_counter() - started_s, batch)

    def has_computed(self, outputs: Outputs) -> bool:
        """Whether a pass ends about as soon as it is launched; for `Lookahead`.

        Then the next pass, launched early, would only delay the results of this one.
        """
        pending = outputs.pending
        if isinstance(pending, PendingPass):
            return False
        return pending.arrives_within(IDLE_SOON_SHARE * outputs.launch_s)

    def postprocess(self, outputs: Outputs, **keywords: Any) -> list[Any]:
        """Waits for the values of a micro-batch and makes its results, in batch order."""
        values = outputs.pending.wait()
        results = self._results(values, outputs, keywords)
        # JSON has no NaN, and no caller can use one.
        return [
            result if good else Failed(f"the model's output is not finite in {self.model.dtype}")
            for result, good in zip(results, self._are_finite(values, outputs), strict=True)
        ]

    def _are_finite(self, values: Tensor, outputs: Outputs) -> Sequence[bool]:
        """Whether all values of an item are numbers, for each item."""
        rows = values.isfinite().flatten(1).all(dim=1)
        if self.per_token and len(rows) != len(outputs.heads):
            lengths = [head["tokens"] for head in outputs.heads]
            return [bool(each.all()) for each in self.by_text(rows, lengths)]
        finite: list[bool] = rows.tolist()
        return finite

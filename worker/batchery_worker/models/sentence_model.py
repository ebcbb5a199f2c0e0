"""Models that sentence-transformers loads and defines, with fast passes through the transformer.

Its modules, prompts, limits and routes say what the numbers are. What is done here is the pass of
many texts through the transformer, whose output the other modules read. When a model is loaded,
this is compared with what sentence-transformers computes itself. For a prompt where it is not the
same, its own code runs instead, on texts that are tokenized and padded once more.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig

from batchery.errors import InvalidItem
from batchery.outcomes import Failed
from batchery_worker.models.forward import Forward, worst_difference
from batchery_worker.models.forward.selection import TOLERANCE
from batchery_worker.models.hardware.devices import dtype_for
from batchery_worker.models.inputs import PromptKeywords, TextKeywords
from batchery_worker.models.source import check_tokenizer, reason, watch_loading
from batchery_worker.models.text_items import PromptedItems, encode_results
from batchery_worker.models.text_length import NO_LIMIT_TOKENS, longest_text
from batchery_worker.models.text_model import Outputs, TextModel
from batchery_worker.models.tokenizer import PROBES, Prepared

#: Tasks of transformers whose last token is read, wherever the padding is.
LEFT_PADDED = ("text-generation", "any-to-any")

#: Names of prompts that are also what the text is for, which modules may ask for.
TASKS = ("query", "document")

#: So many of the texts have their values compared; others are compared by their tokens.
COMPUTED_PROBES = 2

#: Longest text whose tokens are compared.
LONGEST_PROBE_TOKENS = 10_000

#: What sentence-transformers logs when it leaves out what a file asks for.
LEFT_OUT = re.compile(r"^(Ignoring|Unknown keys|Could not parse)|is not trusted")


class LibraryText(NamedTuple):
    """A text for which sentence-transformers' own code runs.

    Attributes:
        tokens: The text as it is tokenized here, for its length.
        content: The text, or a pair of texts, without prompt.
        options: The keywords of its job.
    """

    tokens: Prepared
    content: Any
    options: TextKeywords

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tokens."""
        return self.tokens.shape


class SentenceModel(PromptedItems, TextModel):
    """A model of sentence-transformers; subclasses say what they read of its output."""

    #: The class of sentence-transformers that loads it.
    library_class: ClassVar[str]

    #: The model of sentence-transformers.
    library: Any

    def _open(self) -> Sequence[str]:
        source = self._source
        if not self._split.is_whole:
            config = AutoConfig.from_pretrained(source.name, **source.options)
            self._split.begin(self, config)
        is_onnx = self.settings.engine == "onnx"
        options = {
            "dtype": dtype_for(self.settings.dtype, self._device),
            # What files say of these is for the machine of whoever wrote them.
            "torch_dtype": None,
            "attn_implementation": None,
            "use_safetensors": True,
            **self._split.options,
        }
        # It is slow to import, and only these kinds need it.
        import sentence_transformers

        make = getattr(sentence_transformers, self.library_class)
        with _nothing_left_out(), watch_loading(weightless=is_onnx) as missing:
            self.library = make(
                source.name,
                device=None if "device_map" in options else "cpu",
                prompts=self.settings.prompts,
                default_prompt_name=self.settings.default_prompt,
                local_files_only=source.is_here,
                model_kwargs=options,
                **source.options,
            )
        self.prompts, self.default_prompt = self.library.prompts, self.library.default_prompt_name
        self._take_modules()
        self.model, self.tokenizer = self._transformer.model, self._transformer.tokenizer
        modules = source.json("modules.json") or [{"type": "Transformer", "path": ""}]
        if modules[0]["type"].endswith("Transformer"):
            check_tokenizer(source, self.tokenizer, modules[0]["path"])
        return missing

    def _take_modules(self) -> None:
        """Finds the transformer, and the modules that read its output."""
        from sentence_transformers.base.modules import Router, Transformer

        # Whether vectors are scaled is decided by a keyword.
        for place in reversed(range(1, len(self.library))):
            name = type(self.library[place]).__name__
            if name == "Normalize":
                del self.library[place]
            elif name != "MultiVectorMask":
                break
        modules = [*self.library]
        if isinstance(modules[0], Router):
            routes = [[*route.children()] for route in modules[0].sub_modules.values()]
            known = [route for route in routes if isinstance(route[0], Transformer)]
            modules = known[0] + modules[1:] if known else modules
        if not isinstance(modules[0], Transformer):
            problem = "modules.json has no Transformer; choose another model"
            raise ValueError(problem)  # noqa: TRY004 (no argument has it)
        self._transformer: Any = modules[0]
        self._tail = modules[1:]
        output = self._transformer.modality_config.get("text", {}).get("method_output_name")
        self._field = output if isinstance(output, str) else "last_hidden_state"
        limits = {name: self._find_limit(name) for name in self.prompts}
        self._prompt_limits = {name: limit for name, limit in limits.items() if limit is not None}

    def _find_limit(self, prompt: str) -> int | None:
        """Maximum length of a text with this prompt, in tokens; None for that of all texts."""
        return getattr(self._transformer, f"{self._task(prompt)}_length", None)

    def _lists(self, kind: str) -> bool:
        """Whether files have modules of a kind; else the library makes them, of random weights."""
        modules = self._source.json("modules.json") or ()
        return any(module["type"].endswith(kind) for module in modules)

    def _find_max_length(self) -> int | None:
        for each in self.library.modules():
            # A Router has several.
            if isinstance(each, type(self._transformer)):
                known = each.tokenizer, each.model
                found = longest_text(self.settings, *known, files_decide=True)
                each.max_seq_length = found or each.max_seq_length
        found = self._transformer.max_seq_length
        return found if found < NO_LIMIT_TOKENS else None

    def _place(self) -> Collection[str]:
        taken = super()._place()
        if self._session is not None:
            self.model.to("meta")
            for module in self._tail:
                module.to(self._device)
        elif self._split.is_whole:
            self.library.to(self._device)
        self.library.eval()
        return taken

    def _read_output(self, output: Any, features: dict[str, Any]) -> Tensor:
        """What the modules behind the transformer make of its output; see `Read`."""
        values = getattr(output, self._field)
        # A file of ONNX has a number format of its own.
        features[self._transformer.module_output_name] = (
            values if self._session is None else values.float()
        )
        for module in self._tail:
            features = module(features)
        return self._read_features(features)

    def _read_features(self, features: Mapping[str, Any]) -> Tensor:
        """What the kind reads of the features that come out of the last module, float32."""
        vectors: Tensor = features["sentence_embedding"].float()
        return vectors

    def _settle(self) -> None:
        """Finds the prompts for which sentence-transformers' own code must run."""
        known = self.tokenizer.pad_token_id
        if known is None or known >= self._vocabulary:
            # Decoders often have none, and the library's code needs one that the model knows.
            padding = self.tokenizer.convert_ids_to_tokens(self._padding["input_ids"])
            self.tokenizer.pad_token = padding
        if self._transformer.transformer_task not in LEFT_PADDED:
            # Padded on the right, a text keeps its positions in the library's batches, too.
            self.tokenizer.padding_side = self._padding_side
        self._own_code: dict[str | None, str] = {}
        choices = self.prompts if issubclass(self.keywords, PromptKeywords) else ()
        for name in (self.default_prompt, *choices):
            if difference := self._find_difference(name):
                self._own_code[name] = difference
        if not self._own_code:
            return
        names = ", ".join(repr(name) if name else "none" for name in self._own_code)
        first = next(iter(self._own_code.values()))
        if self._session is not None:
            raise ValueError(
                f"engine = 'onnx' cannot compute prompt {names}: {first}; leave engine out"
            )
        self.why_padded = f"since sentence-transformers' own code runs for prompt {names}: {first}"

    def _find_difference(self, name: str | None) -> str:
        """How texts with this prompt differ from those of sentence-transformers; empty if not."""
        keywords = dict(self.sample_keywords)
        if name != self.default_prompt:
            keywords["prompt"] = name
        options = self._read_keywords(keywords)
        long = "Word " * min(self.max_length or 1, LONGEST_PROBE_TOKENS)
        items = [self.sample_item(text) for text in (*PROBES, long)]
        fast = zip(items, super()._tokenized(items, options), strict=True)
        texts = [
            LibraryText(tokens, self._input(item, ""), options)
            for item, tokens in fast
            if not isinstance(tokens, Failed)
        ]
        try:
            with torch.inference_mode():
                for place, text in enumerate(texts):
                    found = self._prepare_by_library([text])["input_ids"][0]
                    if found.tolist() != text.tokens[0].tolist():
                        return "its tokens are not those of its tokenizer alone"
                    if place >= COMPUTED_PROBES or self._session is not None:
                        continue
                    expected = self._values(self._pass, [text])
                    values = self._values(self._pass, [text.tokens]).reshape(expected.shape)
                    # Tokens without a vector have zeros there.
                    kept = values * expected.any(dim=-1, keepdim=True)
                    difference = worst_difference([kept], [expected])
                    if not difference <= TOLERANCE[self.model.dtype]:
                        return f"its results differ by {difference:.1g} of their size"
        except Exception as error:  # noqa: BLE001 (the code of any model)
            return f"the fast pass fails: {type(error).__name__}: {reason(error)}"
        return ""

    def _task(self, name: str | None) -> str | None:
        routes = getattr(self.library[0], "sub_modules", ())
        return name if name in TASKS or (name and name in routes) else None

    def _scaled(self, vectors: Tensor, options: Any) -> Tensor:
        """Vectors, (..., D), scaled to length 1 if options or settings say so."""
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return normalize(vectors, dim=-1) if scale else vectors

    def _give(self, outputs: Outputs, **columns: Iterable[Any]) -> Sequence[Any]:
        """Results of what each text has in the columns, behind its head."""
        encoded = encode_results(outputs.heads, **columns)
        return encoded if self._gives_json else [each.value for each in encoded]

    def _tokenized(self, items: Sequence[Any], options: TextKeywords) -> list[Any]:
        prepared = super()._tokenized(items, options)
        if self._prompt_name(options) not in self._own_code:
            return prepared
        ids = Failed(InvalidItem("token ids: this model takes texts alone with this prompt"))
        return [
            each
            if isinstance(each, Failed)
            else ids
            if isinstance(item, list)
            else LibraryText(each, self._input(item, ""), options)
            for item, each in zip(items, prepared, strict=True)
        ]

    def head(self, prepared: Any) -> dict[str, Any]:
        """Of its tokens."""
        return super().head(prepared.tokens if isinstance(prepared, LibraryText) else prepared)

    def _values(self, forward: Forward, batch: Sequence[Any]) -> Tensor:
        if not batch or not isinstance(batch[0], LibraryText):
            return super()._values(forward, batch)
        there = {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in self._prepare_by_library(batch).items()
        }
        task = self._task(self._prompt_name(batch[0].options))
        return self._read_features(self.library(there, task=task))

    def _prepare_by_library(self, batch: Sequence[LibraryText]) -> Mapping[str, Any]:
        options = batch[0].options
        with self._tokenize.lend(self._cut(options).side):
            features: Mapping[str, Any] = self.library.preprocess(
                [each.content for each in batch],
                prompt=self._prompt(options),
                task=self._task(self._prompt_name(options)),
            )
        return features


@contextmanager
def _nothing_left_out() -> Iterator[None]:
    """Refuses a model of whose files sentence-transformers leaves something out.

    Raises:
        ValueError: It has warned of that.
    """
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    library = logging.getLogger("sentence_transformers")
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)
    for message in filter(LEFT_OUT.search, found):
        raise ValueError(message)

"""What text models make of items before a pass, and of its values behind it. Needs no torch."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from batchery.errors import InvalidItem
from batchery.model import Model
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.inputs import (
    PromptKeywords,
    TextEmbeddingKeywords,
    TextKeywords,
    check_text,
    check_token_ids,
    read_each,
    read_keywords,
)
from batchery_worker.models.tokenizer import (
    Cut,
    Input,
    LibraryTokenizer,
    TextTokenizer,
    TokenIds,
    Truncated,
)
from batchery_worker.plain_values import Encoded, Vector

#: orjson reads float32 as they are, and writes the fewest digits that are read back as the same.
NUMPY = orjson.OPT_SERIALIZE_NUMPY


class TextItems(Model):
    """Validates and tokenizes items that are texts; subclasses of it compute."""

    #: The keywords that a job of it may have.
    keywords: ClassVar[type[TextKeywords]]

    settings: ModelSettings

    _tokenize: TextTokenizer

    #: Number of tokens that the model knows.
    _vocabulary: int

    def _read_keywords(self, keywords: Mapping[str, Any]) -> Any:
        """Reads and checks the keywords of a batch. Raises InvalidItem."""
        return read_keywords(self.keywords, keywords)

    def _prompt(self, options: Any) -> str:  # noqa: ARG002 (for kinds with prompts)
        """What goes in front of each text."""
        return ""

    def _input(self, item: Any, prompt: str) -> Input:
        """What the tokenizer takes of an item. Raises InvalidItem."""
        if isinstance(item, list):
            ids = check_token_ids(item, self._vocabulary, self.settings.max_chars)
            return TokenIds(ids, before=prompt)
        return prompt + check_text("text", item, self.settings.max_chars)

    def preprocess(self, items: Sequence[Any], **keywords: Any) -> list[Any]:
        """Validates and tokenizes the items of a batch, in one call of the tokenizer.

        Returns:
            One tokenized item per item, in order, not padded. `Failed` with an `InvalidItem` that
            names field and limit for each item that cannot run. A wrong keyword fails all items.
        """
        try:
            options = self._read_keywords(keywords)
            return self._tokenized(items, options)
        except InvalidItem as error:
            return [Failed(InvalidItem(str(error))) for _ in items]

    def _tokenized(self, items: Sequence[Any], options: TextKeywords) -> list[Any]:
        """The same with keywords that were read. Raises InvalidItem: a keyword is wrong."""
        prompt = self._prompt(options)
        inputs = read_each(items, lambda item: self._input(item, prompt))
        fit = [each for each in inputs if not isinstance(each, Failed)]
        encoded = iter(self._encode(fit, options))
        return [each if isinstance(each, Failed) else next(encoded) for each in inputs]

    def _encode(self, inputs: Sequence[Any], options: Any) -> list[Any]:
        """What goes through the model for each input. Raises InvalidItem: a keyword is wrong."""
        return self._tokenize(inputs, self._cut(options))

    def _cut(self, options: TextKeywords) -> Cut:
        truncate, side = self._tokenize.usual_cut[:2]
        return Cut(
            truncate if options.truncate is None else options.truncate,
            options.truncation_direction or side,
        )

    def tokens(self, prepared: Any) -> int:
        """Length of a tokenized item in tokens, special ones included."""
        return int(prepared.shape[1])

    def head(self, prepared: Any) -> dict[str, Any]:
        """The fields that every result has, of one item."""
        head: dict[str, Any] = {"tokens": prepared.shape[1]}
        if isinstance(prepared, Truncated):
            head["truncated"] = True
        return head


class PromptedItems(TextItems):
    """The same with texts in front, which jobs choose by name."""

    #: Texts to put in front, by name; those of the settings outrank those of the model's files.
    prompts: Mapping[str, str]

    #: Name of the prompt for jobs that choose none; None if there is none.
    default_prompt: str | None

    #: Maximum length of a text with a prompt, in tokens, where it has one of its own.
    _prompt_limits: Mapping[str, int]

    def _prompt_name(self, options: Any) -> str | None:
        name: str | None = getattr(options, "prompt", None)
        return self.default_prompt if name is None else name

    def _read_keywords(self, keywords: Mapping[str, Any]) -> Any:
        options = super()._read_keywords(keywords)
        name = options.prompt if isinstance(options, PromptKeywords) else None
        if name is not None and name not in self.prompts:
            there_are = ", ".join(sorted(self.prompts))
            raise InvalidItem(f"keyword prompt = {name!r:.80}: there are {there_are}")
        return options

    def _prompt(self, options: Any) -> str:
        return self.prompts.get(self._prompt_name(options) or "", "")

    def _cut(self, options: TextKeywords) -> Cut:
        limit = self._prompt_limits.get(self._prompt_name(options) or "")
        return super()._cut(options)._replace(max_length=limit)


class ItemsSetup(NamedTuple):
    """What a process must know that reads the items of a model, and does not have the model."""

    settings: ModelSettings
    library: Tokenizer
    #: Side on which long texts are usually cut.
    side: str
    #: Names of the model's inputs that a tokenized text has, in the order of its rows.
    inputs: list[str]
    vocabulary: int
    max_length: int | None
    prompts: Mapping[str, str]
    default_prompt: str | None
    prompt_limits: Mapping[str, int]
    dimensions: int


class EmbeddingItems(PromptedItems):
    """Items of embeddings, and their results."""

    keywords = TextEmbeddingKeywords

    #: D of the model's vectors.
    dimensions: int

    def open(self, setup: ItemsSetup) -> None:
        """Reads items as the model does of which this is the setup."""
        self.settings, self.dimensions = setup.settings, setup.dimensions
        self.prompts, self.default_prompt = setup.prompts, setup.default_prompt
        self._prompt_limits, self._vocabulary = setup.prompt_limits, setup.vocabulary
        self._tokenize = TextTokenizer(
            LibraryTokenizer(setup.library, setup.side),
            setup.inputs,
            vocabulary=setup.vocabulary,
            max_length=setup.max_length,
            truncate=setup.settings.overflow == "truncate",
        )

    def describe(self) -> ItemsSetup:
        """What another process needs to `open` the same.

        Raises:
            ValueError: The tokenizer has Python code of its own.
        """
        tokenize = self._tokenize
        if (library := tokenize.library) is None:
            raise ValueError("its tokenizer has Python code of its own; set feeders = 0")
        return ItemsSetup(
            settings=self.settings,
            library=library,
            side=tokenize.usual_cut.side,
            inputs=tokenize.names,
            vocabulary=self._vocabulary,
            max_length=tokenize.usual_cut.max_length,
            prompts={**self.prompts},
            default_prompt=self.default_prompt,
            prompt_limits=self._prompt_limits,
            dimensions=self.dimensions,
        )

    def _read_keywords(self, keywords: Mapping[str, Any]) -> TextEmbeddingKeywords:
        options: TextEmbeddingKeywords = super()._read_keywords(keywords)
        if options.dimensions is not None:
            options.check(self.dimensions)
        return options

    def write(
        self, heads: Sequence[dict[str, Any]], vectors: NDArray[Any], keywords: Mapping[str, Any]
    ) -> list[Encoded]:
        """Results of vectors, (B, D) float32, behind their heads; see `write_vectors`."""
        return write_vectors(heads, vectors, self._read_keywords(keywords).encoding)


def write_vectors(
    heads: Sequence[dict[str, Any]], vectors: NDArray[Any], encoding: str
) -> list[Encoded]:
    """Results of vectors, (B, D) float32, behind their heads; with `base64` as text.

    Others are read once more when the results are written.
    """
    if encoding == "base64":
        little = vectors.astype("<f4", copy=False)
        texts = [b64encode(row).decode("ascii") for row in little]
        return encode_results(heads, vector=texts)
    return [
        Encoded(orjson.dumps(head)[:-1] + b',"vector":', Vector(row), b"}")
        for head, row in zip(heads, vectors, strict=True)
    ]


def encode_results(heads: Sequence[dict[str, Any]], **columns: Iterable[Any]) -> list[Encoded]:
    """Results as JSON, straight from the numbers: no list of floats is ever made.

    Numbers have the fewest digits that are read back as the same float32.
    """
    return [
        Encoded(orjson.dumps({**head, **dict(zip(columns, row, strict=True))}, option=NUMPY))
        for head, *row in zip(heads, *columns.values(), strict=True)
    ]

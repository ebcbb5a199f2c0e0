"""What a job of a built-in model may ask: items and keywords, and what is wrong with others."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchery.errors import ONE_JOB_EACH, InvalidItem
from batchery.outcomes import Failed


def check_text(field: str, text: Any, max_chars: int) -> str:
    """Returns a text that a model can take.

    Args:
        field: Name of the text, for the error.
        text: Anything.
        max_chars: Maximum length, in characters.

    Raises:
        InvalidItem: It is no text, an empty one, or too long.
    """
    if not isinstance(text, str):
        raise InvalidItem(f"{field}: must be a string, not {type(text).__name__}")
    if not text:
        raise InvalidItem(f"{field}: is empty")
    if len(text) > max_chars:
        raise InvalidItem(f"{field}: {len(text)} characters are more than max_chars = {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidItem(
            f"{field}: is not Unicode: half a surrogate pair at character {error.start}"
        ) from None
    return text


def check_token_ids(ids: Sequence[Any], vocabulary: int, max_count: int) -> list[int]:
    """Returns token ids that a model knows.

    Raises:
        InvalidItem: There are none or too many, or one is no token id; names its position.
    """
    if not ids:
        raise InvalidItem("token ids: the list is empty")
    if len(ids) > max_count:
        raise InvalidItem(f"token ids: {len(ids)} are more than max_chars = {max_count}")
    for position, token in enumerate(ids):
        # `True` is an `int`, too.
        if type(token) is not int:
            kind = type(token).__name__
            raise InvalidItem(
                f"token ids: position {position} has a {kind}, not an integer; {ONE_JOB_EACH}"
            )
        if not 0 <= token < vocabulary:
            raise InvalidItem(
                f"token ids: {token} at position {position} is none of the model's,"
                f" which are 0 to {vocabulary - 1}"
            )
    return list(ids)


def check_fields(item: Any, fields: Collection[str], max_chars: int) -> tuple[str, ...]:
    """Returns the texts of an item that is a dictionary of texts, in the order of the fields.

    Raises:
        InvalidItem: It is no dictionary of these fields, or one of its texts is wrong.
    """
    if not isinstance(item, dict) or item.keys() != set(fields):
        given = ", ".join(map(repr, item)) if isinstance(item, dict) else type(item).__name__
        names = " and ".join(map(repr, fields))
        raise InvalidItem(f"item: must be a dictionary with {names}, not {given:.80}")
    return tuple(check_text(field, item[field], max_chars) for field in fields)


def read_each(items: Iterable[Any], read: Callable[[Any], Any]) -> list[Any]:
    """What is read of each item; `Failed` where reading it raises `InvalidItem`."""
    found: list[Any] = []
    for item in items:
        try:
            found.append(read(item))
        except InvalidItem as error:
            # Without its frames, which hold other items.
            found.append(Failed(type(error)(str(error))))
    return found


#: Maximum number of labels that a job brings.
MAX_LABELS = 1_000


class Keywords(BaseModel):
    """Common rules: unknown keywords are refused, and nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextKeywords(Keywords):
    """Keywords of all kinds.

    Attributes:
        truncate: Cut texts that are too long, or refuse them; None for the setting `overflow`.
        truncation_direction: The side where such a text loses tokens; None for that of the model's
            tokenizer, which is nearly always the right one.
    """

    truncate: bool | None = None
    truncation_direction: Literal["left", "right"] | None = None


class PromptKeywords(TextKeywords):
    """Keywords of the kinds that have prompts.

    Attributes:
        prompt: Name of a prompt to put in front of the text.
    """

    prompt: str | None = None


class VectorKeywords(Keywords):
    """Keywords of a job for vectors.

    Attributes:
        normalize: Scale each vector to length 1; None for the setting of that name.
        encoding: `float` for lists of numbers, `base64` for their bytes as little-endian float32,
            one vector behind the other.
    """

    normalize: bool | None = None
    encoding: Literal["float", "base64"] = "float"


class EmbeddingKeywords(VectorKeywords):
    """Keywords of a job for one vector.

    Attributes:
        dimensions: Keep only this many leading dimensions, at least 1; None for the setting of that
            name.
    """

    dimensions: Annotated[int, Field(ge=1)] | None = None

    def check(self, dimensions: int) -> None:
        """Compares the keyword with D of the model's vectors. Raises InvalidItem."""
        if (self.dimensions or 1) > dimensions:
            raise InvalidItem(
                f"keyword dimensions = {self.dimensions}: the model's vectors have {dimensions}"
            )


class MultiVectorKeywords(PromptKeywords, VectorKeywords):
    """Keywords of a job for a vector per token of a text."""


class TextEmbeddingKeywords(PromptKeywords, EmbeddingKeywords):
    """Keywords of a job for the vector of a text."""


class SparseEmbeddingKeywords(PromptKeywords):
    """Keywords of a sparse embedding job.

    Attributes:
        top_k: Keep only this many numbers, the largest, at least 1.
    """

    top_k: Annotated[int, Field(ge=1)] | None = None


class ClassificationKeywords(Keywords):
    """Keywords of a classification job.

    Attributes:
        top_k: Also tell the scores of this many labels, at least 1, likeliest first.
        raw_scores: Give the model's outputs as they are, of any size, not probabilities.
    """

    top_k: Annotated[int, Field(ge=1)] | None = None
    raw_scores: bool = False


class TextClassificationKeywords(TextKeywords, ClassificationKeywords):
    """Keywords of a job that labels a text.

    Attributes:
        max_length: Tokens that are read of each text, if that is fewer than the model may read: at
            least 8, so that some are left between special ones.
    """

    max_length: Annotated[int, Field(ge=8)] | None = None


class ZeroShotKeywords(Keywords):
    """Keywords of a job that labels a picture with labels of its own.

    Attributes:
        labels: What the picture may show; 1 to 1,000 texts.
        template: The text whose `{}` is replaced by each label, and that is compared with the
            picture.
        raw_scores: Give the model's outputs as they are, of any size, not probabilities.
    """

    labels: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_LABELS)
    ]
    template: Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")] = "This is a photo of {}."
    raw_scores: bool = False


class DetectionKeywords(Keywords):
    """Keywords of a job that finds objects in a picture.

    Attributes:
        threshold: Tell only of objects with a higher score, 0 to 1.
    """

    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5


class RerankKeywords(TextKeywords):
    """Keywords of a reranking job.

    Attributes:
        raw_scores: Give the model's output as it is, of any size, not a score from 0 to 1.
    """

    raw_scores: bool = False


#: Maximum number of stop strings, of texts per job, and of likeliest tokens that are told.
MAX_STOPS, MAX_TEXTS, MAX_LIKELIEST = 16, 64, 20

StopString = Annotated[str, Field(min_length=1)]


class GenerationKeywords(Keywords):
    """Keywords of a text generation job.

    Attributes:
        max_new_tokens: At least 1; None for the setting of that name.
        temperature: From 0, where the likeliest token is always taken, to 10.
        top_p: Draw from the likeliest tokens that together have this probability: above 0, up to 1.
        top_k: Draw from so many of the likeliest tokens; 0 for all.
        seed: The same seed draws the same tokens; None for another one each time.
        stop: A text or several, before the first of which the text ends.
        logprobs: Also tell the probability of each token, and of so many of the likeliest ones.
        n: How many texts to make of the item.
        repetition_penalty: Divides the scores of tokens that are there already; 1 for none. None
            for that of the model's configuration.
        ignore_eos: Go on where the model would end, up to `max_new_tokens`.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = []
    logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELIEST)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_TEXTS)] = 1
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class TranscriptionKeywords(Keywords):
    """Keywords of a transcription job. A CTC model has `timestamps` alone.

    Attributes:
        language: What is spoken, as a code (`en`) or an English name; None to have it found out for
            each window.
        task: `transcribe` writes it down, `translate` translates it to English.
        prompt: A text that the recording might follow: how names are written, and in which style.
        timestamps: `segment`, `word` for those of words as well, or `none`, which is a little
            faster. None for segments, if the model knows times.
        temperature: From 0, where the likeliest tokens are taken, to 1, where they are drawn.
    """

    language: str | None = None
    task: Literal["transcribe", "translate"] = "transcribe"
    prompt: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    timestamps: Literal["segment", "word", "none"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0


K = TypeVar("K", bound=Keywords)


def read_keywords(kind: type[K], given: Mapping[str, Any]) -> K:
    """Validates the keywords of a batch.

    Raises:
        InvalidItem: Names the keyword and what is allowed.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = error.errors()
    name = errors[0]["loc"][0]
    # Of the types that a keyword may have, the one that fits best says what is wrong.
    first = max(
        (each for each in errors if each["loc"][0] == name),
        key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])),
    )
    if first["type"] == "missing":
        raise InvalidItem(f"keyword {name}: is required")
    if first["type"] == "extra_forbidden":
        there_are = ", ".join(sorted(kind.model_fields))
        raise InvalidItem(f"keyword {name}: no such keyword; there are {there_are}")
    raise InvalidItem(f"keyword {name} = {first['input']!r:.80}: {first['msg']}")


class GenerationItem(Keywords):
    """What a text is written for.

    Attributes:
        prompt: A text, or its tokens.
        messages: A chat; either this or `prompt`.
        tools: Functions that the model may call.
        tool_choice: Which of them it must call.
        extra_body: More fields of a server's request; other engines have none.
        options: Keywords of this item alone, as lines of one file have them; they outrank those of
            its job.
    """

    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    extra_body: dict[str, Any] | None = None
    options: dict[str, Any] = {}


def read_item(item: Any) -> GenerationItem:
    """Reads an item of text generation: its fields, or a prompt or the messages of a chat alone.

    Raises:
        InvalidItem: It is none; names what is wrong.
    """
    is_chat = isinstance(item, list) and bool(item) and isinstance(item[0], dict)
    fields = item if isinstance(item, dict) else {"messages" if is_chat else "prompt": item}
    try:
        read = GenerationItem.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"]
        if first["type"] == "extra_forbidden":
            problem = "no such field; options are keywords of the call, or stand in 'options'"
        raise InvalidItem(f"item.{first['loc'][0]}: {problem}") from None
    if bool(read.prompt) == bool(read.messages):
        raise InvalidItem("item: must be a prompt, or the messages of a chat, and not empty")
    return read

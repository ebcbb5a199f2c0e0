"""The typed results of the built-in models, and numpy arrays from them.

They travel as plain JSON: `get()` returns the dictionary, and `Embedding.model_validate(...)` gives
it a type.
"""

import base64
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Frozen(BaseModel):
    """Part of a result."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Result(Frozen):
    """What every built-in result has."""

    tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Tokens of the text, special ones included; of a picture, its patches.",
        ),
    ]
    truncated: Annotated[
        bool,
        Field(
            description="Whether the text was too long, and one end was cut off; left out if not."
        ),
    ] = False


class Embedding(Result):
    """One text or picture as a vector.

    Attributes:
        vector: D floats. With `encoding="base64"`, the same as little-endian float32 in base64, as
            in the OpenAI API: less than half of the list's size.
    """

    vector: list[float] | str

    def to_numpy(self) -> "NDArray[np.float32]":
        """The vector, shape (D,), float32."""
        return to_numpy(self.vector)


class Classification(Result):
    """The label of one text or picture.

    Attributes:
        label: The most likely label, named as in the model's config.
        score: Its probability, 0 to 1: softmax over the labels, or sigmoid if several may hold or
            there is one. That of a regression is the model's output itself. With `raw_scores`, it
            always is.
        scores: The score of each label, likeliest first; only with `top_k`, or with labels of the
            job's own.
    """

    label: str
    score: float
    scores: dict[str, float] | None = None


class Score(Result):
    """How well one text fits a query.

    Attributes:
        score: 0 to 1; with `raw_scores`, the model's output itself, of any size.
    """

    score: float


class Box(Frozen):
    """Where an object is, in pixels of the picture, upright; from its left upper corner."""

    xmin: int
    ymin: int
    xmax: int
    ymax: int


class DetectedObject(Frozen):
    """An object in a picture.

    Attributes:
        label: What it is, named as in the model's config.
        score: Its probability, 0 to 1.
        box: Where it is.
    """

    label: str
    score: float
    box: Box


class Detection(Result):
    """The objects in one picture.

    Attributes:
        objects: In the order of the model.
        width: Of the picture in pixels, upright.
        height: The same.
    """

    objects: list[DetectedObject]
    width: int
    height: int


class SparseEmbedding(Result):
    """One text as a sparse vector.

    Attributes:
        indices: Tokens of the vocabulary, ascending.
        values: The weight of each of them, above 0.
    """

    indices: list[int]
    values: list[float]


class MultiVectorEmbedding(Result):
    """One text as a vector per token.

    Attributes:
        vectors: T lists of D floats. With `encoding="base64"`, the same as little-endian float32 in
            base64, one vector behind the other.
        dimensions: D; only with `encoding="base64"`.
    """

    vectors: list[list[float]] | str
    dimensions: Annotated[int, Field(gt=0)] | None = None

    def to_numpy(self) -> "NDArray[np.float32]":
        """The vectors, shape (T, D), float32."""
        import numpy as np

        if isinstance(self.vectors, str):
            return to_numpy(self.vectors).reshape(-1, self.dimensions or 1)
        return np.array(self.vectors, dtype=np.float32)


class TokenLogprob(Frozen):
    """A token of a text, and how likely it was.

    Attributes:
        token: Its text.
        id: Its number in the vocabulary; None if a server computes.
        logprob: Natural logarithm of its probability, before `temperature`, `top_k` and `top_p`.
        top: Text, number and logarithm of the likeliest tokens, as many as were asked for.
        bytes: Those of the token, then of each of `top`, None where they are unknown; left out
            where they are those of the texts.
    """

    token: str
    id: int | None
    logprob: float
    top: list[tuple[str, int | None, float]] = []
    bytes: list[list[int] | None] = []


class GeneratedText(Frozen):
    """A text that a model has written.

    Attributes:
        text: Without the prompt, special tokens and the stop string.
        finish_reason: `stop` if the model or a stop string ended it, `length` if a limit did. A
            server may have others, such as `tool_calls`.
        logprobs: One per token; only with the keyword.
        message: As OpenAI has it, if a server sends more than a text: calls of tools, reasoning.
    """

    text: str
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None
    message: dict[str, Any] | None = None


class GenerationTimings(Frozen):
    """How long a job of text generation took, from when it had a slot."""

    first_token_ms: float
    total_ms: float
    tokens_per_s: float | None


class Generation(Frozen):
    """What a model has written for one item.

    Attributes:
        text: See `GeneratedText`; None with `n` above 1.
        finish_reason: As there.
        logprobs: As there.
        message: As there.
        choices: With `n` above 1, one per text.
        tokens_in: Tokens of the prompt; None if a server does not say, as in the next one.
        tokens_out: Tokens of all texts, with the ones that end them.
        timings: How long it took.
    """

    text: str | None = None
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    message: dict[str, Any] | None = None
    choices: list[GeneratedText] = []
    tokens_in: int | None
    tokens_out: int | None
    timings: GenerationTimings


class SpokenPart(Frozen):
    """A segment of what was said, or a word.

    Attributes:
        start_s: Where it begins in the recording, in seconds.
        end_s: Where it ends.
        text: What was said.
    """

    start_s: float
    end_s: float
    text: str


class Transcription(Frozen):
    """What is said in a recording.

    Attributes:
        text: All of it.
        language: Code of the language, such as `en`, that the job said or that was found in the
            first window; None if the model does not tell.
        duration_s: Length of the recording, in seconds.
        segments: Parts of the text, in order; with Whisper sentences or less, with CTC models the
            words that begin in a window. None with `timestamps="none"`.
        words: Only with `timestamps="word"`.
    """

    text: str
    language: str | None
    duration_s: float
    segments: list[SpokenPart] | None = None
    words: list[SpokenPart] | None = None


def to_numpy(result: Mapping[str, Any] | Sequence[float] | str) -> "NDArray[np.float32]":
    """Turns an embedding result into a numpy array, whatever its encoding.

    Args:
        result: The dictionary that `get()` returned, or only its `vector`.

    Returns:
        Shape (D,), float32 in the byte order of this machine, writable.

    Raises:
        ValueError: It is neither a list of numbers nor base64 of whole float32 numbers.
        KeyError: The dictionary has no `vector`.
    """
    import numpy as np

    vector = result["vector"] if isinstance(result, Mapping) else result
    if isinstance(vector, str):
        packed = np.frombuffer(base64.b64decode(vector, validate=True), dtype="<f4")
        return packed.astype(np.float32)  # a copy, as an array of `frombuffer` is read-only
    if isinstance(vector, list):
        # Half the time of `np.array`, which takes whatever this does not.
        with suppress(struct.error, OverflowError):
            numbers = bytearray(struct.pack(f"{len(vector)}f", *vector))
            return np.frombuffer(numbers, dtype=np.float32)
    array = np.array(vector, dtype=np.float32)
    if array.ndim != 1:
        raise ValueError(f"vector has shape {array.shape}; expected a flat list of numbers")
    return array

"""The keywords that a job of a built-in model may have."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchery.errors import InvalidItem


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


class EmbeddingKeywords(PromptKeywords):
    """Keywords of an embedding job. A missing keyword takes the setting of its name.

    Attributes:
        normalize: Scale the vector to length 1.
        dimensions: Keep only this many leading dimensions, at least 1.
        encoding: `float` for a list of numbers, `base64` for their bytes as little-endian float32.
    """

    normalize: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding: Literal["float", "base64"] = "float"


class SparseEmbeddingKeywords(PromptKeywords):
    """Keywords of a sparse embedding job.

    Attributes:
        top_k: Keep only this many numbers, the largest, at least 1.
    """

    top_k: Annotated[int, Field(ge=1)] | None = None


class MultiVectorKeywords(PromptKeywords):
    """Keywords of a job for a vector per token.

    Attributes:
        normalize: Scale each vector to length 1; None for the setting of that name.
        encoding: `float` for lists of numbers, `base64` for the bytes of all of them as
            little-endian float32.
    """

    normalize: bool | None = None
    encoding: Literal["float", "base64"] = "float"


class ClassificationKeywords(TextKeywords):
    """Keywords of a classification job.

    Attributes:
        max_length: Tokens that are read of each text, if that is fewer than the model may read: at
            least 8, so that some are left between special ones.
        top_k: Also tell the scores of this many labels, at least 1, likeliest first.
        raw_scores: Give the model's outputs as they are, of any size, not probabilities.
    """

    max_length: Annotated[int, Field(ge=8)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    raw_scores: bool = False


class RerankKeywords(TextKeywords):
    """Keywords of a reranking job.

    Attributes:
        raw_scores: Give the model's output as it is, of any size, not a score from 0 to 1.
    """

    raw_scores: bool = False


class TokenClassificationKeywords(TextKeywords):
    """Keywords of a token classification job.

    Attributes:
        aggregation: What becomes of the labels of tokens. `none` leaves them. `simple` joins
            neighbours of one label. The others first give each word one label: that of its `first`
            token, of the mean of its scores (`average`), or of its surest token (`max`).
    """

    aggregation: Literal["none", "simple", "first", "average", "max"] = "simple"


#: Maximum number of labels of a zero-shot job: its texts are computed once for each.
MAX_LABELS = 100


class ZeroShotKeywords(TextKeywords):
    """Keywords of a zero-shot classification job.

    Attributes:
        labels: What the text may be about: 1 to `MAX_LABELS` texts, all different.
        hypothesis_template: A sentence that says so, with `{}` in the place of the label.
        multi_label: Whether several labels may hold; then their scores are independent.
    """

    labels: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_LABELS)
    ]
    hypothesis_template: str = "This example is {}."
    multi_label: bool = False


K = TypeVar("K", bound=Keywords)


def read_keywords(kind: type[K], given: Mapping[str, Any]) -> K:
    """Validates the keywords of a batch.

    Raises:
        InvalidItem: Names the keyword and what is allowed.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
    name = first["loc"][0]
    if first["type"] == "missing":
        raise InvalidItem(f"keyword {name}: is required")
    if first["type"] == "extra_forbidden":
        there_are = ", ".join(sorted(kind.model_fields))
        raise InvalidItem(f"keyword {name}: no such keyword; there are {there_are}")
    raise InvalidItem(f"keyword {name} = {first['input']!r:.80}: {first['msg']}")

"""The keywords that a job of a built-in model may have."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchery.errors import InvalidItem


class Keywords(BaseModel):
    """Common rules: unknown keywords are refused, and nothing is converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EmbeddingKeywords(Keywords):
    """Keywords of an embedding job. A missing keyword takes the setting of its name.

    Attributes:
        prompt: Name of a prompt to put in front of the text.
        normalize: Scale the vector to length 1.
        dimensions: Keep only this many leading dimensions, at least 1.
        encoding: `float` for a list of numbers, `base64` for their bytes as little-endian float32.
    """

    prompt: str | None = None
    normalize: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding: Literal["float", "base64"] = "float"


class ClassificationKeywords(Keywords):
    """Keywords of a classification job.

    Attributes:
        top_k: Also tell the scores of this many labels, at least 1, likeliest first.
    """

    top_k: Annotated[int, Field(ge=1)] | None = None


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
    if first["type"] == "extra_forbidden":
        there_are = ", ".join(sorted(kind.model_fields))
        raise InvalidItem(f"keyword {name}: no such keyword; there are {there_are}")
    raise InvalidItem(f"keyword {name} = {first['input']!r:.80}: {first['msg']}")

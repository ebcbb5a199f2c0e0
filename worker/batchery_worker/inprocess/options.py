"""Options of a batcher and of its calls, checked where they are given."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from batchery.errors import BatchArgumentError

#: Shares of the priority classes unless others are given, highest class first: the worker's own.
USUAL_CLASSES: Mapping[str, float] = {"high": 50.0, "normal": 30.0, "low": 20.0}

#: A finite number above 0.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class BatcherOptions(BaseModel):
    """How batches are formed. The names are those of a batch task, where it has them.

    Attributes:
        max_batch_size: Maximum number of items in a batch, at least 1.
        max_batch_tokens: Maximum number of tokens of one call of the function, padding counted.
            Needs `length` or `pad`. A longer item still runs, alone.
        length: The number of tokens of an item. Items are then sorted by length, and a batch is
            cut into calls of the function that pad little.
        max_wait_ms: How long an idle batcher waits for a batch to fill, from its oldest item, in
            milliseconds.
        target_latency_ms: How long calls may take: batches are only so large. In milliseconds.
        small_batch_threshold: Calls with up to so many items do not wait behind those with more.
        classes: Share of each priority class, above 0, highest class first. Calls that name no
            class are of the first one.
        shed_late: Whether calls fail with `DeadlineExceeded` that cannot make their deadline.
        max_waiting: Maximum number of items that wait; None for no limit. A single call with more
            items than that goes in when nothing else waits.
        when_full: What a call does that finds no space: wait for it, or raise `QueueFull`.
        pad: Of items that are dicts of arrays; see `Collator`, as for the others.
        mask: The same.
        trim: The same.
        device: The same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_batch_size: PositiveInt = 64
    max_batch_tokens: PositiveInt | None = None
    length: Callable[[Any], Any] | None = None
    max_wait_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    target_latency_ms: Positive | None = None
    small_batch_threshold: PositiveInt | None = None
    classes: Annotated[Mapping[str, Positive], Field(min_length=1)] = USUAL_CLASSES
    shed_late: bool = False
    max_waiting: PositiveInt | None = None
    when_full: Literal["wait", "refuse"] = "wait"
    pad: Mapping[str, bool | int | float] | None = None
    mask: str | None = None
    trim: bool = False
    device: str | None = None

    @property
    def has_arrays(self) -> bool:
        """Whether items are dicts of arrays."""
        return not self.model_fields_set.isdisjoint(ARRAY_OPTIONS)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.length and self.has_arrays:
            raise ValueError("length: items that are dicts of arrays are counted")
        if self.max_batch_tokens and not (self.length or self.pad):
            raise ValueError("max_batch_tokens needs length, which counts the tokens of an item")
        if (self.mask is not None or self.trim) and not self.pad:
            raise ValueError("mask and trim need pad, which says what has tokens")
        if self.pad and self.pad.get(self.mask or "", 0):
            raise ValueError(f"mask={self.mask!r}: it is padded with 0")
        return self


#: Options for items that are dicts of arrays.
ARRAY_OPTIONS = ("pad", "mask", "trim", "device")


class CallOptions(BaseModel):
    """How one call is served.

    Attributes:
        timeout_s: How long the caller waits, in seconds; then `NoResult` is raised, and what has
            not begun is dropped. None waits without end.
        deadline_s: In how many seconds the call should be answered. In its lane it goes before
            calls that have more time.
        priority_class: A name of `classes`; the first one where unset.
        tenant: For whom it runs. Tenants of one class have equal shares of it.
        return_exceptions: Whether a call with a list gets exceptions in the places of items that
            failed, as from `asyncio.gather`. Otherwise the first one is raised.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    timeout_s: Positive | None = None
    deadline_s: Positive | None = None
    priority_class: str | None = None
    tenant: str = ""
    return_exceptions: bool = False


Options = TypeVar("Options", bound=BaseModel)


def read_options(kind: type[Options], name: str, given: Mapping[str, Any]) -> Options:
    """Reads the options of a batcher of that name, or of its calls.

    Raises:
        BatchArgumentError: There is no such option, or its value is impossible.
    """
    check_names(name, given, kind.model_fields)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
    wrong = str(first["loc"][0]) if first["loc"] else ""
    option = f"{wrong}={given[wrong]!r:.80}: " if wrong else ""
    raise BatchArgumentError(f"{name}: {option}{first['msg'].removeprefix('Value error, ')}")


def check_names(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Checks that options exist.

    Raises:
        BatchArgumentError: One of them does not.
    """
    if unknown := [each for each in given if each not in known]:
        raise BatchArgumentError(
            f"{name}: there is no option {', '.join(unknown)}; there are {', '.join(known)}"
        )


def encode(name: str, keywords: Mapping[str, Any]) -> str:
    """Spells keywords so that equal ones are spelled equally: only those share a batch.

    Raises:
        BatchArgumentError: They are not plain data.
    """
    try:
        text = json.dumps(keywords, sort_keys=True)
        # JSON spells some values alike that a function may tell apart, such as a tuple and a list.
        return text if json.loads(text) == keywords else f"{text} {keywords!r}"
    except (TypeError, ValueError) as error:
        raise BatchArgumentError(
            f"{name}: keywords say which items may share a batch, so they must be plain data"
            f" that JSON can write ({error})"
        ) from None

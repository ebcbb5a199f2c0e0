"""Options of a batcher and of its calls, checked where they are given."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from batchery.errors import BatchArgumentError

#: Shares of the priority classes unless others are given, highest class first: the worker's own.
USUAL_CLASSES: Mapping[str, float] = {"high": 50.0, "normal": 30.0, "low": 20.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherOptions:
    """How batches are formed. The names are those of a batch task, where it has them.

    Attributes:
        max_batch_size: Maximum number of items in a batch, at least 1.
        max_batch_tokens: Maximum number of tokens of one call of the function, padding counted.
            Needs `length`. A longer item still runs, alone.
        length: The number of tokens of an item. Items are then sorted by length, and a batch is
            cut into calls of the function that pad little.
        max_wait_ms: How long an idle batcher waits for a batch to fill, from its oldest item, in
            milliseconds.
        target_latency_ms: How long calls may take: batches are only so large. In milliseconds.
        small_batch_threshold: Calls with up to so many items do not wait behind those with more.
        classes: Share of each priority class, above 0, highest class first. Calls that name no
            class are of the first one.
        max_waiting: Maximum number of items that wait; None for no limit. Calls beyond it raise
            `QueueFull`. A single call with more items than that goes in when nothing else waits.
    """

    max_batch_size: int = 64
    max_batch_tokens: int | None = None
    length: Callable[[Any], Any] | None = None
    max_wait_ms: float = 0.0
    target_latency_ms: float | None = None
    small_batch_threshold: int | None = None
    classes: Mapping[str, float] = field(default_factory=lambda: USUAL_CLASSES)
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_batch_tokens", "small_batch_threshold", "max_waiting"):
            check_number(name, getattr(self, name), whole=True, optional=name != "max_batch_size")
        check_number("target_latency_ms", self.target_latency_ms, optional=True)
        if self.max_wait_ms != 0:
            check_number("max_wait_ms", self.max_wait_ms)
        has_classes = isinstance(self.classes, Mapping) and bool(self.classes)
        for is_right, problem in (
            (has_classes, f"classes={self.classes!r}: give the share of each"),
            (callable(self.length or len), f"length={self.length!r}: give a function"),
            (self.length or not self.max_batch_tokens, "max_batch_tokens needs length"),
        ):
            if not is_right:
                raise BatchArgumentError(problem)
        for name, share in self.classes.items():
            check_number(f"classes[{name!r}]", share)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How one call is served.

    Attributes:
        timeout_s: How long the caller waits, in seconds; then `NoResult` is raised, and what has
            not begun is dropped. None waits without end.
        priority_class: A name of `classes`; the first one where unset.
        return_exceptions: Whether a call with a list gets exceptions in the places of items that
            failed, as from `asyncio.gather`. Otherwise the first one is raised.
    """

    timeout_s: float | None = None
    priority_class: str | None = None
    return_exceptions: bool = False

    def __post_init__(self) -> None:
        check_number("timeout_s", self.timeout_s, optional=True)


def check_names(name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Checks that options exist.

    Raises:
        BatchArgumentError: One of them does not.
    """
    if unknown := [each for each in given if each not in known]:
        raise BatchArgumentError(
            f"{name}: there is no option {', '.join(unknown)}; there are {', '.join(known)}"
        )


def check_number(name: str, value: Any, *, whole: bool = False, optional: bool = False) -> None:
    """Checks that a number is above 0, and finite.

    Raises:
        BatchArgumentError: It is not.
    """
    kinds = int if whole else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not (optional and value is None) and not (is_number and 0 < value < inf):
        raise BatchArgumentError(f"{name}={value!r}: give a {'whole ' * whole}number above 0")


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

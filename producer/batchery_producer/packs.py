"""Packs: many items in one message, and one result for each of them."""

import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchery import errors
from batchery.errors import BatchArgumentError, ItemFailed, WrongLength
from batchery.packed import HEADER, MAX_ITEMS, VERSION
from batchery_producer.answer import Answer, exception_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item.

    Attributes:
        index: Of the item, from 0.
        value: What it became; None if it failed.
        error: Why it failed; None if it succeeded.
    """

    index: int
    value: Any = None
    error: Exception | None = None


def check_per_job(per_job: int | None) -> int:
    """Items in one message; 0 for messages that are not packed.

    Raises:
        BatchArgumentError: It is no number of items.
    """
    if per_job is None:
        return 0
    if isinstance(per_job, bool) or not isinstance(per_job, int) or not 1 <= per_job <= MAX_ITEMS:
        raise BatchArgumentError(f"per_job is {per_job!r}; expected 1 to {MAX_ITEMS} items")
    return per_job


def header_of(count: int, reply: Any) -> dict[str, Any]:
    """Headers of a message that carries so many items.

    Args:
        count: 0 for a message that is not packed.
        reply: Headers that the collector asks for.
    """
    own = {"n": count} if count else {}
    known = reply.get(HEADER, {})
    return {HEADER: {"v": VERSION, **known, **own}} if own or known else {}


def outcomes_of(answer: Answer, indexes: range, is_packed: bool, backend: Any) -> list[Outcome]:
    """The outcomes of the items of one message.

    Args:
        answer: How its job ended.
        indexes: Of its items.
        is_packed: Whether it carried a list of them.
        backend: Celery's; it knows how exceptions are stored.
    """
    if answer.error is not None:
        error = exception_of(answer, backend)
        return [Outcome(index, error=error) for index in indexes]
    if not is_packed:
        return [Outcome(indexes.start, answer.value)]
    return list(_unpack(answer.value, indexes))


def joined(answer: Answer, count: int) -> Answer:
    """The answer of a job whose items stand and fall together: all values, or the first error.

    Args:
        answer: Of the job.
        count: How many items it carried.
    """
    if answer.error is not None:
        return answer
    outcomes = list(_unpack(answer.value, range(count)))
    for outcome in outcomes:
        if outcome.error is not None:
            text = f"item {outcome.index}: {outcome.error}" if count > 1 else str(outcome.error)
            return Answer(error=(type(outcome.error).__name__, text))
    return Answer(value=[outcome.value for outcome in outcomes])


def _unpack(entries: Any, indexes: range) -> Iterator[Outcome]:
    if not isinstance(entries, list) or len(entries) != len(indexes):
        wrong = WrongLength(
            f"a job of {len(indexes)} items has the result {entries!r:.80}:"
            " its task does not know packed jobs"
        )
        yield from (Outcome(index, error=wrong) for index in indexes)
        return
    for index, entry in zip(indexes, entries, strict=True):
        if isinstance(entry, dict) and "ok" in entry:
            yield Outcome(index, entry["ok"])
        else:
            yield Outcome(index, error=_error_of(entry))


def _error_of(entry: Any) -> Exception:
    """The exception of one item: ours or Python's own by its name, otherwise `ItemFailed`."""
    spelled = entry.get("error") if isinstance(entry, dict) else None
    if not isinstance(spelled, dict) or not {"type", "message"} <= set(spelled):
        return ItemFailed(f"its worker answered {entry!r:.80}, which is neither value nor error")
    kind, text = str(spelled["type"]), str(spelled["message"])
    known = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(text)
        except TypeError:
            pass  # It wants other arguments than one text.
    return ItemFailed(f"{kind}: {text}")

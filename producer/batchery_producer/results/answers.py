"""How a job ended, as its worker stored it."""

import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import states

from batchery import errors
from batchery.errors import BatchArgumentError, ItemFailed, WrongLength
from batchery.protocol.multi_item import HEADER, MAX_ITEMS, VERSION


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job ended.

    Attributes:
        value: What it returned; None if it failed.
        error: None if it succeeded, otherwise the name of the error's type and its text.
        stored: Of a failure, what is stored: an exception, or Celery's mapping for one.
        batch_size: How many items shared its batch; 0 if nobody has said so.
    """

    value: Any = None
    error: tuple[str, str] | None = None
    stored: Any = field(default=None, compare=False)
    batch_size: int = field(default=0, compare=False)


def answer_of(status: str | None, result: Any, batch: Any = None) -> Answer | None:
    """Reads a stored result.

    Args:
        status: Celery's name of the state.
        result: The value; of a failure the exception, or the mapping that is stored for one.
        batch: What is stored about the batch, if anything.

    Returns:
        None while the job has not ended.
    """
    size = batch.get("size", 0) if isinstance(batch, Mapping) else 0
    size = size if isinstance(size, int) else 0
    if status == states.SUCCESS:
        return Answer(value=result, batch_size=size)
    if status in states.EXCEPTION_STATES and status in states.READY_STATES:
        return Answer(error=describe(result), stored=result, batch_size=size)
    return None


def describe(error: Any) -> tuple[str, str]:
    """Name and text of an error, as the worker stored it.

    The stored form is read as it is, so that no exception class need be importable here.
    """
    if not isinstance(error, Mapping):
        return type(error).__name__, str(error)
    arguments = error.get("exc_message", "")
    if isinstance(arguments, list | tuple):
        arguments = ", ".join(map(str, arguments))
    return str(error.get("exc_type", "Exception")), str(arguments)


def exception_of(answer: Answer, backend: Any) -> Exception:
    """The exception of a job that failed, as `AsyncResult.get` would raise it.

    Args:
        answer: Of a job that failed.
        backend: Celery's; it knows how exceptions are stored.
    """
    stored = answer.stored
    known = stored if isinstance(stored, Exception) else backend.exception_to_python(stored)
    if isinstance(known, Exception):
        return known
    kind, text = answer.error or ("Exception", "")
    return Exception(f"{kind}: {text}")


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

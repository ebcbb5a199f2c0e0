"""How a job ended, as its worker stored it."""

import builtins
import sys
from array import array
from binascii import a2b_base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery import states

from batchery import errors
from batchery.errors import BatchArgumentError, ItemFailed, WrongLength
from batchery.protocol.headers import HEADER, MAX_ITEMS, VERSION


class BatchSummary(NamedTuple):
    """The batch in which a job ran, as its worker stored it.

    Attributes:
        id: Its name; each worker counts its own.
        size: Number of its items.
        forward_ms: Time of the computation.
        device: Name of the device, as torch spells it.
    """

    id: str
    size: int
    forward_ms: float
    device: str


def read_batch(stored: Any) -> BatchSummary | None:
    """Reads the stored facts of a batch; None if there are none, or of another form."""
    if not isinstance(stored, Mapping):
        return None
    try:
        return BatchSummary(
            str(stored["id"]),
            int(stored["size"]),
            float(stored["forward_ms"]),
            str(stored["device"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job ended.

    Attributes:
        value: Return value of the job; None if it failed.
        error: Name of the error's type, and its text; None if the job succeeded.
        stored: The stored form of a failure: an exception, or Celery's mapping for one.
        batch: The job's batch; None if unknown.
        is_packed: Whether vectors of the value are float32 in base64, as its worker sent them.
    """

    value: Any = None
    error: tuple[str, str] | None = None
    stored: Any = field(default=None, compare=False)
    batch: BatchSummary | None = field(default=None, compare=False)
    is_packed: bool = False


def read_answer(
    status: str | None, result: Any, batch: Any = None, *, is_packed: bool = False
) -> Answer | None:
    """Reads a stored result.

    Args:
        status: Celery's name of the state.
        result: The value; for a failure the exception, or the mapping that is stored for one.
        batch: Stored facts of the batch, if any.
        is_packed: Whether it says that vectors are packed.

    Returns:
        None while the job has not ended.
    """
    if status == states.SUCCESS:
        return Answer(value=result, batch=read_batch(batch), is_packed=is_packed)
    if status in states.EXCEPTION_STATES and status in states.READY_STATES:
        return Answer(error=describe(result), stored=result, batch=read_batch(batch))
    return None


def unpack_list(vector: str) -> list[float]:
    """The numbers of a packed vector.

    Raises:
        ValueError: It is no base64 of whole float32 numbers.
    """
    numbers = array("f", a2b_base64(vector))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def unpack(answer: Answer, read: Callable[[str], Any] = unpack_list) -> Answer:
    """An answer with its vectors unpacked; an error if one of them cannot be read.

    Args:
        answer: Its value is changed.
        read: Makes of a packed vector what the value has in its place.
    """
    if not answer.is_packed:
        return answer
    value = answer.value
    try:
        for entry in value if isinstance(value, list) else [value]:
            result = entry.get("ok", entry)
            if "vector" in result:
                result["vector"] = read(result["vector"])
    except (AttributeError, TypeError, ValueError) as error:
        return Answer(error=(type(error).__name__, f"a vector that cannot be read: {error}"))
    return Answer(value, batch=answer.batch)


def describe(error: Any) -> tuple[str, str]:
    """Name and text of an error, as the worker stored it.

    This reads the stored form, so that no exception class needs to be importable here.
    """
    if not isinstance(error, Mapping):
        return type(error).__name__, str(error)
    arguments = error.get("exc_message", "")
    if isinstance(arguments, list | tuple):
        arguments = ", ".join(map(str, arguments))
    return str(error.get("exc_type", "Exception")), str(arguments)


def build_exception(answer: Answer, backend: Any) -> Exception:
    """The exception of a job that failed, as `AsyncResult.get` would raise it."""
    known = answer.stored
    if not isinstance(known, Exception):
        # Celery raises where the stored name is that of something else, or of nothing.
        with suppress(Exception):
            known = backend.exception_to_python(known)
    if isinstance(known, Exception):
        return known
    kind, text = answer.error or ("Exception", "")
    return Exception(f"{kind}: {text}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result or error of one item.

    Attributes:
        index: Index of the item, from 0.
        value: Result of the item; None if it failed.
        error: Why the item failed; None if it succeeded.
        batch: The batch in which its job ran; None if unknown.
    """

    index: int
    value: Any = None
    error: Exception | None = None
    batch: BatchSummary | None = field(default=None, compare=False)


def check_per_job(per_job: int | None) -> int:
    """Number of items in one message; 0 for messages whose argument is one item.

    Raises:
        BatchArgumentError: `per_job` is not a valid number of items.
    """
    if per_job is None:
        return 0
    if isinstance(per_job, bool) or not isinstance(per_job, int) or not 1 <= per_job <= MAX_ITEMS:
        raise BatchArgumentError(f"per_job is {per_job!r}; expected 1 to {MAX_ITEMS} items")
    return per_job


def build_header(count: int, reply: Any, keep_s: int | None = None) -> dict[str, Any]:
    """Headers of a job with so many items.

    Args:
        count: Number of items in the list; 0 if the argument is one item.
        reply: Headers that the collector asks for.
        keep_s: How long its result is of use to anybody, in seconds; None for ever.
    """
    own = {"n": count} if count else {}
    if keep_s is not None:
        own["keep_s"] = keep_s
    known = reply.get(HEADER, {})
    return {HEADER: {"v": VERSION, **known, **own}} if own or known else {}


def read_outcomes(
    answer: Answer,
    indexes: range,
    is_multi_item: bool,
    backend: Any,
    *,
    keeps_base64: bool = False,
) -> list[Outcome]:
    """Outcomes of the items of one job.

    Args:
        answer: Answer of the job.
        indexes: Indexes of its items among those of the caller.
        is_multi_item: Whether its argument was a list of items.
        backend: Celery's backend, which can restore exceptions.
        keeps_base64: Whether packed vectors stay as they are.
    """
    if not keeps_base64:
        answer = unpack(answer)
    if answer.error is not None:
        error = build_exception(answer, backend)
        return [Outcome(index, error=error, batch=answer.batch) for index in indexes]
    if not is_multi_item:
        return [Outcome(indexes.start, answer.value, batch=answer.batch)]
    return list(_each_outcome(answer.value, indexes, answer.batch))


def _each_outcome(
    entries: Any, indexes: range, batch: BatchSummary | None = None
) -> Iterator[Outcome]:
    if not isinstance(entries, list) or len(entries) != len(indexes):
        wrong = WrongLength(
            f"a job of {len(indexes)} items has the result {entries!r:.80}:"
            " its task does not know multi-item jobs"
        )
        yield from (Outcome(index, error=wrong, batch=batch) for index in indexes)
        return
    for index, entry in zip(indexes, entries, strict=True):
        if isinstance(entry, dict) and "ok" in entry:
            yield Outcome(index, entry["ok"], batch=batch)
        else:
            yield Outcome(index, error=_build_error(entry), batch=batch)


def _build_error(entry: Any) -> Exception:
    """The exception of one item: ours or Python's of that name, otherwise `ItemFailed`."""
    stored = entry.get("error") if isinstance(entry, dict) else None
    if not isinstance(stored, dict) or not {"type", "message"} <= set(stored):
        return ItemFailed(f"its worker answered {entry!r:.80}: neither a value nor an error")
    kind, text = str(stored["type"]), str(stored["message"])
    known = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(text)
        except TypeError:
            pass  # Its constructor needs other arguments than one text.
    return ItemFailed(f"{kind}: {text}")

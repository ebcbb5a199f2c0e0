"""How a job ended, as its worker stored it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import states


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

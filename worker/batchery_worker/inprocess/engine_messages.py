"""What an engine and its device process say to each other, all of it pickled.

The first frame is an `EngineSetup`; the process answers with a `Loaded` or a `NotLoaded`. Then each
batch is one frame, a `SentBatch`, and each answer is one, a `BatchReply` or a `NotRead`.
"""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchery.errors import ItemFailed, ModelLoadError, UnserialisableResult
from batchery.outcomes import Failed
from batchery_worker.inprocess.local_device import BatchAnswer


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The first message to the process.

    Attributes:
        name: Name of the model in errors.
        sys_path: Where modules are found.
        log_levels: Level of each logger of the parent that has one; the root's name is empty.
        model: A pickled `EngineModel`, which may take the modules of `sys_path`.
    """

    name: str
    sys_path: Sequence[str]
    log_levels: Mapping[str, int]
    model: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is loaded and warmed up."""

    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The model cannot be loaded; the process ends after this message."""

    error: Exception


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch on its way to the process; `number` counts the batches of the engine.

    Attributes:
        content: Items and keywords, pickled by themselves: their classes may be unknown there.
    """

    number: int
    content: bytes


@dataclass(frozen=True, slots=True)
class BatchReply:
    """What became of the batch of that number."""

    number: int
    answer: BatchAnswer
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NotRead:
    """The batch of that number cannot be unpickled in the process."""

    number: int
    error: Exception


def dump(message: Any) -> bytes:
    """Pickles a message."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def load(frame: bytes) -> Any:
    """Reads what `dump` wrote."""
    return pickle.loads(frame)


def dump_reply(reply: BatchReply) -> bytes:
    """Pickles an answer; outcomes that cannot be pickled become failures that say so."""
    outcomes = [
        _sendable_failure(each) if isinstance(each, Failed) else each
        for each in reply.answer.outcomes
    ]
    try:
        return dump(replace(reply, answer=replace(reply.answer, outcomes=outcomes)))
    except Exception:  # noqa: BLE001 - whatever the values' own code raises
        outcomes = [_sendable(each) for each in outcomes]
        return dump(replace(reply, answer=replace(reply.answer, outcomes=outcomes)))


def sendable_error(name: str, error: Exception) -> Exception:
    """An error of the start that the parent can read."""
    if _why_stuck(error) is None:
        return error
    return ModelLoadError(f"{name}: {type(error).__name__}: {error}")


def _sendable_failure(failed: Failed) -> Failed:
    if _why_stuck(failed) is None:
        return failed
    error = failed.exception
    return replace(failed, error=ItemFailed(f"{type(error).__name__}: {error}"))


def _sendable(outcome: Any) -> Any:
    if (error := _why_stuck(outcome)) is None:
        return outcome
    text = f"the result is a {type(outcome).__name__} that cannot be pickled ({error})"
    return Failed(UnserialisableResult(text))


def _why_stuck(value: Any) -> Exception | None:
    """What a value raises on its way: some exceptions can be pickled, and not read."""
    try:
        load(dump(value))
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return None

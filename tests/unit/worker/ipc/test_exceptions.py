"""Exceptions from a device are those that the function raised, as far as hooks can tell."""

import json
import marshal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from celery import Celery
from pydantic import TypeAdapter, ValidationError

from batchery.outcomes import Failed
from batchery.tracebacks import collect_frames
from batchery_worker.ipc.exceptions import (
    MAX_ATTRIBUTE_BYTES,
    encode_chain,
    encode_exception,
    read_chain,
    read_exception,
)

BACKEND: Any = Celery("nobody", backend="cache+memory://", set_as_current=False).backend


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        self.status = status
        super().__init__(f"{status}: {body}")


class Coded(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code, "coded")


class Soft(Exception):
    status = 0

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


def travelled(error: BaseException) -> Exception:
    spelled: Any = encode_exception(error, BACKEND)
    return read_exception(marshal.loads(marshal.dumps(spelled)), BACKEND)


def travelled_with_causes(failed: Failed) -> Exception:
    spelled = marshal.loads(marshal.dumps(encode_chain(failed, BACKEND)))
    return read_chain(spelled, failed.traceback, BACKEND)


def json_error() -> Exception:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        ApiError(503, "down"),
        Coded(code=3),
        Soft("down", 503),
        json_error(),
        KeyError("a"),
        OSError(2, "no such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"),
        ValueError(),
    ],
    ids=repr,
)
def test_class_arguments_and_attributes_are_the_same(error: Exception) -> None:
    found = travelled(error)
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    # Celery stores the same of both.
    assert BACKEND.prepare_exception(found, "json") == BACKEND.prepare_exception(error, "json")


def test_class_that_a_function_defines_is_below_what_it_was_below() -> None:
    class Temporary(ApiError):
        pass

    found = travelled(Temporary(503, "down"))
    assert isinstance(found, ApiError)
    assert type(found).__name__.endswith("Temporary")
    assert (found.status, str(found)) == (503, "503: down")


def test_class_that_cannot_be_made_is_below_the_nearest_that_can() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(int).validate_python("a")
    found = travelled(caught.value)
    assert isinstance(found, ValueError)
    assert type(found).__name__ == "ValidationError"
    group = travelled(ExceptionGroup("two", [ValueError("one")]))
    assert type(group).__name__ == "ExceptionGroup"


def test_notes_and_plain_attributes_travel_and_nothing_else() -> None:
    error = Soft("down")
    error.add_note("once more")
    info: Any = error
    info.retry_after, info.response = {"s": 7}, object()
    info.body = "x" * (MAX_ATTRIBUTE_BYTES + 1)
    info.loop = []
    info.loop.append(info.loop)
    assert vars(travelled(error)) == {
        "status": 0,
        "retry_after": {"s": 7},
        "__notes__": ["once more"],
    }


def test_no_module_is_imported_for_a_class() -> None:
    content, kinds, attributes = encode_exception(Soft("down"), BACKEND)
    stored = {**json.loads(content), "exc_module": "antigravity"}
    spelled = json.dumps(stored), [("antigravity", "Soft"), *kinds[1:]], attributes
    found = read_exception(spelled, BACKEND)
    assert (type(found).__module__, type(found).__name__) == ("antigravity", "Soft")
    assert str(found) == "down"


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Immutable(Exception):
    def __init__(self, *, text: str) -> None:
        super().__init__(text)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("immutable")


@pytest.mark.parametrize("make", [partial(Frozen, 3), partial(Immutable, text="down")])
def test_exceptions_that_refuse_attributes_have_their_class_and_cause(
    make: Callable[[], Exception],
) -> None:
    error = make()
    with pytest.raises(type(error)) as caught:
        raise error from LookupError("gone")
    found = travelled_with_causes(Failed(caught.value))
    assert (type(found), found.args) == (type(error), error.args)
    assert repr(found.__cause__) == "LookupError('gone')"
    told = travelled_with_causes(Failed(make(), "as text"))
    assert str(told.__cause__) == "as text"


def test_where_it_was_raised_travels_as_its_traceback_or_as_frames() -> None:
    raised = json_error()
    frames = collect_frames(raised)
    assert frames
    assert collect_frames(travelled_with_causes(Failed(raised))) == frames
    told = Failed(ValueError("without a traceback"), frames=frames)
    assert collect_frames(travelled_with_causes(told)) == frames

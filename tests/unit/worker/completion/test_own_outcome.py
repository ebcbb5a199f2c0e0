"""The outcome of one job alone: its exception is the function's, and shows where it was raised."""

import traceback
from dataclasses import dataclass
from typing import Any

import pytest

from batchery import Failed, ItemFailed, RetryAfter
from batchery.execution.bisect_failures import isolate
from batchery.tracebacks import collect_frames
from batchery_worker.completion.tracer import own_outcome
from batchery_worker.plain_values import Encoded


class Unlucky(Exception):
    """An exception that cannot be made from its own arguments."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.reason = reason


class Mute(Exception):
    def __str__(self) -> str:
        raise OSError("no words")

    __repr__ = __str__


class Argless(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise OSError("no args")


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


@pytest.mark.parametrize(
    "error",
    [
        Unlucky(4, reason="made up"),
        ValueError(object(), lambda: None, {1, 2}),
        Mute("unspeakable"),
        Frozen(3),
        OSError(2, "no such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError("one")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_class_and_attributes_are_the_function_s(error: Exception) -> None:
    found = own_outcome(Failed(error, "somewhere")).exception
    assert type(found) is type(error)
    assert vars(found) == vars(error)
    assert str(found.__cause__) == "somewhere"


def test_exception_without_arguments_is_its_text() -> None:
    found = own_outcome(Failed(Argless("as told"))).exception
    assert (type(found), str(found)) == (ItemFailed, "Argless: as told")


def test_one_exception_of_many_jobs_is_another_one_for_each() -> None:
    shared = Failed(ValueError("all of them"))
    first, second = (own_outcome(shared).exception for _ in range(2))
    with pytest.raises(ValueError, match="all of them"):
        raise first
    assert second.__traceback__ is None
    retry = RetryAfter(1, ConnectionError("later"))
    assert own_outcome(retry).error is not retry.error
    assert isinstance(own_outcome(retry).error, ConnectionError)


def test_failure_has_the_frames_of_its_function_and_of_what_it_came_from() -> None:
    def inner() -> None:
        raise KeyError("inner")

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            raise LookupError("outer") from error

    (outcome,) = isolate(lambda _: outer(), [1], name="broken")
    error = own_outcome(outcome).exception
    assert functions(error)[-1] == "outer"
    assert isinstance(error.__cause__, KeyError)
    assert functions(error.__cause__) == ["outer", "inner"]
    # They hold nothing of what ran.
    trace = error.__cause__.__traceback__
    assert trace is not None
    assert not trace.tb_frame.f_locals


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_failure_that_was_not_raised_has_no_cause() -> None:
    error = own_outcome(Failed("just so")).exception
    assert (type(error), str(error), error.__cause__) == (ItemFailed, "just so", None)
    told = Failed(ValueError("without a traceback"), frames=collect_frames(raised()))
    assert collect_frames(own_outcome(told).exception) == told.frames


def raised() -> Exception:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    return caught.value


@pytest.mark.parametrize("trace", [None, object(), ["lines"]])
def test_a_traceback_that_is_no_text_does_not_end_the_device(trace: Any) -> None:
    assert isinstance(own_outcome(Failed(ValueError("x"), trace)).exception, ValueError)


def test_encoded_values_are_decoded() -> None:
    assert own_outcome(Encoded(b'{"a":[1]}')) == {"a": [1]}

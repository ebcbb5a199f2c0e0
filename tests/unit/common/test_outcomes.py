"""What a batch function may answer."""

from typing import Any

import pytest

import batchery
from batchery import BatchArgumentError, Failed, InvalidItem, ItemFailed, RetryAfter
from batchery.errors import BatcheryError


@pytest.mark.parametrize("make", [Failed, lambda error: RetryAfter(1, error)])
def test_the_exception_of_an_outcome_is_what_raise_would_make_of_it(make: Any) -> None:
    assert (str(make("blurred").exception), type(make("").exception)) == ("blurred", ItemFailed)
    error = LookupError("gone")
    assert make(error).exception is error
    assert type(make(LookupError).exception) is LookupError
    assert RetryAfter(1).exception is None


@pytest.mark.parametrize("error", [None, 7, b"bytes", ["a list"], Failed("twice"), int])
def test_failure_without_an_exception_or_a_text_is_refused(error: Any) -> None:
    with pytest.raises(TypeError, match=r"Failed\(error=.*give an exception or a text"):
        Failed(error)


@pytest.mark.parametrize("error", [7, b"bytes", KeyboardInterrupt(), KeyboardInterrupt])
def test_retry_for_no_exception_is_refused(error: Any) -> None:
    with pytest.raises(TypeError, match=r"RetryAfter\(error=.*give an exception or a text"):
        RetryAfter(1, error)


@pytest.mark.parametrize("seconds", [0, 0.5, 3600])
def test_a_retry_takes_any_time_from_now_on(seconds: float) -> None:
    assert RetryAfter(seconds).seconds == seconds


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan"), float("inf")])
def test_a_retry_in_the_past_or_never_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be 0 or more"):
        RetryAfter(seconds)


def test_outcomes_are_immutable() -> None:
    outcome: Any
    for outcome, name in ((Failed("x"), "error"), (RetryAfter(1), "seconds")):
        with pytest.raises(AttributeError):
            setattr(outcome, name, 2)


def errors(root: type[BatcheryError] = BatcheryError) -> list[type[BatcheryError]]:
    return [root, *(each for child in root.__subclasses__() for each in errors(child))]


@pytest.mark.parametrize(
    "error", [each for each in errors() if each.__module__ == "batchery.errors"]
)
def test_every_error_is_made_from_one_text_alone(error: type[BatcheryError]) -> None:
    assert str(error("what to do")) == "what to do"
    assert error("what to do").args == ("what to do",)


def test_errors_are_also_python_s_own_kinds() -> None:
    assert issubclass(BatchArgumentError, TypeError)
    assert issubclass(InvalidItem, ValueError)
    assert batchery.StartError.exit_code == 2

"""What a batch function may answer."""

from typing import Any

import pytest

import batchery
from batchery import BatchArgumentError, Failed, InvalidItem, ItemFailed, RetryAfter
from batchery.errors import BatcheryError


def test_text_of_failed_becomes_item_failed() -> None:
    error = Failed("too blurred").exception
    assert isinstance(error, ItemFailed)
    assert str(error) == "too blurred"


def test_exception_of_failed_is_kept() -> None:
    error = LookupError("gone")
    assert Failed(error).exception is error


def test_class_of_exceptions_is_made_an_instance_as_raise_does() -> None:
    made: Any = Failed(LookupError)  # type: ignore[arg-type]
    assert type(made.exception) is LookupError
    again: Any = RetryAfter(1, LookupError)  # type: ignore[arg-type]
    assert type(again.exception) is LookupError


@pytest.mark.parametrize("error", [None, 7, b"bytes", ["a list"], Failed("twice"), int])
def test_failure_without_an_exception_or_a_text_is_refused(error: Any) -> None:
    with pytest.raises(TypeError, match=r"Failed\(error=.*give an exception or a text"):
        Failed(error)


def test_text_of_a_retry_becomes_item_failed() -> None:
    error = RetryAfter(1, "rate limited").exception
    assert isinstance(error, ItemFailed)
    assert str(error) == "rate limited"
    assert RetryAfter(1).exception is None


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

"""What parent and device say to each other, and what can never be said."""

import enum
import marshal
import re
import traceback
import types
import uuid
from collections import OrderedDict
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from celery import Celery, chord, group
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils import json

from batchery import Failed, Ignore, ItemFailed, Reject, Replace, RetryAfter
from batchery.errors import UnserialisableResult
from batchery.execution.bisect_failures import isolate
from batchery.transport.leases import Deaths
from batchery_worker.ipc.messages import (
    Handed,
    NotReady,
    Ready,
    Reply,
    Setup,
    decode_outcome,
    dump_message,
    dump_reply,
    encode_outcome,
    load_message,
    load_reply,
)

app = Celery("wire", broker="memory://", backend="cache+memory://", set_as_current=False)
backend = app.backend

Plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class Unlucky(Exception):
    """An exception that cannot be made from its own arguments."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.reason = reason


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Argless(Exception):
    @property
    def args(self) -> Any:  # type: ignore[override]
        raise OSError("no args")


class Colour(enum.StrEnum):
    RED = "red"


def trip(outcome: Any) -> Any:
    """There and back."""
    return decode_outcome(encode_outcome(outcome, backend), backend)


@given(value=Plain)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    assert trip(value) == value


@given(vector=st.lists(st.floats(), max_size=30))
def test_floats_arrive_to_the_last_bit(vector: list[float]) -> None:
    assert np.array(trip(vector)).tobytes() == np.array(vector).tobytes()


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        date(2026, 1, 2),
        Decimal("1.10"),
        uuid.UUID(int=7),
        b"\x00\xff",
        {"nested": [{"at": datetime(2026, 1, 2, tzinfo=UTC), "price": Decimal("0.1")}]},
    ],
)
def test_values_of_celery_s_json_arrive(value: Any) -> None:
    assert trip(value) == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (OrderedDict(a=1), {"a": 1}),
        ({1: "one", None: "none"}, {"1": "one", "null": "none"}),
        (Colour.RED, "red"),
        ({"score": np.float64(0.5)}, {"score": 0.5}),
        ([2**70], [2**70]),
    ],
)
def test_value_arrives_as_json_would_read_it(value: Any, expected: Any) -> None:
    assert trip(value) == expected


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (1j, "complex"),
        (..., "ellipsis"),
        (StopIteration, "type"),
        ({(1, 2): "tuple as key"}, "tuple"),
        ({"score": np.float32(0.5)}, "float32"),
        ([{"count": np.int64(3)}], "int64"),
        ({"flag": np.bool_(True)}, "bool"),
        ([[np.zeros(2)]], "ndarray"),
        (bytearray(b"buffer"), "bytearray"),
        (memoryview(b"buffer"), "memoryview"),
        ([10**5000], "list"),
    ],
)
def test_value_that_cannot_be_written_fails_and_names_its_type(value: Any, name: str) -> None:
    outcome = trip(value)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.exception, UnserialisableResult)
    assert name in str(outcome.exception)


def test_code_cannot_be_smuggled_through_marshal() -> None:
    code = compile("1", "here", "eval")
    assert isinstance(marshal.loads(marshal.dumps(code)), types.CodeType)
    for value in (code, [code], {"code": code}, ({"deep": [code]},)):
        outcome = trip(value)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.exception, UnserialisableResult)


def test_recursive_and_too_deep_values_fail() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep):
        outcome = trip(value)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.exception, UnserialisableResult)
    while deep:  # or the interpreter would recurse to free it
        deep = deep.pop()


def test_failure_that_was_not_raised_has_no_cause() -> None:
    outcome = trip(Failed("just so"))
    assert isinstance(outcome.exception, ItemFailed)
    assert str(outcome.exception) == "just so"
    assert outcome.exception.__cause__ is None


@pytest.mark.parametrize(
    "error",
    [
        Unlucky(4, reason="made up"),
        ValueError(object(), lambda: None, {1, 2}),
        type("Local", (Exception,), {"__module__": "no.such.module"})("gone"),
        Mute("unspeakable"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        Exception(),
        ExceptionGroup("several", [ValueError("one")]),
    ],
)
def test_awkward_exceptions_still_arrive_as_failures(error: Exception) -> None:
    outcome = trip(Failed(error, "somewhere"))
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.exception, Exception)


def test_retry_arrives_with_seconds_and_error() -> None:
    outcome = trip(RetryAfter(1.5, ConnectionError("later")))
    assert outcome.seconds == 1.5
    assert isinstance(outcome.error, ConnectionError)
    assert trip(RetryAfter(0)) == RetryAfter(0)
    assert trip(RetryAfter(float(np.float32(2)))) == RetryAfter(2)


@pytest.mark.parametrize("seconds", [np.float32(2), Decimal(2), True * 2])
def test_retry_arrives_with_any_kind_of_number(seconds: Any) -> None:
    assert trip(RetryAfter(seconds)).seconds == 2.0


@pytest.mark.parametrize("traceback", [None, object(), ["lines"]])
def test_a_traceback_that_is_no_text_does_not_end_the_device(traceback: Any) -> None:
    assert isinstance(trip(Failed(ValueError("x"), traceback)).exception, ValueError)


def test_a_replacement_arrives_with_all_its_parts() -> None:
    first = app.signature("first", args=(datetime(2026, 1, 2, tzinfo=UTC),), queue="q")
    other = app.signature("other")
    for signature in (first, first | other, group(first, other), chord([first, other], other)):
        arrived = trip(Replace(signature))
        assert isinstance(arrived, Replace)
        assert type(arrived.signature) is type(signature)
        assert arrived.signature.app is app
        assert json.loads(json.dumps(arrived.signature)) == json.loads(json.dumps(signature))


def test_a_replacement_that_cannot_be_written_fails() -> None:
    outcome = trip(Replace(app.signature("other", args=(object(),))))
    assert isinstance(outcome.exception, UnserialisableResult)
    assert "Replace(other(" in str(outcome.exception)


def test_ignore_and_reject_arrive() -> None:
    assert isinstance(trip(Ignore("quietly")), Ignore)
    for requeue in (False, True):
        outcome = trip(Reject("not here", requeue=requeue))
        assert (type(outcome), outcome.args) == (Reject, ("not here", requeue))
    assert trip(Reject()).reason is None


@pytest.mark.parametrize(
    "reply",
    [
        Ready(pid=7, load_s=0.5),
        NotReady("ModelLoadError", "not there"),
    ],
)
def test_replies_arrive(reply: Reply) -> None:
    assert load_reply(dump_reply(reply)) == reply


def test_messages_to_a_device_arrive() -> None:
    setup = Setup("cpu", ("/lib",), "shop:app", ["shop"], ["embed"], {"": 20})
    raw = {"body": b"\x00", "headers": {"at": datetime(2026, 1, 2, tzinfo=UTC)}}
    handed = Handed("1", raw, Deaths(1), None)
    assert load_message(dump_message(setup)) == setup
    assert load_message(dump_message(handed)) == handed


def test_failure_comes_with_its_frames_and_what_it_came_from() -> None:
    def inner() -> None:
        raise KeyError("inner")

    def outer() -> None:
        try:
            inner()
        except KeyError as error:
            raise LookupError("outer") from error

    (outcome,) = isolate(lambda _: outer(), [1], name="broken")
    spelled = marshal.loads(marshal.dumps(encode_outcome(outcome, backend)))
    error = decode_outcome(spelled, backend).error
    assert functions(error)[-1] == "outer"
    assert isinstance(error.__cause__, KeyError)
    assert functions(error.__cause__) == ["outer", "inner"]


@pytest.mark.parametrize(
    ("outcome", "kind", "says"),
    [
        (Failed(Argless("as told")), ItemFailed, "Argless: as told"),
        (RetryAfter(1, Argless("as told")), UnserialisableResult, "RetryAfter.*no args"),
        (Reject(Mute()), UnserialisableResult, "Reject.*no words"),
    ],
    ids=["Failed", "RetryAfter", "Reject"],
)
def test_outcome_whose_own_code_raises_is_a_failure_that_says_so(
    outcome: Any, kind: type[Exception], says: str
) -> None:
    found = trip(outcome)
    assert isinstance(found, Failed)
    assert type(found.error) is kind
    assert re.search(says, str(found.error))


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]

"""How a job ended, as it was stored, and the outcomes of its items."""

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from batchery import BatchArgumentError, InvalidItem, ItemFailed, WrongLength
from batchery.protocol.headers import read_items
from batchery_producer.answers import (
    Answer,
    Outcome,
    build_header,
    check_per_job,
    describe,
    read_answer,
    read_outcomes,
)

BACKEND: Any = Celery("packs", backend="cache+memory://", set_as_current=False).backend


def test_single_item_job_has_one_outcome() -> None:
    assert read_outcomes(Answer("x"), range(7, 8), False, BACKEND) == [Outcome(7, "x")]


def test_items_of_a_multi_item_job_have_their_own_outcomes() -> None:
    entries = [{"ok": None}, {"error": {"type": "InvalidItem", "message": "too long"}}]
    good, bad = read_outcomes(Answer(entries), range(4, 6), True, BACKEND)
    assert good == Outcome(4, None)
    assert (bad.index, repr(bad.error)) == (5, "InvalidItem('too long')")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("InvalidItem", InvalidItem("why")),
        ("KeyError", KeyError("why")),
        ("OutOfStock", ItemFailed("OutOfStock: why")),
        ("UnicodeDecodeError", ItemFailed("UnicodeDecodeError: why")),
        ("KeyboardInterrupt", ItemFailed("KeyboardInterrupt: why")),
        ("print", ItemFailed("print: why")),
    ],
)
def test_item_error_becomes_the_exception_of_its_name_or_item_failed(
    kind: str, wanted: Exception
) -> None:
    entries = [{"error": {"type": kind, "message": "why"}}]
    (outcome,) = read_outcomes(Answer(entries), range(1), True, BACKEND)
    assert repr(outcome.error) == repr(wanted)


#: 0.1 and -2 as float32.
PACKED = "zczMPQAAAMA="
NUMBERS = [0.10000000149011612, -2.0]


def test_packed_vectors_become_lists_wherever_they_are() -> None:
    one = {"tokens": 1, "vector": PACKED}
    (outcome,) = read_outcomes(Answer(dict(one), is_packed=True), range(1), False, BACKEND)
    assert outcome.value == {"tokens": 1, "vector": NUMBERS}
    entries = [{"ok": dict(one)}, {"error": {"type": "InvalidItem", "message": "vector"}}]
    good, bad = read_outcomes(Answer(entries, is_packed=True), range(2), True, BACKEND)
    assert good.value == {"tokens": 1, "vector": NUMBERS}
    assert isinstance(bad.error, InvalidItem)


def test_strings_stay_where_nothing_says_that_they_are_packed_or_their_caller_keeps_them() -> None:
    value = {"vector": PACKED}
    (outcome,) = read_outcomes(Answer(value), range(1), False, BACKEND)
    assert outcome.value == value
    packed = Answer(value, is_packed=True)
    (outcome,) = read_outcomes(packed, range(1), False, BACKEND, keeps_base64=True)
    assert outcome.value == {"vector": PACKED}


@pytest.mark.parametrize(
    "value",
    [None, 7, "vector", [1], {"vector": None}, {"vector": "x"}, {"vector": "AAAA"}],
    ids=repr,
)
def test_a_vector_that_cannot_be_read_fails_its_job(value: Any) -> None:
    (outcome,) = read_outcomes(Answer(value, is_packed=True), range(1), False, BACKEND)
    assert "vector" in str(outcome.error)


@pytest.mark.parametrize("value", [[], [{"ok": 1}], None, 7, "ok", {"ok": 1}], ids=repr)
def test_multi_item_result_of_another_form_fails_each_item(value: Any) -> None:
    outcomes = read_outcomes(Answer(value), range(3), True, BACKEND)
    assert [type(each.error) for each in outcomes] == [WrongLength] * 3


@pytest.mark.parametrize("entry", [7, {}, {"error": "text"}, {"error": {}}, None], ids=repr)
def test_entry_in_another_form_fails_alone(entry: Any) -> None:
    good, bad = read_outcomes(Answer([{"ok": 1}, entry]), range(2), True, BACKEND)
    assert good.value == 1
    assert isinstance(bad.error, ItemFailed)


def test_multi_item_job_that_failed_fails_all_its_items() -> None:
    stored = {"exc_type": "KeyError", "exc_module": "builtins", "exc_message": ["x"]}
    answer = Answer(error=("KeyError", "x"), stored=stored)
    outcomes = read_outcomes(answer, range(2), True, BACKEND)
    assert [repr(each.error) for each in outcomes] == ["KeyError('x')"] * 2


def test_header_is_read_by_the_worker() -> None:
    reply = {"batchery": {"v": 1, "reply": "name"}}
    assert build_header(2, reply) == {"batchery": {"v": 1, "reply": "name", "n": 2}}
    assert build_header(0, reply) == reply
    assert build_header(0, {}) == {}
    assert read_items(["a", "b"], build_header(2, {})["batchery"]) == (["a", "b"], True)


def test_per_job_out_of_range_is_refused() -> None:
    assert [check_per_job(each) for each in (None, 1, 10_000)] == [0, 1, 10_000]
    for wrong in (0, -1, 10_001, 1.5, "3", True):
        with pytest.raises(BatchArgumentError, match="expected 1 to 10000"):
            check_per_job(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["PENDING", "STARTED", "RETRY", "RECEIVED", "PROGRESS", None])
def test_job_that_has_not_ended_has_no_answer(status: str | None) -> None:
    assert read_answer(status, {"exc_type": "ConnectionError"}) is None


def test_stored_failure_is_read_without_its_class() -> None:
    stored = {"exc_type": "OutOfStock", "exc_module": "nowhere", "exc_message": ["none left", 3]}
    assert read_answer("FAILURE", stored) == Answer(error=("OutOfStock", "none left, 3"))


def test_revoked_job_has_failed() -> None:
    answer = read_answer("REVOKED", TaskRevokedError("expired"))
    assert answer == Answer(error=("TaskRevokedError", "expired"))


def test_failure_in_any_stored_form_is_described() -> None:
    assert describe(None) == ("NoneType", "None")
    assert describe({"exc_type": "E", "exc_message": "text"}) == ("E", "text")
    assert describe({}) == ("Exception", "")


def test_failure_that_cannot_be_restored_says_its_type_and_text() -> None:
    answer = Answer(error=("OutOfStock", "none left"))
    (outcome,) = read_outcomes(answer, range(1), False, BACKEND)
    assert repr(outcome.error) == repr(Exception("OutOfStock: none left"))

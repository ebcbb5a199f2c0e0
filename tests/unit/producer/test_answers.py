import pytest
from celery.exceptions import TaskRevokedError

from batchery_producer.answers import Answer, describe, read_answer


@pytest.mark.parametrize("status", ["PENDING", "STARTED", "RETRY", "RECEIVED", "PROGRESS", None])
def test_job_that_has_not_ended_has_no_answer(status: str | None) -> None:
    assert read_answer(status, {"exc_type": "ConnectionError"}) is None


def test_answer_of_none_is_a_success() -> None:
    assert read_answer("SUCCESS", None) == Answer(value=None)


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

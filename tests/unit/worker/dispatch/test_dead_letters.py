"""Messages that cannot be executed: what becomes of them, and what their callers get."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery import Celery

from batchery.errors import InvalidItem
from batchery.retry import RetryDeadlineExceeded
from batchery.transport import dead_letters as transport
from batchery.transport.lease_store import LeaseStore
from batchery_worker.dispatch import dead_letters
from batchery_worker.dispatch.dead_letters import dead_letter_on_ack, fail_callers, store_failure
from batchery_worker.request import LeaseHandle
from support.fake_worker import FakeLeaseStore


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Celery:
    """An app with results in memory; failures are stored before `store_failure` returns."""
    monkeypatch.setattr(dead_letters._thread, "submit", lambda call, *args: call(*args))
    return Celery("dead", broker="memory://", backend="cache+memory://", set_as_current=False)


@pytest.fixture
def store() -> FakeLeaseStore:
    made = FakeLeaseStore()
    made.believed = {"7"}
    return made


def message(store: FakeLeaseStore | None, headers: Any) -> Any:
    return SimpleNamespace(
        channel=SimpleNamespace(lease_store=store), delivery_tag="7", headers=headers
    )


def test_leased_message_becomes_a_dead_letter_with_id_task_and_reason(
    store: FakeLeaseStore,
) -> None:
    assert dead_letter_on_ack(message(store, {"id": "j", "task": "embed"}), "too heavy")
    letter: Any = store.dead_letters["7"]
    assert (letter["id"], letter["task"], letter["reason"]) == ("j", "embed", "too heavy")


@pytest.mark.parametrize("headers", [None, "text", {"id": 7, "task": ["x"]}, {}])
def test_malformed_headers_leave_id_and_task_empty(store: FakeLeaseStore, headers: Any) -> None:
    assert dead_letter_on_ack(message(store, headers), "why")
    letter: Any = store.dead_letters["7"]
    assert (letter["id"], letter["task"]) == (None, None)


def test_message_of_another_transport_is_left_to_its_broker() -> None:
    assert not dead_letter_on_ack(message(None, {"id": "j"}), "why")


def test_message_whose_lease_is_lost_is_left_alone(store: FakeLeaseStore) -> None:
    store.believed.clear()
    assert not dead_letter_on_ack(message(store, {"id": "j"}), "why")
    assert store.dead_letters == {}


def test_stored_failure_is_what_the_caller_raises(app: Celery) -> None:
    store_failure(app, {"id": "j"}, InvalidItem("no such field"))
    with pytest.raises(InvalidItem, match="no such field"):
        app.AsyncResult("j").get(timeout=1)


def test_ignored_result_is_not_stored(app: Celery) -> None:
    store_failure(app, {"id": "ignored", "ignore_result": True}, InvalidItem("no"))
    assert app.AsyncResult("ignored").state == "PENDING"


def test_failure_is_stored_although_the_headers_are_of_no_use(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    store_failure(app, {"id": "useless", "chain": [7]}, InvalidItem("no"))
    assert app.AsyncResult("useless").state == "FAILURE"
    assert "its headers are of no use" in caplog.text


def test_error_of_the_backend_is_logged_and_raises_nothing(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(dead_letters, "_mark", broken)
    store_failure(app, {"id": "j"}, InvalidItem("no"))
    assert "the failure of j cannot be stored" in caplog.text


def test_message_is_acknowledged_when_its_failure_is_stored_and_not_before(
    app: Celery, store: FakeLeaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = LeaseHandle(cast("LeaseStore", store), "7")
    answers: list[Any] = [RetryDeadlineExceeded(30, "away"), None, OSError("disk full")]
    tries: list[list[str]] = []

    def mark(*_: Any) -> None:
        tries.append(list(store.acknowledged))
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(dead_letters, "_mark", mark)
    monkeypatch.setattr(dead_letters, "MAX_PAUSE_S", 0)
    store_failure(app, {"id": "j"}, InvalidItem("no"), lease)
    assert (tries, store.acknowledged) == ([[], []], ["7"])
    # What no further try changes ends it, too.
    store_failure(app, {"id": "j"}, InvalidItem("no"), lease)
    assert store.acknowledged == ["7", "7"]
    # Another worker has it now, and tells.
    store.believed.clear()
    store_failure(app, {"id": "j"}, InvalidItem("no"), lease)
    assert (answers, store.acknowledged) == ([], ["7", "7"])


def test_last_app_tells_the_callers(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "on_dead_letter", [])
    for each in (Celery("earlier", set_as_current=False), app):
        fail_callers(each)
    (tell,) = transport.on_dead_letter
    lease = FakeLeaseStore()
    lease.believed = {"7"}
    tell({"id": "told"}, "unreadable", cast("LeaseStore", lease), "7")
    assert lease.acknowledged == ["7"]
    with pytest.raises(InvalidItem, match="unreadable"):
        app.AsyncResult("told").get(timeout=1)

"""When the message of a job that fails is ended."""

from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from redis.exceptions import ReadOnlyError

from batchery import BatchTask
from batchery_worker.request import BatchRequest

app = Celery("requests", set_as_current=False)


@app.task(base=BatchTask, shared=False, name="work")
def work(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("acks_on_failure", [True, False])
def test_a_message_ends_behind_the_failure_of_its_job(
    monkeypatch: pytest.MonkeyPatch, is_away: bool, acks_on_failure: bool
) -> None:
    """Celery ends it first: a job whose failure found no Redis would be lost."""
    happened: list[str] = []

    def store(*_: Any, **__: Any) -> None:
        happened.append("stored")
        if is_away:
            raise ReadOnlyError("a replica")

    monkeypatch.setattr(app.tasks["work"], "backend", SimpleNamespace(mark_as_failure=store))
    monkeypatch.setattr(app.tasks["work"], "acks_on_failure_or_timeout", acks_on_failure)
    message = SimpleNamespace(
        headers={"id": "t1", "task": "work"},
        body=b'[["x"], {}, {}]',
        payload=(["x"], {}, {}),
        properties={},
        delivery_info={},
        content_type="application/json",
        content_encoding="utf-8",
        channel=None,
        delivery_tag="1",
    )
    request: Any = BatchRequest(
        message,
        app=app,
        task=app.tasks["work"],
        on_ack=lambda *_: happened.append("ended"),
        on_reject=lambda *_: happened.append("ended"),
        body=message.body,
        headers=message.headers,
        decoded=False,
    )
    try:
        raise ValueError("broken")
    except ValueError:
        info = ExceptionInfo()
    if is_away:
        with pytest.raises(ReadOnlyError):
            request.on_failure(info)
    else:
        request.on_failure(info)
    assert happened == (["stored"] if is_away else ["stored", "ended"])
    assert request.acknowledged is not is_away

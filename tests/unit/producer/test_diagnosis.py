"""Why results may not come, where the broker goes away meanwhile."""

import pytest
from celery import Celery

from batchery_producer import diagnosis


def test_a_broker_that_goes_away_between_two_questions_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(*_: object) -> str:
        raise ConnectionError("reset")

    monkeypatch.setattr(diagnosis, "ASK_S", 0.01)
    monkeypatch.setattr(diagnosis, "queue_depths", lambda _, queues: dict.fromkeys(queues, 3))
    monkeypatch.setattr(diagnosis, "_workers", ask)
    with Celery("stalled", broker="memory://", set_as_current=False) as app:
        said = diagnosis.explain_stall(app, "tasks.shout", {"queue": "loud"})
    assert said == "the broker cannot be asked about queue 'loud': reset"

"""Why results may not come."""

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


def test_a_queue_that_may_be_misspelt_is_named_beside_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Inspect:
        def active_queues(self) -> dict[str, list[dict[str, str]]]:
            return {"w@here": [{"name": "celery"}, {"name": "embed"}]}

    monkeypatch.setattr(diagnosis, "queue_depths", lambda _, queues: dict.fromkeys(queues, 3))
    with Celery("stalled", broker="memory://", set_as_current=False) as app:
        monkeypatch.setattr(app.control, "inspect", lambda **_: Inspect())
        said = diagnosis.explain_stall(app, "embed", {"queue": "embde"})
    assert "3 waiting in queue 'embde'; w@here answers, but consumes another queue" in said
    assert ", the nearest is embed: start a worker with `-Q embde`" in said

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from celery import Celery, states
from redis.exceptions import NoPermissionError

from batchery import RedisUnavailable
from batchery.retry import RetryPolicy
from batchery_producer.files.journal import Journal
from batchery_producer.run import file_run
from batchery_producer.run.file_run import InFlightRecovery

JOURNAL = Journal("0123456789abcdef", "embed", {}, ["in.txt"], [], 4)
IDS = [JOURNAL.task_id(0, line) for line in range(1, 21)]


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose broker and backend are in memory."""
    app = Celery("resume", broker="memory://", backend="cache+memory://", set_as_current=False)
    yield app
    backend: Any = app.backend
    backend.client.cache.clear()  # All apps of a process share it.


class Searches:
    """Counts searches for jobs in flight, and finds these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, in_flight: Sequence[str]) -> None:
        self.in_flight = in_flight
        self.count = 0
        monkeypatch.setattr(file_run, "_find_in_flight", self)

    def __call__(self, app: Celery, queue: str, pattern: "re.Pattern[bytes]") -> Sequence[str]:
        assert pattern == JOURNAL.pattern
        self.count += 1
        return self.in_flight


def recovery_of(app: Celery, max_in_flight: int = 4) -> InFlightRecovery:
    return InFlightRecovery(app, "embed", JOURNAL.pattern, max_in_flight, RetryPolicy(away_s=0))


def store(app: Celery, task_id: str, state: str = states.SUCCESS) -> None:
    backend: Any = app.backend
    backend.store_result(task_id, "value", state)


def test_job_in_flight_or_ended_is_not_missing(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = Searches(monkeypatch, [IDS[0]])
    store(app, IDS[1])
    store(app, IDS[2], states.STARTED)
    recovery = recovery_of(app)
    assert recovery.missing(IDS[:4]) == IDS[2:4]
    assert recovery.missing(IDS[:2]) == []
    assert searches.count == 1


def test_search_ends_when_as_many_jobs_are_missing_as_were_in_flight(app: Celery) -> None:
    store(app, IDS[6])
    recovery = recovery_of(app, max_in_flight=4)
    assert recovery.missing(IDS[:2]) == IDS[:2]
    assert recovery.missing(IDS[2:4]) == IDS[2:4]
    assert recovery.missing(IDS[4:8]) == IDS[4:8]  # Nothing is searched any more.


def test_search_goes_on_after_a_job_that_was_found(app: Celery) -> None:
    store(app, IDS[3])
    store(app, IDS[9])
    recovery = recovery_of(app, max_in_flight=4)
    assert recovery.missing(IDS[:3]) == IDS[:3]
    assert recovery.missing(IDS[3:6]) == IDS[4:6]
    assert recovery.missing(IDS[6:9]) == IDS[6:9]
    assert recovery.missing(IDS[9:12]) == IDS[10:12]


def test_user_who_may_not_read_messages_is_told_who_may(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NoPermissionError("this user has no permissions to run the 'lrange' command")

    monkeypatch.setattr(file_run, "_find_in_flight", refuse)
    with pytest.raises(RedisUnavailable, match=r"'lrange' command; use the user `operator` of"):
        recovery_of(app).missing(IDS[:2])


def test_queue_of_another_broker_than_redis_is_not_searched(app: Celery) -> None:
    assert list(file_run._find_in_flight(app, "embed", JOURNAL.pattern)) == []


class FakeRedis:
    """Redis's lists, as far as they are read here; one message leaves after each read."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self.messages = list(messages)

    def lrange(self, _key: str, start: int, end: int) -> list[bytes]:
        found = self.messages[start : end + 1]
        self.messages.pop()
        return found


def test_message_is_found_while_others_leave_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_run, "CHUNK", 3)
    messages = [f"{number}".encode() for number in range(10)]
    found = list(file_run._waiting(FakeRedis(messages), "embed"))
    assert found == messages[: len(found)]
    assert len(found) >= 7  # Workers took the others, the oldest first.

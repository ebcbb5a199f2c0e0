from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from redis.exceptions import NoPermissionError

from batchery import RedisUnavailable
from batchery.retry import RetryPolicy
from batchery_producer.files import recovery
from batchery_producer.files.journal import Journal
from batchery_producer.files.recovery import find_in_flight

JOURNAL = Journal("0123456789abcdef", {}, ["in.txt"], [])
IDS = [JOURNAL.task_id(0, row) for row in range(1, 5)]


@pytest.fixture
def app() -> Celery:
    """An app whose broker is in memory."""
    return Celery("resume", broker="memory://", set_as_current=False)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for what a broker is asked."""
    mock = Mock(return_value=[IDS[0]])
    monkeypatch.setattr(recovery, "_find_in_flight", mock)
    return mock


def in_flight(app: Celery) -> set[str]:
    return set(find_in_flight(app, "embed", JOURNAL.pattern, RetryPolicy(away_s=0)))


def test_user_who_may_not_read_messages_is_told_who_may(app: Celery, search: Any) -> None:
    search.side_effect = NoPermissionError("no permissions to run the 'lrange' command")
    with pytest.raises(RedisUnavailable, match=r"'lrange' command; use the user `operator` of"):
        in_flight(app)


def test_queue_of_another_broker_than_redis_is_not_searched(app: Celery) -> None:
    assert in_flight(app) == set()


def test_message_is_found_while_others_leave_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "CHUNK", 3)
    messages = [f"{number}".encode() for number in range(10)]
    left = list(messages)

    def lrange(_key: str, start: int, end: int) -> list[bytes]:
        found = left[start : end + 1]
        left.pop()  # Workers take the oldest first.
        return found

    found = list(recovery._waiting(Mock(lrange=lrange), "embed"))
    assert found == messages[: len(found)]
    assert len(found) >= 7

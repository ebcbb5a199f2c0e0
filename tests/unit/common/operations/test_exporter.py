"""The exporter's surveys: one for all who ask at once, and never a long wait."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchery.cli.survey import Survey
from batchery.errors import RedisUnavailable
from batchery.operations import exporter
from batchery.operations.exporter import ClusterWatch

EMPTY = Survey({}, {"embed": 3})


def is_up(watch: ClusterWatch) -> bool:
    found = {family.name: family.samples for family in watch.collect()}
    is_there = found["batchery_broker_up"][0].value == 1
    assert ("batchery_queue_waiting_jobs" in found) is is_there
    return is_there


def test_those_who_ask_together_or_soon_get_one_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "FRESH_S", 3600.0)
    taken: list[int] = []
    begin = threading.Event()

    def take() -> Survey:
        begin.wait(60)
        taken.append(1)
        return EMPTY

    watch = ClusterWatch(take)
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(watch.find_problem) for _ in range(8)]
        begin.set()
        assert [answer.result() for answer in answers] == [""] * 8
    assert is_up(watch)
    assert len(taken) == 1
    monkeypatch.setattr(exporter, "FRESH_S", 0.0)
    assert is_up(watch)
    assert len(taken) == 2


def fail() -> Survey:
    raise RedisUnavailable("the broker does not answer")


def test_lost_redis_is_logged_once_and_its_return_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "FRESH_S", 0.0)
    takes: list[Callable[[], Survey]] = [fail, fail, lambda: EMPTY]
    watch = ClusterWatch(lambda: takes.pop(0)())
    assert [is_up(watch), watch.find_problem(), is_up(watch)] == [
        *(False, "the broker does not answer", True)
    ]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the cluster: the broker does not answer", "the cluster: Redis answers again"]

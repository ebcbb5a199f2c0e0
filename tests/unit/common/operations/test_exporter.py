"""The exporter's surveys: one for all who ask at once, and never a long wait."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchery.cli.survey import Survey
from batchery.errors import RedisUnavailable
from batchery.operations import exporter
from batchery.operations.exporter import FRESH_S, ClusterWatch

EMPTY = Survey({}, {"embed": 3})


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_up(watch: ClusterWatch) -> bool:
    text, _ = watch.encode("")
    assert (b"batchery_queue_waiting_jobs" in text) == (b"batchery_broker_up 1.0" in text)
    return b"batchery_broker_up 1.0" in text


def test_those_who_ask_together_or_soon_get_one_survey() -> None:
    taken: list[int] = []
    begin = threading.Event()

    def take() -> Survey:
        begin.wait(10)
        taken.append(1)
        return EMPTY

    clock = Clock()
    watch = ClusterWatch(take, clock)
    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(is_up, watch) for _ in range(8)]
        begin.set()
        assert all(answer.result() for answer in answers)
    assert is_up(watch)
    assert len(taken) == 1
    clock.now_s += FRESH_S
    assert is_up(watch)
    assert len(taken) == 2


def fail() -> Survey:
    raise RedisUnavailable("the broker does not answer")


def test_lost_redis_is_logged_once_and_its_return_too(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    takes: list[Callable[[], Survey]] = [fail, fail, lambda: EMPTY]
    watch = ClusterWatch(lambda: takes.pop(0)(), clock)
    found = []
    while takes:
        found.append(is_up(watch))
        clock.now_s += FRESH_S
    assert found == [False, False, True]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "the cluster: the broker does not answer",
        "the cluster: Redis answers again",
    ]


def test_redis_that_hangs_holds_a_scrape_up_for_some_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "SCRAPE_TIMEOUT_S", 0.2)
    ends = threading.Event()

    def take() -> Survey:
        ends.wait(30)
        return EMPTY

    watch = ClusterWatch(take)
    began_s = time.monotonic()
    assert not is_up(watch)
    # Whoever asks while it still hangs need not wait at all.
    assert not any(is_up(watch) for _ in range(100))
    assert time.monotonic() - began_s < 10
    ends.set()
    assert watch._running is not None
    watch._running.result(10)
    assert is_up(watch)

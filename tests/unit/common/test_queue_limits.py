"""Whether a class has room, by what waits already."""

from typing import Any

import pytest
from celery import Celery

from batchery.errors import QueueFull
from batchery.queue_limits import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    UNKNOWN_WAIT_S,
    Destination,
    QueueLimits,
    Waiting,
    find_destination,
)
from batchery.settings import Settings

HIGH = Destination("q", 0)


def limits_of(**classes: dict[str, Any]) -> QueueLimits:
    levels = {"high": 0, "normal": 3, "low": 6}
    made = {
        name: {"level": level, "share": 1, **classes.get(name, {})}
        for name, level in levels.items()
    }
    return QueueLimits(Settings.load(classes=made).classes)


class Queue:
    """What waits, by the first priority of each class; notes who looked."""

    def __init__(self, **waiting: Waiting) -> None:
        self._waiting = waiting
        self.looks: list[range] = []

    def __call__(self, queue: str, priorities: range) -> Waiting:
        assert queue == "q"
        self.looks.append(priorities)
        name = {0: "high", 3: "normal", 6: "low"}[priorities.start]
        return self._waiting.get(name, Waiting(0))


def test_nothing_is_asked_of_redis_without_limits() -> None:
    limits = limits_of()
    queue = Queue()
    assert not limits.exist
    limits.check(Destination("q", 4), queue)
    assert not queue.looks


def test_a_class_has_room_up_to_its_limits() -> None:
    limits = limits_of(normal={"max_waiting": 10})
    queue = Queue(normal=Waiting(9, 5.0))
    assert limits.exist
    limits.check(Destination("q", 4), queue)
    assert queue.looks == [range(3, 6)]
    # Other classes are no matter of it.
    limits.check(HIGH, Queue(normal=Waiting(10)))


@pytest.mark.parametrize(
    ("waiting", "problem", "after_s"),
    [
        (Waiting(10, 2.5), "holds 10 jobs, and max_waiting is 10", 2.5),
        (Waiting(10), "holds 10 jobs", UNKNOWN_WAIT_S),
        (Waiting(10, 86_400.0), "holds 10 jobs", MAX_RETRY_AFTER_S),
        (Waiting(10, 0.0), "max_waiting", MIN_RETRY_AFTER_S),
    ],
)
def test_a_full_class_refuses_with_a_hint(waiting: Waiting, problem: str, after_s: float) -> None:
    limits = limits_of(high={"max_waiting": 10})
    with pytest.raises(QueueFull, match=problem) as caught:
        limits.check(HIGH, Queue(high=waiting))
    assert "queue 'q': class 'high'" in str(caught.value)
    assert caught.value.retry_after_s == after_s


def test_jobs_are_sent_where_nothing_can_be_asked() -> None:
    limits_of(high={"max_waiting": 1}).check(HIGH, lambda *_: None)


def test_a_destination_is_celerys() -> None:
    app = Celery("routes", set_as_current=False)
    app.conf.task_routes = {"routed": {"queue": "slow", "priority": 7}}

    assert find_destination(app, "unknown", {}) == Destination("celery", 0)
    assert find_destination(app, "unknown", {"queue": "x", "priority": 99}) == Destination("x", 9)
    assert find_destination(app, "routed", {}) == Destination("slow", 7)
    assert find_destination(app, "routed", {"priority": 2}) == Destination("slow", 2)
    assert find_destination(app, "routed", {"priority": None}) == Destination("slow", 7)

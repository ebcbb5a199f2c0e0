"""Which class a job is sent in, by what waits already."""

from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

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
    assert limits.place(Destination("q", 4), 1, queue) == 4
    assert not queue.looks


def test_a_job_keeps_its_priority_while_its_class_has_room() -> None:
    limits = limits_of(normal={"max_waiting": 10, "max_wait_s": 5})
    queue = Queue(normal=Waiting(9, 5.0))
    assert limits.exist
    assert limits.place(Destination("q", 4), 1, queue) == 4
    assert queue.looks == [range(3, 6)]


@pytest.mark.parametrize(
    ("waiting", "problem", "after_s"),
    [
        (Waiting(10, 2.5), "holds 10 jobs, and max_waiting is 10", 2.5),
        (Waiting(10), "holds 10 jobs", UNKNOWN_WAIT_S),
        (Waiting(1, 5.1), "has a job that has waited 5.1 s, and max_wait_s is 5", 5.1),
        (Waiting(1, 86_400.0), "has waited 86400.0 s", MAX_RETRY_AFTER_S),
        (Waiting(10, 0.0), "max_waiting", MIN_RETRY_AFTER_S),
    ],
)
def test_a_full_class_refuses_with_a_hint(waiting: Waiting, problem: str, after_s: float) -> None:
    limits = limits_of(high={"max_waiting": 10, "max_wait_s": 5})
    with pytest.raises(QueueFull, match=problem) as caught:
        limits.place(HIGH, 1, Queue(high=waiting))
    assert "queue 'q': class 'high'" in str(caught.value)
    assert caught.value.retry_after_s == after_s


def test_a_full_class_that_demotes_sends_jobs_in_the_class_below() -> None:
    full = {"max_waiting": 1, "when_full": "demote"}
    limits = limits_of(high=full, normal=full)
    assert limits.place(HIGH, 1, Queue(high=Waiting(1))) == 3
    assert limits.place(HIGH, 1, Queue(high=Waiting(1), normal=Waiting(1))) == 6
    assert limits.place(HIGH, 2, Queue()) == 6


def test_the_class_below_may_refuse() -> None:
    limits = limits_of(high={"max_wait_s": 1, "when_full": "demote"}, normal={"max_waiting": 2})
    with pytest.raises(QueueFull, match="class 'normal' holds 2 jobs"):
        limits.place(HIGH, 1, Queue(high=Waiting(5, 3.0), normal=Waiting(2)))


def test_jobs_that_are_demoted_need_no_room_for_all_of_them_where_the_class_refuses() -> None:
    limits = limits_of(high={"max_waiting": 9, "when_full": "demote"}, normal={"max_waiting": 4})
    assert limits.place(HIGH, 9, Queue(high=Waiting(1), normal=Waiting(3))) == 3


def test_jobs_are_sent_where_nothing_can_be_asked() -> None:
    limits = limits_of(high={"max_waiting": 1})
    assert limits.place(HIGH, 1, lambda *_: None) == 0


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=2),
)
def test_no_class_ever_holds_more_than_its_maximum(
    priority: int, steps: list[tuple[int, int]]
) -> None:
    limits = limits_of(
        high={"max_waiting": 3, "when_full": "demote"},
        normal={"max_waiting": 4},
        low={"max_waiting": 5},
    )
    held = {"high": 0, "normal": 0, "low": 0}
    names = {0: "high", 3: "normal", 6: "low"}
    for jobs, taken in steps:
        queue = Queue(**{name: Waiting(count) for name, count in held.items()})
        try:
            given_priority = limits.place(Destination("q", priority), jobs, queue)
        except QueueFull:
            pass
        else:
            assert given_priority >= priority
            # Of a class that refuses, whoever sends many fills the rest.
            name = names[limits.priorities(given_priority).start]
            room = {"normal": 4, "low": 5}.get(name, 99) - held[name]
            assert room > 0
            held[name] += min(jobs, room)
        assert held["high"] <= 3
        assert held["normal"] <= 4
        assert held["low"] <= 5
        held = {name: max(0, count - taken) for name, count in held.items()}


def test_a_destination_is_celerys() -> None:
    app = Celery("routes", set_as_current=False)
    app.conf.task_routes = {"routed": {"queue": "slow", "priority": 7}}

    assert find_destination(app, "unknown", {}) == Destination("celery", 0)
    assert find_destination(app, "unknown", {"queue": "x", "priority": 99}) == Destination("x", 9)
    assert find_destination(app, "routed", {}) == Destination("slow", 7)
    assert find_destination(app, "routed", {"priority": 2}) == Destination("slow", 2)
    assert find_destination(app, "routed", {"priority": None}) == Destination("slow", 7)

"""From calls to jobs, and to refusals that fail one job."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from batchery import BatchArgumentError, BatchTask, InvalidItem, Settings
from batchery_worker.dispatch.admission import Admission
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import Job, Lane, Limits

app = Celery("admission", broker="memory://", set_as_current=False)


@app.task(base=BatchTask, shared=False, max_batch_size=8, max_batch_tokens=99, max_wait_ms=0)
def own(items: list[Any], **keywords: Any) -> list[Any]:
    return items


@app.task(base=BatchTask, shared=False)
def defaults(items: list[Any]) -> list[Any]:
    return items


@app.task(base=BatchTask, shared=False, cache="7")
def kept(items: list[Any]) -> list[Any]:
    return items


@app.task(base=BatchTask, shared=False, cache="8", cache_ttl_s=5)
def briefly(items: list[Any]) -> list[Any]:
    return items


@app.task(base=BatchTask, shared=False, bind=True)
def looking(self: BatchTask, items: list[Any]) -> list[Any]:
    return items


def call(**message: Any) -> TaskCall:
    request: Any = SimpleNamespace(
        type=own.name, id="id-1", request_dict=message, embed=None, lease=None
    )
    return TaskCall(request)


@pytest.fixture
def admission() -> Admission:
    return Admission(Settings(max_batch_size=32, max_wait_ms=250, max_batch_tokens=1_000))


def admit(admission: Admission, **message: Any) -> Job[TaskCall]:
    return admission.job(call(**message), own, (None, None), 1.0)


@pytest.mark.parametrize(
    ("message", "waited_s"),
    [
        ({}, 0.0),
        ({"batchery_sent_at": 90.0}, 10.0),
        ({"batchery_sent_at": 110.0}, 0.0),
        ({"batchery_sent_at": "long ago"}, 0.0),
        ({"batchery_sent_at": float("nan")}, 0.0),
        ({"batchery_sent_at": -1e300}, 0.0),
        ({"batchery_sent_at": 9e99}, 0.0),
        # It came when it was due.
        ({"batchery_sent_at": 90.0, "eta": "2026-01-02T00:00:00"}, 0.0),
    ],
)
def test_a_job_has_waited_since_it_was_sent(message: dict[str, Any], waited_s: float) -> None:
    job = admit(Admission(Settings(), clock=lambda: 100.0), args=[1], **message)
    assert job.waited_s == waited_s


def test_limits_of_the_task_win_over_the_settings(admission: Admission) -> None:
    assert admission.options(own).limits == Limits(8, 0.0)
    assert admission.options(defaults).limits == Limits(32, 0.25)
    assert admission.options(own).max_batch_tokens == 99
    assert admission.options(defaults).max_batch_tokens == 1_000


def test_the_order_of_keywords_does_not_matter(admission: Admission) -> None:
    one = admit(admission, args=[1], kwargs={"a": 1, "b": {"c": [1], "d": None}})
    other = admit(admission, args=[2], kwargs={"b": {"d": None, "c": [1]}, "a": 1})
    assert one.key == other.key


@pytest.mark.parametrize("other", [{"a": 2}, {"a": "1"}, {"a": True}, {"b": 1}, {}, {"a": [1]}])
def test_different_keywords_never_share_a_batch(
    admission: Admission, other: dict[str, Any]
) -> None:
    one = admit(admission, args=[1], kwargs={"a": 1})
    assert one.key != admit(admission, args=[1], kwargs=other).key


@pytest.mark.parametrize(
    ("priority", "name"),
    [
        (0, "high"),
        (2, "high"),
        (3, "normal"),
        (6, "low"),
        (9, "low"),
        (255, "low"),
        (-1, "high"),
        (None, "high"),
        ("7", "high"),
    ],
)
def test_the_priority_says_the_class(admission: Admission, priority: Any, name: str) -> None:
    job = admit(admission, args=[1], delivery_info={"priority": priority})
    assert job.lane == Lane(name, "")


def test_a_header_says_the_tenant(admission: Admission) -> None:
    assert admit(admission, args=[1], batchery_tenant="acme").lane == Lane("high", "acme")
    assert admit(admission, args=[1], delivery_info=None).lane == Lane("high", "")


@pytest.mark.parametrize("tenant", [7, ["acme"], "x" * 201])
def test_a_tenant_that_is_no_name_fails_its_job(admission: Admission, tenant: Any) -> None:
    with pytest.raises(InvalidItem, match=r"header batchery_tenant is .*; expected a name"):
        admit(admission, args=[1], batchery_tenant=tenant)


def test_keywords_that_cannot_be_spelled_fail_the_job_alone(admission: Admission) -> None:
    deep: Any = []
    for _ in range(50_000):
        deep = [deep]
    for kwargs in ({"a": object()}, {"a": 1, 2: "b"}, {"a": deep}):
        with pytest.raises((BatchArgumentError, InvalidItem), match="cannot be"):
            admit(admission, args=[1], kwargs=kwargs)
    while deep:
        deep = deep.pop()


@pytest.mark.parametrize("args", [[], None, [1, 2]])
def test_anything_but_one_positional_argument_is_refused(admission: Admission, args: Any) -> None:
    with pytest.raises(BatchArgumentError, match="exactly one positional argument"):
        admit(admission, args=args)


def test_a_packed_message_counts_its_items(admission: Admission) -> None:
    job = admit(admission, args=[["a", "b", "c"]], batchery={"v": 1, "n": 3})
    assert (job.items, job.payload.items, job.payload.is_multi_item) == (3, ["a", "b", "c"], True)


def test_a_malformed_header_is_refused(admission: Admission) -> None:
    with pytest.raises(InvalidItem, match="n=4"):
        admit(admission, args=[["a"]], batchery={"v": 1, "n": 4})


def test_a_cache_has_the_time_of_its_task_or_else_that_of_the_settings() -> None:
    admission = Admission(Settings(cache_ttl_s=60))
    assert admission.options(own).cache is None
    assert admission.options(kept).cache == ("7", 60)
    assert admission.options(briefly).cache == ("8", 5)


def test_a_deadline_is_converted_to_the_clock_of_the_worker() -> None:
    admission = Admission(Settings(), clock=lambda: 1_790_000_000.0)
    job = admit(admission, args=[1], batchery_deadline=1_790_000_002.5)
    assert job.deadline_s == pytest.approx(3.5)
    assert admit(admission, args=[1]).deadline_s == math.inf


@pytest.mark.parametrize("deadline", ["soon", True, math.nan, [1]])
def test_a_deadline_that_is_no_time_fails_its_job_alone(
    admission: Admission, deadline: Any
) -> None:
    with pytest.raises(InvalidItem, match=r"batchery_deadline is .*; expected a time in Unix"):
        admit(admission, args=[1], batchery_deadline=deadline)


def test_a_target_is_that_of_the_task_or_of_the_settings() -> None:
    assert Admission(Settings(target_latency_ms=200)).options(own).limits.target_s == 0.2
    assert Admission(Settings()).options(own).limits.target_s is None

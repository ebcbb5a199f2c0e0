"""A job that has ended leaves nothing that only Python's collector of circles would free.

Celery's copy of a traceback takes 0.3 MB, and a worker lets the collector run seldom.
"""

import gc
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import Traceback
from celery import Celery
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore, Reject

from batchery import BatchTask, Failed, RetryAfter, install
from batchery_worker.commit.listeners import Listeners
from batchery_worker.completion.ordinary import run_in_child
from batchery_worker.completion.settlement import Settlement
from batchery_worker.completion.tracer import Completion
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.metrics import Metrics

JOBS = 5

KINDS = (Traceback, Completion, FrameType)

app = install(Celery("left", broker="memory://", backend="cache+memory://", set_as_current=False))


class Unpicklable(Exception):
    """Celery stores another one in its place."""

    def __init__(self) -> None:
        super().__init__(lambda: None)


@app.task(shared=False, base=BatchTask, name="left.batch")
def batch(items: list[Any]) -> list[Any]:
    return items


@app.task(shared=False, bind=True, name="left.ordinary")
def ordinary(self: Any, outcome: str) -> None:
    if outcome == "retry":
        raise self.retry(countdown=60)
    raise {"failure": LookupError, "ignore": Ignore, "unpicklable": Unpicklable}[outcome]()


@pytest.fixture
def count_leftovers(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """Counts what jobs have left behind since the test began, with the collector switched off."""

    def count() -> int:
        return sum(type(each) in KINDS for each in gc.get_objects())

    # pytest keeps what is logged, and each record its traceback.
    caplog.set_level(logging.CRITICAL, logger="celery.app.trace")
    gc.collect()
    before = count()
    gc.disable()
    yield lambda: count() - before
    gc.enable()


def make_arguments(task: str, item: str) -> tuple[Any, ...]:
    """What Celery's tracer is called with."""
    headers = {"id": "job", "task": task, "retries": 0, "lang": "py", "delivery_info": {}}
    body = json.dumps([[item], {}, {}])
    return task, "job", headers, body, "application/json", "utf-8"


OUTCOMES: dict[str, Callable[[], Any]] = {
    "value": lambda: "value",
    "failure": lambda: Failed("why"),
    "unpicklable": lambda: Failed(Unpicklable()),
    "retry": lambda: RetryAfter(60),
    "ignore": Ignore,
    "reject": lambda: Reject("no"),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_job_of_a_batch_leaves_nothing(count_leftovers: Callable[[], int], outcome: str) -> None:
    hub: Any = SimpleNamespace(call_soon=lambda _: None)
    settlement = Settlement(app, 1, Metrics(), InFlight(), Listeners(), hub)
    told: list[bool] = []
    for _ in range(JOBS):
        call = TaskCall(
            target=partial(trace_task_ret, app=app),
            args=make_arguments(batch.name, "item"),
            callback=lambda answer: told.append(bool(answer[0])),
            accept_callback=lambda *_: None,
            error_callback=lambda _: None,
            request=None,
        )
        settlement.settle(call, lambda _: OUTCOMES[outcome](), None)
    settlement.finish()
    settlement.stop()
    assert told == [outcome != "value"] * JOBS
    assert count_leftovers() == 0


@pytest.mark.parametrize("outcome", ["failure", "unpicklable", "retry", "ignore"])
def test_ordinary_job_leaves_nothing(count_leftovers: Callable[[], int], outcome: str) -> None:
    for _ in range(JOBS):
        answer = run_in_child(
            partial(trace_task_ret, app=app), *make_arguments(ordinary.name, outcome)
        )
        assert answer[0]
        del answer
    assert count_leftovers() == 0

"""What a device is told, so that it may commit: for which jobs, and how little."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery import BatchTask, install
from batchery.transport.redis_schema import Keys
from batchery_worker.commit.eligibility import FIXES, NO_LEASE, CommitEligibility, warn_of_tracer
from batchery_worker.commit.listeners import Listeners
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import BatchKey, Job, Limits
from batchery_worker.request import LeaseHandle

URL = "redis://127.0.0.1:1/0"  # nobody is asked anything
app = install(Celery("eligibility", broker=URL, backend=URL, set_as_current=False))


def same(items: list[Any]) -> list[Any]:
    return items


def make_task(app: Celery, name: str = "plain", **options: Any) -> Any:
    decorate: Any = app.task(base=BatchTask, shared=False, name=name, **options)
    decorate(same)
    return app.tasks[name]


TASK = make_task(app)


class LeaseStore:
    """As far as eligibility look at it."""

    worker = "w1"
    keys = Keys("pre.")
    lease_key = "pre.batchery:lease:w1"
    db = 3

    def __init__(self) -> None:
        self.held = {"7", "8"}

    def holds(self, token: str) -> bool:
        return token in self.held


lease_store: Any = LeaseStore()


def job(lease: Any, *, embed: Any = None, eventer: Any = None, **headers: Any) -> Job[TaskCall]:
    message = {"id": "t1", "task": "plain", "args": ["x"], "kwargs": {}, **headers}
    request: Any = SimpleNamespace(lease=lease, embed=embed or {}, eventer=eventer)
    call = TaskCall(request, ("plain", "t1", message), request)
    return Job("t1", BatchKey("plain", "", (None, None)), Limits(8, 0.0), 1, 10.0, call)


def test_a_leased_plain_job_may_be_committed() -> None:
    context = CommitEligibility(app, Listeners()).context(
        TASK, [job(LeaseHandle(lease_store, "7"), group="g")], lease_store, 10.25
    )
    assert context is not None
    assert context.jobs == [("7", 250.0, {"group_id": "g"})]
    assert (context.worker, context.lease_key, context.broker_db) == (
        "w1",
        "pre.batchery:lease:w1",
        3,
    )
    assert context.workers_key == "pre.batchery:workers"
    assert context.text_chars is None


@pytest.mark.parametrize(
    "refused",
    [
        job(None),
        job(LeaseHandle(lease_store, "9")),
        job(LeaseHandle(LeaseStore(), "7")),  # type: ignore[arg-type]
        job(LeaseHandle(lease_store, "7"), embed={"callbacks": [{}]}),
        job(LeaseHandle(lease_store, "7"), replaced_task_nesting=1),
    ],
    ids=["no lease", "lost lease", "another lease_store", "callback", "replaced"],
)
def test_job_that_is_not_plain_is_left_to_the_tracer_alone(refused: Job[TaskCall]) -> None:
    context = CommitEligibility(app, Listeners()).context(
        TASK, [job(LeaseHandle(lease_store, "8")), refused], lease_store, 10.0
    )
    assert context is not None
    assert context.jobs == [("8", 0.0, {}), None]


def test_batch_without_an_eligible_job_has_no_commit_context() -> None:
    chained, bare = job(LeaseHandle(lease_store, "7"), embed={"chain": [{}]}), job(None)
    assert (
        CommitEligibility(app, Listeners()).context(TASK, [chained, bare], lease_store, 10.0)
        is None
    )
    assert (chained.payload.tracer_reason, bare.payload.tracer_reason) == ("chain", NO_LEASE)


def test_reason_of_all_jobs_of_a_task_is_logged_with_what_would_change_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = "a result backend of its own"
    apart = make_task(app, "apart", backend=RedisBackend(app=app, url=URL))
    also = make_task(app, "also", backend=RedisBackend(app=app, url=URL))
    warn_of_tracer(app, [TASK, apart, also])
    (line,) = caplog.messages
    assert line.startswith("each job of apart, also takes Celery's tracer, which is")
    assert line.endswith(f"because of {reason}: {FIXES[reason]}")
    leased = job(LeaseHandle(lease_store, "7"))
    assert CommitEligibility(app, Listeners()).context(apart, [leased], lease_store, 10.0) is None
    assert leased.payload.tracer_reason == reason


def test_stamps_that_are_named_like_a_stored_field_are_left_to_celery() -> None:
    extended = install(Celery("extended", broker=URL, backend=URL, set_as_current=False))
    extended.conf.result_extended = True
    task = make_task(extended)
    stamped = {"stamps": {"status": "odd"}, "stamped_headers": ["status"]}
    assert (
        CommitEligibility(extended, Listeners()).context(
            task, [job(LeaseHandle(lease_store, "7"), **stamped)], lease_store, 10.0
        )
        is None
    )

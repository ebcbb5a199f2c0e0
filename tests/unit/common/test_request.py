"""`self.request` inside a batch function, in this process."""

from typing import Any

import pytest
from celery import Celery, current_task
from celery.app.task import Context
from celery.result import denied_join_result
from hypothesis import given
from hypothesis import strategies as st

from batchery import BatchTask, Model, Replace, RetryAfter, install, register
from batchery.execution.batch import run_function
from batchery.request import PER_JOB_ATTRIBUTES, BatchContext, JobContext, bind_request, shares


@pytest.fixture
def app() -> Celery:
    return install(
        Celery("context", broker="memory://", backend="cache+memory://", set_as_current=False)
    )


def make(app: Celery, function: Any, **options: Any) -> Any:
    decorate: Any = app.task(base=BatchTask, shared=False, bind=True, **options)
    return decorate(function)


def same(self: BatchTask, items: list[Any]) -> list[Any]:
    return items


@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_every_item_of_a_part_belongs_to_the_job_that_carried_it(
    data: st.DataObject, sizes: list[int]
) -> None:
    owners = [index for index, size in enumerate(sizes) for _ in range(size)]
    start = data.draw(st.integers(0, len(owners) - 1))
    stop = data.draw(st.integers(start + 1, len(owners)))
    found = [index for index, items in shares(sizes, range(start, stop)) for _ in items]
    assert found == owners[start:stop]
    positions = [at for _, items in shares(sizes, range(start, stop)) for at in items]
    assert positions == list(range(stop - start))


def several(*ids: str) -> BatchContext:
    jobs = [
        JobContext.of({"id": each, "retries": 1, "hostname": "h"}, range(at, at + 1))
        for at, each in enumerate(ids)
    ]
    return BatchContext(lambda: jobs)


def test_batch_of_several_jobs_hides_attributes_of_one_job() -> None:
    batch = several("a", "b")
    assert [job.id for job in batch.jobs] == ["a", "b"]
    assert all(isinstance(job, Context) and job.retries == 1 for job in batch.jobs)
    for name in PER_JOB_ATTRIBUTES:
        assert hasattr(batch.jobs[0], name), f"Celery's request has no {name} any more"
        with pytest.raises(AttributeError, match=rf"use request.jobs\[i\].{name}"):
            getattr(batch, name)
    assert {"id", "retries", "headers", "delivery_info", "root_id", "args"} <= PER_JOB_ATTRIBUTES
    assert (batch.called_directly, batch.hostname) == (True, "h")
    assert "BatchContext" in repr(batch)


def test_a_message_cannot_say_that_celerys_tracer_is_there() -> None:
    job = JobContext.of({"id": "a", "called_directly": False}, range(1))
    assert job.called_directly


def test_a_batch_of_one_is_the_request_of_its_job() -> None:
    request = Context({"id": "a", "retries": 3, "tenant": "x"})
    job = JobContext(vars(request), range(1))
    batch = BatchContext(lambda: [job], vars(request))
    assert (batch.id, batch.retries, batch.headers) == ("a", 3, {"tenant": "x"})
    batch.children.append("child")
    assert request.children == job.children == ["child"]


def test_batch_context_ends_with_the_call(app: Celery) -> None:
    task = make(app, same, name="plain")
    with bind_request(task, several("a", "b")):
        assert len(task.request.jobs) == 2
    assert not isinstance(task.request, BatchContext)


# On every pool but ours


def test_direct_call_has_a_batch_context_with_one_job(app: Celery) -> None:
    def look(self: BatchTask, items: list[str]) -> list[Any]:
        (job,) = self.request.jobs
        assert not current_task or current_task.request.id == job.id
        return [[job.id, list(job.items), self.request.retries]] * len(items)

    task = make(app, look)
    assert task.apply(["a"], task_id="7", retries=2).get() == ["7", [0], 2]
    assert task("a") == [None, [0], 0]
    packed = task.apply([["a", "b"]], task_id="8", headers={"batchery": {"v": 1, "n": 2}}).get()
    assert packed == [{"ok": ["8", [0, 1], 0]}] * 2


def test_a_direct_call_inside_a_job_is_another_job(app: Celery) -> None:
    def look(self: BatchTask, items: list[str]) -> list[Any]:
        ids = [job.id for job in self.request.jobs]
        return [[ids, look_again("inner")] if item == "outer" else ids for item in items]

    task = look_again = make(app, look)
    assert task.apply(["outer"], task_id="7").get() == [["7"], [None]]


def test_generator_sees_its_batch_context_to_its_end(app: Celery) -> None:
    def look(self: BatchTask, items: list[str]) -> Any:
        for _ in items:
            yield self.request.jobs[0].id

    assert make(app, look).apply(["a"], task_id="7").get() == "7"


def test_only_bound_functions_see_their_jobs(app: Celery) -> None:
    class Shelf(BatchTask):
        name = "shelf"

        def run(self, items: list[int]) -> list[int]:
            return items

    unbound: Any = app.task(base=BatchTask, shared=False)(shares)
    assert not unbound.sees_request
    assert make(app, same).sees_request
    assert app.register_task(Shelf()).sees_request
    assert not register(app, "model", Model).sees_request


# Celery's own calls, with no tracer outside


def on_device(task: Any, call: Any) -> Any:
    """What a function answers where only the device and the batch are around it."""

    def function(items: list[str]) -> list[Any]:
        return [call() for _ in items]

    return run_function(function, ["a", "b"], {}, around=lambda _: bind_request(task, several("a")))


def test_self_retry_on_a_device_is_the_outcome_of_one_item(app: Celery) -> None:
    task = make(app, same, name="retried", default_retry_delay=7)
    error = ConnectionError("down")
    assert on_device(task, task.retry) == [RetryAfter(7)] * 2
    assert on_device(task, lambda: task.retry(exc=error, countdown=2)) == [RetryAfter(2, error)] * 2
    assert on_device(task, lambda: task.retry(countdown=0, throw=False)) == [RetryAfter(0)] * 2
    (later, _) = on_device(task, lambda: task.retry(eta=app.now()))
    assert later.seconds < 5


def test_self_replace_on_a_device_is_the_outcome_of_one_item(app: Celery) -> None:
    task = make(app, same, name="replaced")
    signature = task.s("b")
    assert on_device(task, lambda: task.replace(signature)) == [Replace(signature)] * 2


def test_replace_in_a_direct_call_runs_the_other_job_here(app: Celery) -> None:
    def become(self: BatchTask, items: list[str]) -> list[Any]:
        return [Replace(double.s(item)) for item in items]

    def twice(item: str) -> str:
        return item * 2

    double: Any = app.task(shared=False)(twice)
    task = make(app, become)
    assert task("a") == "aa"
    assert task.apply(["a"]).get() == "aa"
    assert (task.s("a") | task.s()).apply().get() == "aaaa"
    # Within a task nobody may wait for another job; but this one runs here.
    with denied_join_result():
        assert task("a") == "aa"


def test_replace_refuses_anything_but_a_signature() -> None:
    with pytest.raises(TypeError, match="no signature"):
        Replace("no signature")  # type: ignore[arg-type]

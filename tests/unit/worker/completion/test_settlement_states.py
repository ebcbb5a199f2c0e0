"""How each job is settled: by a thread, by the commit of its device, or not at all; always once."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.worker import state as worker_state

from batchery import Failed
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.completion import settlement as module
from batchery_worker.completion.executor import CommittedJob
from batchery_worker.completion.settlement import MAX_NOTIFIED_JOBS, NOT_COMMITTED, Settlement
from batchery_worker.completion.tracer import Completion
from batchery_worker.in_flight import DispatchedBatch, InFlight, TaskCall
from batchery_worker.job import Batch, BatchKey, Job, Limits
from batchery_worker.metrics import Metrics
from batchery_worker.request import LeaseHandle
from support.fake_worker import FakeLeaseStore

FACTS = {"id": "b1", "forward_ms": 250.0}

Status = CommitStatus


class Executor:
    """Completion threads that do nothing until the test says so."""

    def __init__(self, *_: Any) -> None:
        self.completions: list[Completion] = []
        self.notified: list[list[CommittedJob]] = []
        self._ended: list[Callable[[Any], None]] = []
        self.tracer = SimpleNamespace(may_hold=lambda _: False)

    def submit(self, completion: Completion) -> None:
        self.completions.append(completion)

    def notify_listeners(self, jobs: Sequence[CommittedJob], ended: Callable[[Any], None]) -> None:
        self.notified.append(list(jobs))
        self._ended.append(ended)

    def end(self) -> None:
        """Lets the threads end what they have."""
        for completion in self.completions:
            completion.on_end(completion, None)
        for jobs, ended in zip(self.notified, self._ended, strict=True):
            ended(jobs)

    def stop(self) -> None:
        """Has nothing to wait for."""


class Request:
    """As much of Celery's request as settling needs."""

    id = "job"

    def __init__(self, lease: LeaseHandle | None) -> None:
        self.lease = lease
        self.discarded = False
        self.acknowledged = False
        self.batch: Any = None


class Scene:
    """A settlement with a lease store, and what Celery is told."""

    executor: Any
    store: Any
    listeners: Any

    def __init__(self) -> None:
        self.metrics, self.in_flight = Metrics(), InFlight()
        self.store = FakeLeaseStore()
        #: What was told to Celery's callback, by job.
        self.told: dict[str, Any] = {}
        self.listeners = SimpleNamespace(of=lambda _: SimpleNamespace(after=False))
        app: Any = SimpleNamespace(tasks={"task": None})
        hub: Any = SimpleNamespace(call_soon=lambda _: None)
        self.settlement = Settlement(app, 1, self.metrics, self.in_flight, self.listeners, hub)
        self.executor = self.settlement._executor

    def call(self, token: str = "1", *, is_leased: bool = True, of_celery: bool = True) -> TaskCall:
        """A job in flight, of the same id as its token."""
        if is_leased:
            self.store.held.add(token)
            self.store.believed.add(token)
        request: Any = Request(LeaseHandle(self.store, token) if is_leased else None)
        nothing: Any = lambda *_: None  # noqa: E731
        call = TaskCall(
            nothing,
            ("task", token, {}),
            lambda outcome: self.told.setdefault(token, outcome),
            nothing,
            nothing,
            request if of_celery else None,
        )
        self.in_flight.add(call, 1)
        return call

    def settle_batch(self, *answers: tuple[TaskCall, Status, Sequence[Any]]) -> None:
        self.settlement.settle_batch((*answer, FACTS) for answer in answers)


def discard(call: TaskCall) -> None:
    """Celery settles the job itself, such as one that was revoked."""
    request: Any = call.request
    request.discarded = True


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(module, "CompletionExecutor", Executor)
    yield Scene()
    worker_state.reset_state()


# By a thread


def test_failed_job_is_completed_by_a_thread_and_in_flight_until_then(scene: Scene) -> None:
    call, error = scene.call(), LookupError("no device")
    scene.settlement.fail(call, error)
    (completion,) = scene.executor.completions
    assert completion.make_outcome(None) == Failed(error)
    assert (scene.settlement.pending, len(scene.in_flight)) == (1, 1)
    completion.on_end(completion, "LookupError")
    assert (scene.settlement.pending, len(scene.in_flight)) == (0, 0)
    assert (scene.metrics.failed_jobs, scene.metrics.failures["LookupError"]) == (1, 1)


def test_job_that_succeeded_is_not_counted_as_failed(scene: Scene) -> None:
    scene.settlement.settle(scene.call(), lambda _: "x", FACTS)
    scene.executor.end()
    assert scene.metrics.failed_jobs == 0


def test_job_that_was_discarded_is_only_forgotten(scene: Scene) -> None:
    call = scene.call()
    discard(call)
    scene.settlement.fail(call, LookupError())
    assert scene.executor.completions == []
    assert (scene.settlement.pending, len(scene.in_flight)) == (0, 0)


def test_request_knows_the_facts_of_its_batch(scene: Scene) -> None:
    call = scene.call()
    scene.settlement.settle(call, lambda _: "x", FACTS)
    assert call.request is not None
    assert call.request.batch == FACTS
    # A caller that is not Celery's worker has no request.
    scene.settlement.settle(scene.call("2", of_celery=False), lambda _: "x", FACTS)
    assert scene.settlement.pending == 2


@pytest.mark.parametrize(
    ("known", "spelled", "reason"),
    [
        ("a chain", ("value", "x"), "a chain"),
        (None, ("failed", ()), "a failure"),
        (None, ("ignore", ""), "an ignored job"),
        (None, ("value", "x"), NOT_COMMITTED),
    ],
)
def test_job_that_needs_the_tracer_is_counted_with_the_reason(
    scene: Scene, known: str | None, spelled: Sequence[Any], reason: str
) -> None:
    call = scene.call()
    call.tracer_reason = known
    scene.settle_batch((call, Status.NEEDS_TRACER, spelled))
    assert scene.metrics.tracer_jobs == {reason: 1}
    assert len(scene.executor.completions) == 1
    assert scene.told == {}


# By its device


def test_committed_job_is_reported_and_never_acknowledged_again(scene: Scene) -> None:
    call = scene.call()
    scene.settle_batch((call, Status.COMMITTED, ("'X'",)))
    assert scene.told == {"1": (False, "'X'", 0.25)}
    assert call.request is not None
    assert call.request.acknowledged
    assert call.request.batch == FACTS
    assert scene.store.believed == set()
    assert scene.metrics.committed_jobs == 1
    assert (scene.settlement.pending, len(scene.in_flight)) == (0, 0)


@pytest.mark.parametrize("rest", [(), (None,)])
def test_text_of_a_result_that_nobody_reads_is_unknown(scene: Scene, rest: Sequence[Any]) -> None:
    scene.settle_batch((scene.call(), Status.COMMITTED, rest))
    assert scene.told["1"] == (False, module.UNKNOWN_RESULT, 0.25)


def test_job_with_listeners_is_settled_when_they_were_called(scene: Scene) -> None:
    call = scene.call()
    scene.settle_batch((call, Status.COMMITTED, ("'X'", "value", "X")))
    ((job,),) = scene.executor.notified
    assert job.make_value is not None
    assert job.make_value(None) == "X"
    assert (scene.settlement.pending, scene.told, len(scene.in_flight)) == (1, {}, 1)
    scene.executor.end()
    assert scene.told == {"1": (False, "'X'", 0.25)}
    assert (scene.settlement.pending, len(scene.in_flight)) == (0, 0)


def test_listeners_of_many_jobs_are_called_in_groups_so_that_none_waits_for_all(
    scene: Scene,
) -> None:
    count = MAX_NOTIFIED_JOBS + 1
    answers = [
        (scene.call(str(number)), Status.COMMITTED, ("", "value", number))
        for number in range(count)
    ]
    scene.settle_batch(*answers)
    assert [len(jobs) for jobs in scene.executor.notified] == [MAX_NOTIFIED_JOBS, 1]
    assert scene.settlement.pending == count
    scene.executor.end()
    assert scene.settlement.pending == 0


@pytest.mark.parametrize("rest", [("'X'",), ("'X'", "value", "X")])
@pytest.mark.parametrize("of_celery", [True, False])
def test_committed_job_that_nobody_waits_for_is_only_forgotten(
    scene: Scene, rest: Sequence[Any], of_celery: bool
) -> None:
    call = scene.call(of_celery=of_celery)
    if call.request is not None:
        discard(call)
    scene.settle_batch((call, Status.COMMITTED, rest))
    assert (scene.told, scene.executor.notified, len(scene.in_flight)) == ({}, [], 0)
    assert (scene.settlement.pending, scene.metrics.committed_jobs) == (0, 0)


def test_job_that_is_discarded_while_its_listeners_run_is_not_reported(scene: Scene) -> None:
    call = scene.call()
    scene.settle_batch((call, Status.COMMITTED, ("'X'", "value", "X")))
    discard(call)
    scene.executor.end()
    assert (scene.told, scene.metrics.committed_jobs, len(scene.in_flight)) == ({}, 0, 0)


def test_committed_job_whose_lease_is_gone_is_reported_all_the_same(scene: Scene) -> None:
    scene.settlement.committed(CommittedJob(scene.call(is_leased=False), "", 0.0, None, None))
    assert scene.told == {"1": (False, "", 0.0)}


def test_callback_that_raises_does_not_stop_the_batch(scene: Scene) -> None:
    broken, call = scene.call("1"), scene.call("2")

    def fail(_: Any) -> None:
        raise OSError("an event cannot be sent")

    broken.callback = fail
    scene.settle_batch((broken, Status.COMMITTED, ("",)), (call, Status.COMMITTED, ("",)))
    assert list(scene.told) == ["2"]


# Not at all


def test_fenced_job_is_left_to_the_worker_that_has_it(scene: Scene) -> None:
    call = scene.call()
    assert call.request is not None
    worker_state.reserved_requests.add(call.request)
    scene.settle_batch((call, Status.FENCED, ()))
    assert (scene.told, len(scene.in_flight), scene.metrics.fenced_jobs) == ({}, 0, 1)
    assert call.request.acknowledged
    assert scene.store.believed == set()
    assert call.request not in worker_state.reserved_requests


@pytest.mark.parametrize("of_celery", [True, False])
def test_fenced_job_that_nobody_waits_for_is_not_counted(scene: Scene, of_celery: bool) -> None:
    call = scene.call(of_celery=of_celery)
    if call.request is not None:
        discard(call)
    scene.settlement.fenced(call)
    assert (scene.metrics.fenced_jobs, len(scene.in_flight)) == (0, 0)


def test_fenced_job_may_have_no_lease_any_more(scene: Scene) -> None:
    scene.settlement.fenced(scene.call(is_leased=False))
    assert scene.metrics.fenced_jobs == 1


# After a device's death


def dispatched(*calls: TaskCall) -> DispatchedBatch:
    key = BatchKey("task")
    jobs = [Job(call.task_id, key, Limits(8), 1, 0.0, call) for call in calls]
    return DispatchedBatch(Batch(tuple(jobs)), 0.0)


def ids(jobs: Sequence[Job[TaskCall]]) -> list[str]:
    return [job.id for job in jobs]


def test_jobs_that_a_dead_device_had_committed_do_not_run_again(scene: Scene) -> None:
    held, committed, fenced = scene.call("1"), scene.call("2"), scene.call("3")
    unleased = scene.call("4", is_leased=False)
    scene.store.held = {"1"}
    scene.store.believed = {"1", "2"}
    left = scene.settlement.left_by(dispatched(held, committed, fenced, unleased))
    assert ids(left) == ["1", "4"]
    assert list(scene.told) == ["2"]
    assert scene.told["2"][1] == module.UNKNOWN_RESULT
    assert (scene.metrics.committed_jobs, scene.metrics.fenced_jobs) == (1, 1)


def test_listeners_of_such_a_job_get_its_stored_result(scene: Scene) -> None:
    scene.listeners.of = lambda _: SimpleNamespace(after=True)
    scene.call("1")
    committed = scene.call("2")
    scene.store.held = {"1"}
    assert scene.settlement.left_by(dispatched(committed)) == []
    ((job,),) = scene.executor.notified
    assert job.make_value is not None
    backend: Any = SimpleNamespace(get_result=lambda task_id: f"stored {task_id}")
    assert job.make_value(backend) == "stored 2"
    assert scene.settlement.pending == 1


def test_jobs_of_another_broker_run_again(scene: Scene) -> None:
    first, other = scene.call("1"), scene.call("2")
    assert other.request is not None
    other.request.lease = LeaseHandle(FakeLeaseStore(), "1")  # type: ignore[misc, arg-type]
    scene.store.held = set()
    assert ids(scene.settlement.left_by(dispatched(first, other))) == ["2"]


def test_without_leases_or_an_answer_of_redis_all_jobs_run_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    unleased = scene.call("1", is_leased=False)
    assert ids(scene.settlement.left_by(dispatched(unleased))) == ["1"]

    def refuse(_: Any) -> Any:
        raise redis.ConnectionError("away")

    scene.store.still_held = refuse
    leased = scene.call("2")
    assert ids(scene.settlement.left_by(dispatched(unleased, leased))) == ["1", "2"]
    assert "cannot ask Redis" in caplog.text
    assert scene.told == {}


# Ending


def test_finishing_waits_for_all_that_is_being_completed(scene: Scene) -> None:
    scene.settlement.finish()
    scene.settlement.fail(scene.call("1"), LookupError())
    scene.settlement.fail(scene.call("2"), LookupError())
    for completion in scene.executor.completions:
        scene.settlement.deliver(partial(completion.on_end, completion, None))
    scene.settlement.finish()
    assert scene.settlement.pending == 0


def test_stopping_calls_what_was_delivered(scene: Scene) -> None:
    called: list[int] = []
    scene.settlement.deliver(lambda: called.append(1))
    scene.settlement.stop()
    assert called == [1]


def test_one_turn_of_the_loop_empties_the_whole_mailbox(scene: Scene) -> None:
    planned: list[Any] = []
    woken: list[int] = []
    waker = SimpleNamespace(wake=lambda: woken.append(1))
    hub: Any = SimpleNamespace(call_soon=planned.append, _waker=waker)
    scene.settlement.attach(hub)
    for _ in range(3):
        scene.settlement.deliver(lambda: None)
    assert len(planned) == 1
    planned.pop()()
    # What Celery has put on the loop meanwhile begins at once.
    assert woken == [1]
    scene.settlement.empty_mailbox()
    assert woken == [1]
    scene.settlement.deliver(lambda: None)
    assert len(planned) == 1

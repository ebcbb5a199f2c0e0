"""Which jobs a completion thread takes together, and how each of them ends."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.backends.cache import CacheBackend
from celery.worker import state as worker_state

from batchery.errors import ItemFailed
from batchery.outcomes import Failed
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.commit.listeners import Listeners
from batchery_worker.completion.executor import MAX_HELD_JOBS, CompletionExecutor
from batchery_worker.completion.tracer import Completion, raised
from batchery_worker.in_flight import TaskCall
from batchery_worker.request import LeaseHandle
from support.fake_worker import FakeLeaseStore

FACTS = {"id": "b1", "forward_ms": 1500.0}


class Request:
    """As much of Celery's request as ending needs."""

    def __init__(self, lease: LeaseHandle) -> None:
        self.id = lease.token
        self.lease = lease
        self.acknowledged = False
        self.given_back = False

    def acknowledge(self) -> None:
        self.acknowledged = True

    def reject(self, *, requeue: bool) -> None:
        self.given_back = requeue


class Tracer:
    """Traces nothing; what may be held back is, and some jobs break off."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.replayed: list[str] = []
        self.errors: dict[str, BaseException] = {}

    def run(self, completion: Completion) -> None:
        self.ran.append(completion.task_id)
        if error := self.errors.get(completion.task_id):
            raise error
        completion.traced = (0, f"text {completion.task_id}")
        if completion.may_hold:
            lease: Any = completion.call.lease
            completion.held = SimpleNamespace(lease=lease)  # type: ignore[assignment]

    def replay(self, completion: Completion) -> None:
        self.replayed.append(completion.task_id)
        completion.held = None


class Scene:
    """An executor whose only thread is the test's."""

    executor: Any
    store: Any

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Celery("ends", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.fenced: list[str] = []
        #: What is to be done on the pool's thread.
        self.ends: list[Callable[[], None]] = []
        self.executor = CompletionExecutor(
            app, 1, self.ends.append, lambda call: self.fenced.append(call.task_id), Listeners()
        )
        self.tracer = self.executor.tracer = Tracer()
        self.executor._submit = lambda *_: None
        #: What becomes of the jobs that are written in one step.
        self.finish: Callable[[Sequence[Any]], Any] = lambda jobs: [
            CommitStatus.COMMITTED for _ in jobs
        ]
        monkeypatch.setattr(self.executor, "_finisher", lambda: self)
        self.store = FakeLeaseStore()
        self.told: dict[str, Any] = {}
        self.failed: dict[str, Any] = {}
        self.ended: dict[str, str | None] = {}

    def submit(self, *tokens: str, may_hold: bool = True, info: Any = FACTS) -> list[Request]:
        made = []
        for token in tokens:
            self.store.held.add(token)
            self.store.believed.add(token)
            made.append(Request(LeaseHandle(self.store, token)))
            request: Any = made[-1]
            nothing: Any = None
            call = TaskCall(
                nothing,
                ("task", token, {}),
                partial(self.told.setdefault, token),
                nothing,
                partial(self.failed.setdefault, token),
                request,
            )
            self.executor.submit(
                Completion(
                    task_id=token,
                    call=call,
                    make_outcome=lambda _: None,
                    info=info,
                    on_end=self._note_end,
                    may_hold=may_hold,
                )
            )
        return made

    def _note_end(self, completion: Completion, failure: str | None) -> None:
        self.ended.setdefault(completion.task_id, failure)

    def turn(self) -> list[str]:
        """Completes what is next; returns which jobs were traced."""
        self.tracer.ran.clear()
        self.executor._complete_next()
        ends, self.ends[:] = list(self.ends), []
        for end in ends:
            end()
        return list(self.tracer.ran)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    made.executor.stop()
    worker_state.reset_state()


# Which jobs are taken together


def test_jobs_that_may_be_held_back_are_completed_together_in_order(scene: Scene) -> None:
    scene.submit("1", "2")
    scene.submit("3", may_hold=False)
    scene.submit("4")
    assert [scene.turn() for _ in range(4)] == [["1", "2"], ["3"], ["4"], []]


def test_other_jobs_are_completed_one_by_one(scene: Scene) -> None:
    scene.submit("1", "2", may_hold=False)
    assert [scene.turn() for _ in range(2)] == [["1"], ["2"]]


def test_no_more_jobs_are_held_back_than_one_step_may_write(scene: Scene) -> None:
    scene.submit(*map(str, range(MAX_HELD_JOBS + 1)))
    assert [len(scene.turn()) for _ in range(2)] == [MAX_HELD_JOBS, 1]


# How they end


def test_job_that_was_written_in_one_step_is_not_acknowledged_again(scene: Scene) -> None:
    first, second = scene.submit("1", "2")
    scene.turn()
    assert scene.told == {"1": (0, "text 1", 1.5), "2": (0, "text 2", 1.5)}
    assert first.acknowledged
    assert second.acknowledged
    assert scene.store.believed == set()
    assert scene.ended == {"1": None, "2": None}
    assert scene.tracer.replayed == []


def test_job_that_was_traced_step_by_step_is_acknowledged_by_celery(scene: Scene) -> None:
    (request,) = scene.submit("1", may_hold=False, info=None)
    scene.turn()
    assert scene.told == {"1": (0, "text 1", 0.0)}
    assert not request.acknowledged
    assert scene.store.believed == {"1"}


def test_what_one_step_could_not_write_is_written_step_by_step_unless_another_has_the_job(
    scene: Scene,
) -> None:
    scene.submit("1", "2", "3", "4")
    committed, fenced, tracer = (
        CommitStatus.COMMITTED,
        CommitStatus.FENCED,
        CommitStatus.NEEDS_TRACER,
    )
    scene.finish = lambda _: [fenced, tracer, tracer, committed]
    scene.store.held -= {"3"}
    scene.turn()
    assert scene.fenced == ["1", "3"]
    assert scene.tracer.replayed == ["2"]
    assert set(scene.told) == {"2", "4"}
    assert set(scene.ended) == {"1", "2", "3", "4"}


def test_job_that_another_worker_has_is_not_traced(scene: Scene) -> None:
    scene.submit("1", may_hold=False)
    scene.store.held.clear()
    assert scene.turn() == []
    assert (scene.fenced, scene.told, scene.ended) == (["1"], {}, {"1": None})


def test_job_that_breaks_off_fails_and_the_others_are_completed(scene: Scene) -> None:
    scene.submit("1", "2")
    scene.tracer.errors["1"] = ValueError("undecodable")
    scene.turn()
    assert list(scene.failed) == ["1"]
    assert list(scene.told) == ["2"]
    assert scene.ended == {"1": "ValueError", "2": None}


@pytest.mark.parametrize("is_away", [True, False])
def test_job_whose_backend_is_away_is_given_back(
    scene: Scene, is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheBackend, "exception_safe_to_retry", lambda *_: is_away)
    requests = scene.submit("1", "2")

    def refuse(_: Any) -> Any:
        raise redis.ConnectionError("away")

    scene.finish = refuse
    scene.turn()
    assert [request.given_back for request in requests] == [is_away] * 2
    assert set(scene.failed) == (set() if is_away else {"1", "2"})
    assert set(scene.ended) == {"1", "2"}


@pytest.mark.parametrize("error", [OSError("mail"), KeyError("hook"), redis.ConnectionError("own")])
def test_job_whose_hook_raises_what_a_backend_may_raise_fails(
    scene: Scene, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheBackend, "exception_safe_to_retry", lambda *_: True)
    (request,) = scene.submit("1", may_hold=False)
    scene.tracer.errors["1"] = error
    scene.turn()
    assert not request.given_back
    assert raised(scene.failed["1"]) is error
    assert scene.ended == {"1": type(error).__name__}


class Nosy(Exception):
    """Python cannot print it: `traceback` asks it for its notes."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("outcome", [None, Failed(LookupError("own"))])
def test_job_whose_error_cannot_be_told_fails_with_its_class_and_text(
    scene: Scene, outcome: Any
) -> None:
    scene.submit("1", may_hold=False)
    scene.executor._waiting[0].outcome = outcome
    scene.tracer.errors["1"] = Nosy("as told")
    scene.turn()
    failure = raised(scene.failed["1"])
    assert isinstance(failure, ItemFailed)
    assert str(failure) == ("LookupError: own" if outcome else "Nosy: as told")
    assert scene.ended == {"1": "Nosy"}


def test_job_whose_failure_cannot_be_stored_fails_without_its_error(scene: Scene) -> None:
    (request,) = scene.submit("1", may_hold=False)
    scene.tracer.errors["1"] = ValueError("bug")
    told: list[Any] = []

    def fail(info: Any) -> None:
        told.append(raised(info))
        if len(told) == 1:
            raise LookupError("cannot be stored")

    scene.executor._waiting[0].call.error_callback = fail
    scene.turn()
    assert [type(each) for each in told] == [ValueError, ItemFailed]
    assert not request.given_back
    assert scene.ended == {"1": "ValueError"}


@pytest.mark.parametrize(
    ("error", "given_back"), [(redis.ConnectionError("away"), True), (LookupError("bug"), False)]
)
def test_job_that_celery_cannot_end_is_acknowledged_or_given_back_while_redis_is_away(
    scene: Scene, error: Exception, given_back: bool
) -> None:
    (request,) = scene.submit("1", may_hold=False)

    def fail(_: Any) -> None:
        raise error

    scene.executor._waiting[0].call.callback = fail
    if given_back:
        scene.turn()
    else:
        with pytest.raises(LookupError):
            scene.turn()
    assert request.given_back is given_back
    assert request.acknowledged is not given_back
    assert scene.ended == {"1": None}

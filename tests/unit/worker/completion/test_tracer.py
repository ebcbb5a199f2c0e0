"""The tracer completes one job: state, hooks, signals, and what the outbox holds back."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from billiard.einfo import ExceptionInfo
from celery import Celery, signals
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore, Reject, Retry

from batchery import BatchTask, Failed, RetryAfter, install
from batchery.completion import HeldMessage, JobCompletion, Outbox, completing, current_completion
from batchery.outcomes import Replace
from batchery_worker.commit.listeners import Listeners
from batchery_worker.completion import tracer as tracer_module
from batchery_worker.completion.tracer import Completion, Tracer, is_fenced, raised, tracer_clock
from batchery_worker.in_flight import TaskCall
from batchery_worker.request import LeaseHandle
from support.fake_worker import FakeLeaseStore

FACTS = {"id": "b1", "size": 3, "forward_ms": 1500.0}
SIGNALS = ("task_prerun", "task_success", "task_failure", "task_retry", "task_postrun")

#: Nobody is asked: what is written to this backend is held back.
REDIS = "redis://127.0.0.1:1/0"

calls: list[str] = []


HOOKED, PLAIN = "traced.hooked", "traced.plain"


def nothing_to_compute(items: list[Any]) -> list[Any]:
    raise AssertionError("the device has computed already")


class Hooked(BatchTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        calls.append("before_start")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        calls.append("on_success")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        calls.append("on_failure")

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        calls.append("on_retry")

    def after_return(self, *_: Any) -> None:
        calls.append("after_return")


def app_with(backend: str) -> Celery:
    made = install(Celery("traced", broker="memory://", backend=backend, set_as_current=False))
    for name, base in ((PLAIN, BatchTask), (HOOKED, Hooked)):
        decorate: Any = made.task(base=base, shared=False, name=name)
        decorate(nothing_to_compute)
    return made


app = app_with("cache+memory://")
redis_app = app_with(REDIS)


class FakeStore(FakeLeaseStore):
    """Also remembers which jobs have published messages with dedupe keys."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, str] = {}

    def published(self, token: str, publish_tag: str) -> None:
        self.tags[token] = publish_tag


class FakeChannel:
    """Publishes into a list."""

    def __init__(self) -> None:
        self.published: list[Any] = []

    def publish_once(self, outbox: Outbox, key: str, message: Mapping[str, Any]) -> None:
        self.published.append(message)
        outbox.has_dedupe_keys = True


def call_of(
    job_app: Celery,
    task_id: str,
    task: str = PLAIN,
    *,
    lease: Any = None,
    tag: str | None = "tag",
    embed: Mapping[str, Any] | None = None,
    is_request: bool = True,
) -> TaskCall:
    headers = {"id": task_id, "task": task, "retries": 0, "lang": "py"}
    body = json.dumps([["item"], {}, embed or {}])
    message = SimpleNamespace(properties={} if tag is None else {"publish_tag": tag})
    request: Any = SimpleNamespace(lease=lease, message=message, embed=embed or {})
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731 - three times the same
    return TaskCall(
        target=partial(trace_task_ret, app=job_app),
        args=(task, task_id, headers, body, "application/json", "utf-8"),
        callback=ignore,
        accept_callback=ignore,
        error_callback=ignore,
        request=request if is_request else None,
    )


def completion_of(call: TaskCall, outcome: Any, *, may_hold: bool = False) -> Completion:
    return Completion(
        task_id=call.task_id,
        call=call,
        make_outcome=lambda _: outcome,
        info=FACTS,
        on_end=lambda *_: None,
        may_hold=may_hold,
    )


def complete(task_id: str, outcome: Any, task: str = PLAIN) -> Completion:
    """Completes a job without a lease, whose result goes into memory."""
    completion = completion_of(call_of(app, task_id, task), outcome)
    Tracer(app, Listeners()).run(completion)
    return completion


@pytest.fixture
def store() -> Any:
    return FakeStore()


@pytest.fixture
def connected() -> Iterator[None]:
    """Notes each signal of a task in `calls`, and empties them."""
    calls.clear()
    receivers = {name: partial(note, name) for name in SIGNALS}
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver, weak=False)
    yield
    for name, receiver in receivers.items():
        getattr(signals, name).disconnect(receiver)


def note(name: str, **_: Any) -> None:
    calls.append(name)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ([0.5], "SUCCESS"),
        (None, "SUCCESS"),
        (Failed(LookupError("why")), "FAILURE"),
        (RetryAfter(5), "RETRY"),
        (Ignore(), "PENDING"),
        (Reject("no", requeue=False), "PENDING"),
        (Replace(app.tasks[PLAIN].s("next")), "PENDING"),
    ],
    ids=["value", "none", "failed", "retry", "ignore", "reject", "replace"],
)
def test_outcome_becomes_the_state_of_the_job(
    request: pytest.FixtureRequest, outcome: Any, state: str
) -> None:
    task_id = request.node.callspec.id
    completion = complete(task_id, outcome)
    assert app.AsyncResult(task_id).state == state
    assert bool(completion.traced[0]) == (state != "SUCCESS")


def test_value_is_stored_with_the_facts_of_the_batch() -> None:
    complete("facts", "A")
    stored = app.backend.get_task_meta("facts")
    assert (stored["result"], stored["batch"]) == ("A", FACTS)


def test_failure_is_stored_as_the_exception_of_the_function() -> None:
    complete("failure", Failed(LookupError("why")))
    with pytest.raises(LookupError, match="why"):
        app.AsyncResult("failure").get(timeout=1)


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (RetryAfter(5), Retry),
        (Ignore(), Ignore),
        (Reject("no"), Reject),
        (Failed("why"), Exception),
    ],
)
def test_exception_of_the_tracer_is_read_without_its_wrapper(outcome: Any, kind: type) -> None:
    _, info = complete(f"raised-{kind.__name__}", outcome).traced
    assert isinstance(raised(info), kind)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("A", {"on_success", "after_return", "task_success"}),
        (Failed("why"), {"on_failure", "after_return", "task_failure"}),
        (RetryAfter(5), {"on_retry", "task_retry"}),
        (Ignore(), set()),
    ],
    ids=["success", "failure", "retry", "ignore"],
)
def test_hooks_and_signals_are_called_once(
    connected: None, outcome: Any, expected: set[str]
) -> None:
    complete("hooked", outcome, HOOKED)
    always = {"before_start", "task_prerun", "task_postrun"}
    assert sorted(calls) == sorted(always | expected)


def test_outcome_that_cannot_be_made_is_raised() -> None:
    def broken(_: Any) -> Any:
        raise ValueError("undecodable")

    completion = completion_of(call_of(app, "undecodable"), None)
    completion.make_outcome = broken
    with pytest.raises(ValueError, match="undecodable"):
        Tracer(app, Listeners()).run(completion)


def test_plain_leased_job_may_be_held_back(store: Any) -> None:
    call = call_of(redis_app, "j", lease=LeaseHandle(store, "7"))
    assert Tracer(redis_app, Listeners()).may_hold(call)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": None},
        {"is_request": False},
        {"tag": None},
        {"task": HOOKED},
    ],
    ids=["no lease", "no request", "no tag", "hooks"],
)
def test_job_that_others_may_look_at_is_not_held_back(store: Any, changes: Any) -> None:
    call = call_of(redis_app, "j", **{"lease": LeaseHandle(store, "7"), **changes})
    assert not Tracer(redis_app, Listeners()).may_hold(call)


def test_job_is_not_held_back_where_messages_go_to_another_broker(store: Any) -> None:
    split = app_with(REDIS)
    split.conf.update(broker_read_url="memory://", broker_write_url="redis://127.0.0.1:2/0")
    assert not Tracer(split, Listeners()).may_hold(
        call_of(split, "j", lease=LeaseHandle(store, "7"))
    )


@pytest.fixture
def channel() -> Iterator[FakeChannel]:
    """Each success publishes one message over it, as a callback would be."""
    made = FakeChannel()

    def publish(**_: Any) -> None:
        completion = current_completion()
        assert completion is not None
        assert completion.outbox is not None
        completion.outbox.publish(HeldMessage(made, "queue", {"headers": {"id": "next"}}))

    signals.task_success.connect(publish, weak=False)
    yield made
    signals.task_success.disconnect(publish)


def held_back(store: Any, outcome: Any, app: Celery = redis_app) -> Completion:
    call = call_of(app, "j", lease=LeaseHandle(store, "7"))
    completion = completion_of(call, outcome, may_hold=True)
    Tracer(app, Listeners()).run(completion)
    return completion


def test_messages_and_result_of_a_success_are_held_back(store: Any, channel: FakeChannel) -> None:
    held = held_back(store, "A").held
    assert held is not None
    assert held.lease == LeaseHandle(store, "7")
    assert [each.message for each in held.outbox.messages] == [{"headers": {"id": "next"}}]
    assert json.loads(held.outbox.result)["result"] == "A"
    assert (channel.published, store.tags) == ([], {})


def test_state_of_a_retry_is_held_back(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker does not subscribe to the results of jobs that it sends.
    monkeypatch.setattr("celery.backends.redis.task_join_will_block", lambda: True)
    held = held_back(store, RetryAfter(5)).held
    assert held is not None
    assert json.loads(held.outbox.result)["status"] == "RETRY"


@pytest.mark.parametrize("outcome", [Failed("why"), Ignore(), Reject("no")])
def test_outcome_that_celery_handles_its_own_way_is_not_held_back(store: Any, outcome: Any) -> None:
    assert held_back(store, outcome, app).held is None


def test_replay_publishes_with_dedupe_keys_and_then_stores(
    store: Any, channel: FakeChannel
) -> None:
    completion = held_back(store, "A")
    assert completion.held is not None
    stored: list[str] = []
    completion.held.outbox.hold_result(b"{}", 60, lambda: stored.append("result"))
    Tracer(redis_app, Listeners()).replay(completion)
    assert channel.published == [{"headers": {"id": "next"}}]
    assert stored == ["result"]
    assert store.tags == {"7": "tag"}
    assert completion.held is None


def test_message_that_was_not_held_back_is_noted_with_its_lease(
    store: Any, channel: FakeChannel
) -> None:
    call = call_of(app, "noted", lease=LeaseHandle(store, "7"))
    Tracer(app, Listeners()).run(completion_of(call, "A"))
    assert channel.published == [{"headers": {"id": "next"}}]
    assert store.tags == {"7": "tag"}


def test_clock_jumps_by_the_device_s_time_when_the_task_has_answered() -> None:
    completion = JobCompletion("j", outcome="A", is_answered=False, info=FACTS)
    with completing(completion):
        assert tracer_clock() - monotonic() < 1
        completion.answer()
        assert tracer_clock() - monotonic() > 1
    assert tracer_clock() - monotonic() < 1


@pytest.mark.parametrize(("held", "expected"), [({"7"}, False), (set(), True)])
def test_job_is_fenced_if_redis_has_no_lease(store: Any, held: set[str], expected: bool) -> None:
    store.held = held
    assert is_fenced(call_of(app, "j", lease=LeaseHandle(store, "7"))) is expected


def test_job_without_a_lease_is_not_fenced() -> None:
    assert not is_fenced(call_of(app, "j"))


def test_job_is_not_fenced_while_redis_is_away(store: Any) -> None:
    def away(_: Any) -> set[str]:
        raise redis.ConnectionError("refused")

    store.still_held = away
    assert not is_fenced(call_of(app, "j", lease=LeaseHandle(store, "7")))


def test_unwrapped_exception_is_read_as_it_is() -> None:
    try:
        raise LookupError("why")
    except LookupError:
        info = ExceptionInfo()
    assert str(raised(info)) == "why"


@pytest.mark.parametrize(
    ("is_begun", "task_id", "expected"),
    [(True, "j", True), (True, "another", False), (False, "j", False)],
)
def test_only_the_job_whose_listeners_were_called_has_begun(
    is_begun: bool, task_id: str, expected: bool
) -> None:
    call = call_of(app, "j")
    call.listened = SimpleNamespace() if is_begun else None
    with completing(completion_of(call, "A")):
        assert (tracer_module._begun(task_id) is not None) == expected
    # Such as of an ordinary job.
    with completing(JobCompletion("j")):
        assert tracer_module._begun("j") is None
    assert tracer_module._begun("j") is None

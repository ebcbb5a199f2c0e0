"""What listens to a job is called as by Celery's tracer, in two parts."""

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, current_task, signals

from batchery import BatchTask, install
from batchery_worker.commit.listeners import Listeners, Stacks
from batchery_worker.in_flight import TaskCall

URL = "redis://127.0.0.1:1/0"  # nobody is asked anything

noted: ContextVar[str] = ContextVar("noted", default="")


class Noting(BatchTask):
    """Writes down what it is told, and what it sees."""

    abstract = True
    seen: list[Any]

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self.seen.append(("before_start", task_id, args, kwargs, current_task.request.id))

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.seen.append(("on_success", retval, task_id, args, kwargs, self.request.headers))
        raise LookupError("a broken hook")

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        self.seen.append(("after_return", status, retval, task_id, args, kwargs, einfo))


def same(items: list[Any]) -> list[Any]:
    return items


def make_task(base: type = BatchTask, **options: Any) -> Any:
    app = install(Celery("listened", broker=URL, backend=URL, set_as_current=False))
    decorate: Any = app.task(base=base, shared=False, name="listened", **options)
    decorate(same)
    task: Any = app.tasks["listened"]
    task.seen = []
    return task


def call_of(task_id: str = "j1") -> TaskCall:
    message = {"id": task_id, "task": "listened", "args": ["x"], "kwargs": {"n": 1}}
    message["headers"] = {"tenant": "acme"}
    nothing: Any = SimpleNamespace(embed=None, lease=None)
    return TaskCall(nothing, ("listened", task_id, message), nothing)


def before(listeners: Listeners, task: Any, call: TaskCall) -> None:
    with Stacks(task) as stacks:
        listeners.before(task, call, stacks)


def after(
    listeners: Listeners, task: Any, call: TaskCall, value: Any, text: str, runtime_s: float
) -> None:
    with Stacks(task) as stacks:
        listeners.after(task, call, value, text, runtime_s, stacks)


@contextlib.contextmanager
def connected(name: str, receiver: Any, sender: Any = None) -> Iterator[None]:
    signal = getattr(signals, name)
    signal.connect(receiver, sender=sender)
    try:
        yield
    finally:
        signal.disconnect(receiver, sender=sender)


def test_hooks_see_their_job_in_the_tracer_s_order(caplog: pytest.LogCaptureFixture) -> None:
    task, call, listeners = make_task(Noting), call_of(), Listeners()
    before(listeners, task, call)
    before(listeners, task, call)
    assert task.seen == [("before_start", "j1", ["x"], {"n": 1}, "j1")]
    after(listeners, task, call, "X", "'X'", 0.5)
    assert task.seen[1:] == [
        ("on_success", "X", "j1", ["x"], {"n": 1}, {"tenant": "acme"}),
        ("after_return", "SUCCESS", "X", "j1", ["x"], {"n": 1}, None),
    ]
    assert task.request_stack.top is None
    (line,) = caplog.messages
    assert line == ("Task listened[j1] on_success handler raised: LookupError('a broken hook')")


def test_receivers_get_what_the_tracer_sends() -> None:
    task, call, listeners, seen = make_task(), call_of(), Listeners(), list[Any]()

    def receive(signal: Any = None, sender: Any = None, **named: Any) -> None:
        named.pop("task", None)
        seen.append((signal.name, sender is task, named))

    with contextlib.ExitStack() as stack:
        for name in ("task_prerun", "task_success", "task_postrun"):
            stack.enter_context(connected(name, receive))
        before(listeners, task, call)
        after(listeners, task, call, "X", "'X'", 0.5)
    job = {"task_id": "j1", "args": ["x"], "kwargs": {"n": 1}}
    assert seen == [
        ("task_prerun", True, job),
        ("task_success", True, {"result": "X", "runtime": 0.5}),
        ("task_postrun", True, {**job, "retval": "X", "state": "SUCCESS"}),
    ]


def test_what_one_part_sets_the_other_finds_and_no_other_job() -> None:
    task, listeners, seen = make_task(), Listeners(), list[str]()
    jobs = [call_of("a"), call_of("b")]

    def note(task_id: str = "", **_: Any) -> None:
        noted.set(task_id)

    def read(**_: Any) -> None:
        seen.append(noted.get())

    with connected("task_prerun", note), connected("task_postrun", read):
        for job in jobs:
            before(listeners, task, job)
        for job in jobs:
            after(listeners, task, job, None, "", 0.0)
    assert seen == ["a", "b"]
    assert noted.get() == ""


def test_what_before_start_raises_is_kept() -> None:
    def before_start(*_: Any) -> None:
        raise LookupError("not this one")

    task, call = make_task(before_start=before_start), call_of()
    before(Listeners(), task, call)
    assert repr(call.listened.error) == "LookupError('not this one')"


def test_success_is_logged_between_the_receivers_of_success_and_postrun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery.app.trace")
    task, seen = make_task(), list[int]()

    def count(**_: Any) -> None:
        seen.append(len(caplog.messages))

    with connected("task_success", count), connected("task_postrun", count):
        after(Listeners(), task, call_of(), "X", "'X'", 0.25)
    assert seen == [0, 1]
    assert caplog.messages == ["Task listened[j1] succeeded in 0.25s: 'X'"]

"""Jobs completed by Celery's own tracer, with an outcome that was computed elsewhere."""

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore, Reject, Retry
from redis.exceptions import OutOfMemoryError

from batchery import BatchTask, Failed, RetryAfter, install
from batchery_worker.commit.listeners import Listeners
from batchery_worker.completion.executor import CompletionExecutor
from batchery_worker.completion.tracer import Completion
from batchery_worker.in_flight import TaskCall
from support.patience import patient

app = install(
    Celery("completed", broker="memory://", backend="cache+memory://", set_as_current=False)
)
computed_here: list[Any] = []
hooks: list[tuple[str, Any, Any]] = []


class Hooked(BatchTask):
    name = "completed.hooked"

    def run(self, items: list[Any]) -> list[Any]:
        computed_here.extend(items)
        return items

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        hooks.append(("success", retval, list(args)))

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        hooks.append(("failure", exc, list(args)))


hooked: Any = app.register_task(Hooked())
FACTS = {"id": "b1", "size": 3, "forward_ms": 1500.0}


class Harness:
    """The pool's thread, as far as `CompletionExecutor` knows it."""

    def __init__(self) -> None:
        self.mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.executor = CompletionExecutor(app, 2, self.mailbox.put, lambda _: None, Listeners())
        self.answers: list[Any] = []
        self.errors: list[Any] = []
        self.settled: list[str | None] = []

    def complete(
        self,
        task_id: str,
        outcome: Callable[[Any], Any],
        *,
        callback: Callable[[Any], None] | None = None,
        info: Any = FACTS,
        body: Any = None,
    ) -> None:
        message = {"id": task_id, "task": hooked.name, "retries": 0, "lang": "py"}
        text = json.dumps(body or [["item"], {}, {}])
        call = TaskCall(
            target=partial(trace_task_ret, app=app),
            args=(hooked.name, task_id, message, text, "application/json", "utf-8"),
            callback=callback or self.answers.append,
            accept_callback=lambda *_: None,
            error_callback=self.errors.append,
            request=None,
        )
        self.submit(call, outcome, info)
        self.mailbox.get(timeout=patient(30))()

    def submit(self, call: TaskCall, outcome: Callable[[Any], Any], info: Any = None) -> None:
        self.executor.submit(
            Completion(
                task_id=call.task_id,
                call=call,
                make_outcome=outcome,
                info=info,
                on_end=lambda _, failure: self.settled.append(failure),
                may_hold=False,
            )
        )


@pytest.fixture
def harness() -> Iterator[Harness]:
    computed_here.clear()
    hooks.clear()
    made = Harness()
    yield made
    made.executor.stop()


def test_a_value_is_stored_with_the_facts_of_its_batch(harness: Harness) -> None:
    harness.complete("c-1", lambda _: [0.5])
    assert app.AsyncResult("c-1").get(timeout=1) == [0.5]
    assert app.backend.get_task_meta("c-1")["batch"] == FACTS
    assert harness.settled == [None]
    ((is_error, _, runtime_s),) = harness.answers
    assert (bool(is_error), runtime_s) == (False, 1.5)
    assert computed_here == []


def test_the_log_and_the_signal_tell_the_time_of_the_device(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    runtimes: list[float] = []

    @signals.task_success.connect(sender=app.tasks[hooked.name], weak=False)
    def succeeded(runtime: float, **_: Any) -> None:
        runtimes.append(runtime)

    try:
        with caplog.at_level("INFO", "celery.app.trace"):
            hooked.__trace__ = None  # made when the log said nothing
            harness.complete("c-timed", lambda _: "A")
            harness.complete("c-untimed", lambda _: "A", info=None)
    finally:
        signals.task_success.disconnect(succeeded, sender=app.tasks[hooked.name])
    timed, untimed = runtimes
    assert timed >= 1.5 > untimed
    said: list[Any] = [record.args for record in caplog.records]
    assert [each["runtime"] for each in said if "return_value" in each] == runtimes


class RequestOfAFullRedis:
    """A request whose failure cannot be stored."""

    id, name, lease = "c-full", Hooked.name, None
    embed: Mapping[str, Any] = MappingProxyType({})
    message = SimpleNamespace(properties={})

    def __init__(self) -> None:
        self.given_back = False

    def on_failure(self, _: Any) -> None:
        raise OutOfMemoryError("command not allowed when used memory > 'maxmemory'")

    def reject(self, *, requeue: bool) -> None:
        self.given_back = requeue


def test_job_whose_failure_finds_redis_full_is_given_back(harness: Harness) -> None:
    def broken(_: Any) -> Any:
        raise ValueError("undecodable")

    request: Any = RequestOfAFullRedis()
    message = {"id": request.id, "task": hooked.name, "retries": 0, "lang": "py"}
    call = TaskCall(
        target=partial(trace_task_ret, app=app),
        args=(hooked.name, request.id, message, "[[1], {}, {}]", "application/json", "utf-8"),
        callback=harness.answers.append,
        accept_callback=lambda *_: None,
        error_callback=request.on_failure,
        request=request,
    )
    harness.submit(call, broken)
    harness.mailbox.get(timeout=patient(30))()
    assert request.given_back
    assert harness.settled == ["ValueError"]


def test_job_that_was_in_no_batch_is_stored_without_facts(harness: Harness) -> None:
    harness.complete("c-2", lambda _: 1, info=None)
    assert "batch" not in app.backend.get_task_meta("c-2")


def test_hooks_get_the_arguments_of_their_own_job(harness: Harness) -> None:
    harness.complete("c-3", lambda _: "A")
    harness.complete("c-4", lambda _: Failed(LookupError("b")))
    assert hooks[0] == ("success", "A", ["item"])
    assert hooks[1][0] == "failure"
    assert isinstance(hooks[1][1], LookupError)
    assert hooks[1][2] == ["item"]


def test_a_failure_is_stored_and_counted(harness: Harness) -> None:
    harness.complete("c-5", lambda _: Failed(LookupError("why")))
    with pytest.raises(LookupError, match="why"):
        app.AsyncResult("c-5").get(timeout=1)
    assert harness.settled == ["LookupError"]
    assert harness.errors == []


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [(Ignore(), Ignore), (Reject("no", requeue=False), Reject), (RetryAfter(1), Retry)],
)
def test_ignore_reject_and_retry_are_no_failures(
    harness: Harness, outcome: Any, kind: type
) -> None:
    harness.complete(f"c-{kind.__name__}", lambda _: outcome)
    ((is_error, info, _),) = harness.answers
    assert is_error
    assert isinstance(info.exception, kind)
    assert harness.settled == [None]


def test_an_outcome_that_cannot_be_made_fails_the_job(harness: Harness) -> None:
    def broken(_: Any) -> Any:
        raise ValueError("undecodable")

    harness.complete("c-6", broken)
    assert harness.answers == []
    assert "undecodable" in harness.errors[0].traceback
    assert harness.settled == ["ValueError"]


def test_callback_that_raises_still_settles_its_job(harness: Harness) -> None:
    def angry(_: Any) -> None:
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        harness.complete("c-7", lambda _: 1, callback=angry)
    assert harness.settled == [None]


def test_an_outcome_never_reaches_another_job_of_the_same_thread(harness: Harness) -> None:
    """A receiver that runs another batch task inside the tracer gets that task's own answer."""
    seen: list[Any] = []

    @signals.task_prerun.connect(weak=False)
    def nested(task_id: str, **_: Any) -> None:
        if task_id == "c-8":
            seen.append(hooked.apply(["inner"], task_id="c-9").get())

    try:
        harness.complete("c-8", lambda _: "outer")
    finally:
        signals.task_prerun.disconnect(nested)
    assert seen == ["inner"]
    assert app.AsyncResult("c-8").get(timeout=1) == "outer"


def answer(value: Any, _: Any) -> Any:
    return value


def test_many_jobs_are_completed_on_few_threads_each_with_its_own_outcome() -> None:
    harness = Harness()
    message: dict[str, Any] = {"task": hooked.name, "lang": "py"}
    for number in range(200):
        task_id = f"many-{number}"
        call = TaskCall(
            partial(trace_task_ret, app=app),
            (
                hooked.name,
                task_id,
                {**message, "id": task_id},
                '[["item"], {}, {}]',
                "application/json",
                "utf-8",
            ),
            harness.answers.append,
            lambda *_: None,
            harness.errors.append,
            None,
        )
        harness.submit(call, partial(answer, number))
    harness.executor.stop()
    while not harness.mailbox.empty():
        harness.mailbox.get()()
    assert harness.settled == [None] * 200
    assert [app.AsyncResult(f"many-{n}").get(timeout=1) for n in range(200)] == list(range(200))
    assert "item" not in computed_here

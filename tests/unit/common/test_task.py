"""Batch tasks as callers see them: directly, eagerly, and on their way into a queue."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

import celery
import numpy as np
import pytest
from celery import Celery, Task, shared_task, uuid
from celery.exceptions import Ignore, MaxRetriesExceededError, Reject
from kombu.exceptions import EncodeError
from kombu.transport import memory

from batchery import (
    BatchArgumentError,
    BatchTask,
    Failed,
    InvalidItem,
    ItemFailed,
    RetryAfter,
    UnserialisableResult,
    install,
)
from batchery_worker.device.answerer import sendable


@pytest.fixture(autouse=True)
def _no_queues() -> None:
    """All connections of a process share the queues of the memory transport."""
    memory.Channel.queues.clear()


@pytest.fixture
def app() -> Iterator[Celery]:
    app = install(
        Celery("tasks", broker="memory://", backend="cache+memory://", set_as_current=False)
    )
    yield app
    app.close()


def make(app: Celery, function: Any, **options: Any) -> Any:
    """Makes a batch task; untyped, as callers of Celery use lists where its stubs want tuples."""
    if function.__name__ == "<lambda>":
        function.__name__ = "function"  # Celery spells the signature as source code
    decorate: Any = app.task(base=BatchTask, shared=False, **options)
    return decorate(function)


def shout(texts: list[str], *, mark: str = "") -> list[str]:
    return [text.upper() + mark for text in texts]


def waiting(app: Celery) -> list[Any]:
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        messages = []
        own = [task.own_queue for task in app.tasks.values() if isinstance(task, BatchTask)]
        for queue in filter(None, [app.conf.task_default_queue, *own]):
            channel.queue_declare(queue)
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                messages.append(message)
        return messages


# Called in this process


def test_a_direct_call_runs_a_batch_of_one(app: Celery) -> None:
    task = make(app, shout)
    assert task("a") == "A"
    assert task("a", mark="!") == "A!"
    assert task.run(["a", "b"]) == ["A", "B"]
    assert task.run_batch(["a"], {"mark": "?"}) == ["A?"]


def test_a_list_is_one_item(app: Celery) -> None:
    task = make(app, lambda items: [len(item) for item in items], name="len")
    assert task(["a", "b", "c"]) == 3


def test_apply_and_always_eager_answer_like_a_worker(app: Celery) -> None:
    task = make(app, shout)
    assert task.apply(["a"], {"mark": "!"}).get() == "A!"
    app.conf.task_always_eager = True
    assert task.delay("a").get() == "A"
    assert task.apply_async(["a"], {"mark": "?"}).get() == "A?"
    assert [result.get() for result in task.submit_many(["a", "b"])] == ["A", "B"]


@pytest.mark.parametrize("value", [object(), {"a set"}, lambda: None])
def test_an_eager_result_that_json_cannot_write_fails_as_in_a_worker(
    app: Celery, value: Any
) -> None:
    task = make(app, lambda items: [value if item == "bad" else item for item in items])
    with pytest.raises(UnserialisableResult) as from_worker:
        raise sendable(value).exception
    app.conf.task_always_eager = True
    for call in (task.apply, task.apply_async):
        with pytest.raises(UnserialisableResult) as eager:
            call(("bad",)).get()
        # Without the address of the object.
        assert str(eager.value).split(" at ")[0] == str(from_worker.value).split(" at ")[0]
        assert call(("good",)).get() == "good"
    header = {"batchery": {"v": 1, "n": 2}}
    failed, good = task.apply((["bad", "good"],), headers=header).get()
    assert (failed["error"]["type"], good) == ("UnserialisableResult", {"ok": "good"})


def test_an_eager_argument_that_json_cannot_write_is_refused_as_by_delay(app: Celery) -> None:
    task = make(app, lambda items, **_: items)
    with pytest.raises(EncodeError) as refused:
        task.delay({"a set"})
    for args, keywords in (({"a set"},), {}), (("a",), {"tag": {"a set"}}):
        with pytest.raises(EncodeError) as eager:
            task.apply(args, keywords)
        assert str(eager.value) == str(refused.value)


def test_an_array_is_refused_with_what_to_send(app: Celery) -> None:
    task = make(app, lambda items, **_: items)
    for call in (task.delay, partial(task.submit_many, keywords={})):
        with pytest.raises(EncodeError, match=r"item .*JSON serializable; send its tolist\(\)"):
            call(np.ones((1, 3)))


def test_an_eager_call_gives_and_gets_what_a_worker_would(app: Celery) -> None:
    got = []
    when = datetime(2026, 1, 2, tzinfo=UTC)

    def function(items: list[Any]) -> list[Any]:
        got.extend(items)
        return [(1, {2: when})] * len(items)

    task = make(app, function)
    app.conf.task_always_eager = True
    for call in (task.apply, task.apply_async):
        assert call(((1, {"when": when}),)).get() == [1, {"2": when}]
    assert got == [[1, {"when": when}]] * 2
    # A direct call is a function's: it takes and gives what it likes.
    assert task((1,)) == (1, {2: when})


def test_a_bound_function_gets_its_task(app: Celery) -> None:
    def named(self: BatchTask, items: list[str]) -> list[str]:
        return [f"{self.name}:{self.request.id}:{item}" for item in items]

    task = make(app, named, bind=True, name="named")
    assert task("a") == "named:None:a"
    assert task.apply(["a"], task_id="7").get() == "named:7:a"


def test_a_class_is_a_batch_task_too(app: Celery) -> None:
    class Shelf(BatchTask):
        name = "shelf"
        max_batch_size = 3

        def run(self, items: list[int], *, step: int = 1) -> list[int]:
            return [item + step for item in items]

    shelf: Any = app.register_task(Shelf())
    assert shelf(1) == 2
    assert shelf.apply([1], {"step": 5}).get() == 6
    assert (shelf.max_batch_size, shelf.acks_late, shelf.serializer) == (3, True, "json")


def test_a_method_of_an_object_is_a_batch_task_too(app: Celery) -> None:
    class Scale:
        factor = 3

        def weigh(self, items: list[int]) -> list[int]:
            return [self.factor * item for item in items]

    task = make(app, Scale().weigh, name="weigh")
    assert task(2) == 6
    assert task.apply([2]).get() == 6


def test_a_coroutine_is_a_batch_task_too(app: Celery) -> None:
    async def whisper(texts: list[str]) -> list[str]:
        return [text.lower() for text in texts]

    assert make(app, whisper)("A") == "a"


def test_many_threads_may_call_at_once(app: Celery) -> None:
    task = make(app, shout, autoretry_for=(OSError,))
    assert task.name  # Celery itself makes a task at its first use, and not safely
    together = threading.Barrier(16)

    def call(number: int) -> tuple[str, str]:
        together.wait(30)
        return task(f"d{number}"), task.apply([f"e{number}"]).get()

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(call, range(16)))
    assert answers == [(f"D{number}", f"E{number}") for number in range(16)]


# Outcomes


def answering(app: Celery, outcome: Any, **options: Any) -> Any:
    return make(app, lambda items: [outcome for _ in items], name="answering", **options)


def test_a_failure_raises_what_it_says(app: Celery) -> None:
    for outcome, kind in ((Failed("why"), ItemFailed), (Failed(LookupError("why")), LookupError)):
        task = make(app, lambda _, outcome=outcome: [outcome], name=f"fails-{kind.__name__}")
        with pytest.raises(kind, match="why"):
            task("a")
        result = task.apply(["a"])
        assert result.state == "FAILURE"
        with pytest.raises(kind, match="why"):
            result.get()


def test_exception_of_a_function_is_raised_with_its_traceback_as_text(app: Celery) -> None:
    task = make(app, lambda items: [1 // item for item in items], name="divide")
    with pytest.raises(ZeroDivisionError):
        task(0)
    assert "ZeroDivisionError" in task.apply([0]).traceback


@pytest.mark.parametrize(
    ("outcome", "state"), [(Ignore(), "IGNORED"), (Reject("no", requeue=False), "REJECTED")]
)
def test_ignore_and_reject_are_celerys_own(app: Celery, outcome: Any, state: str) -> None:
    task = answering(app, outcome)
    assert task.apply(["a"]).state == state
    with pytest.raises(type(outcome)):
        task("a")


def counting(app: Celery, outcomes: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    calls: list[Any] = []

    def function(items: list[Any]) -> list[Any]:
        calls.append(list(items))
        outcome = outcomes[min(len(calls), len(outcomes)) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return [outcome]

    return make(app, function, name="counting", **options), calls


def test_a_retry_runs_again_with_the_same_item(app: Celery) -> None:
    task, calls = counting(app, [RetryAfter(0), RetryAfter(0, ConnectionError("x")), "done"])
    assert task.apply(["a"]).get() == "done"
    assert calls == [["a"]] * 3


def test_retries_end_with_their_error_or_celerys_own(app: Celery) -> None:
    task, calls = counting(app, [RetryAfter(0, ConnectionError("down"))], max_retries=2)
    with pytest.raises(ConnectionError, match="down"):
        task.apply(["a"]).get()
    assert len(calls) == 3
    other = make(app, lambda _: [RetryAfter(0)], name="other", max_retries=1)
    with pytest.raises(MaxRetriesExceededError):
        other.apply(["a"]).get()


def test_a_direct_call_does_not_wait_for_a_retry(app: Celery) -> None:
    with pytest.raises(ConnectionError, match="down"):
        answering(app, RetryAfter(60, ConnectionError("down")))("a")


def test_autoretry_sees_the_exception_of_one_job(app: Celery) -> None:
    task, calls = counting(
        app, [ConnectionError("down"), "up"], autoretry_for=(OSError,), default_retry_delay=0
    )
    assert task.apply(["a"]).get() == "up"
    assert calls == [["a"], ["a"]]
    assert task.run(["bare"]) == ["up"]


@pytest.mark.parametrize(
    ("options", "attempts"),
    [
        ({"retry_backoff": True, "retry_backoff_max": 0, "max_retries": 2}, 3),
        ({"retry_kwargs": {"max_retries": 1, "countdown": 0}}, 2),
        ({"dont_autoretry_for": (ConnectionError,)}, 1),
    ],
)
def test_autoretry_gives_up(app: Celery, options: dict[str, Any], attempts: int) -> None:
    task, calls = counting(app, [ConnectionError("down")], autoretry_for=(OSError,), **options)
    for _ in range(2):  # What one job has used up is not missing to the next one.
        calls.clear()
        with pytest.raises(ConnectionError, match="down"):
            task.apply(["a"]).get()
        assert len(calls) == attempts


def test_hooks_get_the_arguments_of_their_own_job(app: Celery) -> None:
    seen: list[Any] = []

    class Hooked(BatchTask):
        name = "hooked"

        def run(self, items: list[str], *, mark: str = "") -> list[Any]:
            return [Failed("why") if item == "bad" else item for item in items]

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            seen.append(("success", retval, list(args), kwargs))

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            seen.append(("failure", str(exc), list(args), kwargs))

    task: Any = app.register_task(Hooked())
    task.apply(["good"], {"mark": "!"})
    task.apply(["bad"])
    assert seen == [("success", "good", ["good"], {"mark": "!"}), ("failure", "why", ["bad"], {})]


# Packed messages, on any pool


def test_a_packed_job_answers_for_each_of_its_items(app: Celery) -> None:
    task = make(app, lambda items: [1 / item for item in items], name="invert")
    result = task.apply([[1, 0, 4]], headers={"batchery": {"v": 1, "n": 3}})
    one, two, three = result.get()
    assert (one, three) == ({"ok": 1.0}, {"ok": 0.25})
    assert two["error"]["type"] == "ZeroDivisionError"


def test_a_malformed_packed_job_fails(app: Celery) -> None:
    task = make(app, shout)
    with pytest.raises(InvalidItem, match="n=2, but the argument is 1 item"):
        task.apply([["a"]], headers={"batchery": {"v": 1, "n": 2}}).get()


def test_the_header_of_a_packed_job_does_not_reach_calls_inside_it(app: Celery) -> None:
    inner = make(app, lambda items: [len(item) for item in items], name="inner")
    outer = make(app, lambda items: [inner(["x", item]) for item in items], name="outer")
    result = outer.apply([["a", "b"]], headers={"batchery": {"v": 1, "n": 2}})
    assert result.get() == [{"ok": 2}, {"ok": 2}]


# Refusals


@pytest.mark.parametrize("args", [(), ("a", "b"), ("a", "b", "c")])
def test_anything_but_one_positional_argument_is_refused(app: Celery, args: Any) -> None:
    task = make(app, shout, typing=False)
    problem = f"exactly one positional argument, the item, but got {len(args)}"
    calls: list[Callable[[], Any]] = [
        lambda: task(*args),
        lambda: task.delay(*args),
        lambda: task.apply_async(args),
        lambda: task.apply(args).get(),
        lambda: task.s(*args).delay(),
        lambda: task.s(*args).apply().get(),
    ]
    for call in calls:
        with pytest.raises(BatchArgumentError, match=problem):
            call()
    assert waiting(app) == []


def test_item_that_is_given_by_name_is_refused_with_the_name(app: Celery) -> None:
    task = make(app, shout, typing=False)
    calls: list[Callable[[], Any]] = [
        lambda: task(texts="a"),
        lambda: task.delay(texts="a"),
        lambda: task.apply(kwargs={"texts": "a"}).get(),
    ]
    for call in calls:
        with pytest.raises(BatchArgumentError, match="and texts=; give the item without a name"):
            call()
    assert waiting(app) == []


def test_list_in_the_place_of_an_item_is_explained(app: Celery) -> None:
    task = make(app, shout)
    with pytest.raises(AttributeError, match="'upper'; the item is a list: send several items"):
        task(["a", "b"])


# On the way into a queue


def test_a_job_is_a_stock_celery_message(app: Celery) -> None:
    task = make(app, shout, name="shout")
    sent = task.apply_async(["a"], {"mark": "!"}, headers={"batchery": {"v": 1}})
    (message,) = waiting(app)
    assert message.headers["task"] == "shout"
    assert message.headers["id"] == sent.id
    assert message.headers["batchery"] == {"v": 1}
    args, kwargs, _ = message.payload
    assert (args, kwargs) == (["a"], {"mark": "!"})
    assert message.content_type == "application/json"


def test_many_jobs_are_submitted_in_order_with_results_of_their_own(app: Celery) -> None:
    task = make(app, shout, name="shout")
    results = task.submit_many((str(n) for n in range(50)), {"mark": "!"}, priority=3)
    messages = waiting(app)
    assert [message.payload[0] for message in messages] == [[str(n)] for n in range(50)]
    assert [message.headers["id"] for message in messages] == [each.id for each in results]
    assert len({each.id for each in results}) == 50
    assert {message.properties["priority"] for message in messages} == {3}
    assert all(message.payload[1] == {"mark": "!"} for message in messages)


def test_many_jobs_may_share_a_producer_and_none_is_no_error(app: Celery) -> None:
    task = make(app, shout, name="shout")
    assert list(task.submit_many([])) == []
    with app.producer_pool.acquire(block=True) as producer:
        assert len(list(task.submit_many(["a", "b"], producer=producer))) == 2
    assert len(waiting(app)) == 2


def test_celerys_own_primitives_build(app: Celery) -> None:
    task = make(app, shout, name="shout")
    assert task.map(["a", "b"]).apply().get() == ["A", "B"]
    assert task.starmap([("a",), ("b",)]).apply().get() == ["A", "B"]
    assert task.chunks([("a",), ("b",), ("c",)], 2).group().apply().get() == [["A", "B"], ["C"]]
    assert (task.s("a") | task.s(mark="!")).apply().get() == "A!"
    assert task.si("a").apply().get() == "A"


def test_every_message_says_when_it_was_sent(app: Celery) -> None:
    task = make(app, shout, name="said")
    before_s = time.time() - 0.001
    task.delay("a")
    task.apply_async(("b",), tenant="acme", deadline_s=5)
    # As a retry has it, or the next step of a chain: sent anew.
    task.apply_async(("c",), headers={"batchery_sent_at": 7.0, "mine": 1})
    first, second, third = (message.headers for message in waiting(app))
    for headers in (first, second, third):
        assert before_s <= headers["batchery_sent_at"] <= time.time() + 0.001
    assert (second["batchery_tenant"], third["mine"]) == ("acme", 1)


def test_the_headers_of_the_caller_stay_as_they_are(app: Celery) -> None:
    headers = {"mine": 1}
    make(app, shout).apply_async(("a",), headers=headers)
    assert headers == {"mine": 1}


# The app's own base class


class ShopTask(Task):  # type: ignore[type-arg]
    abstract = True
    rate_limit = "7/m"
    ended: ClassVar[list[Any]] = []

    def apply_async(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, **options: Any
    ) -> Any:
        options["headers"] = {**(options.get("headers") or {}), "shop": "17"}
        return super().apply_async(args, kwargs, **options)

    def on_success(self, retval: Any, *_: Any) -> None:
        self.ended.append(retval)


class ShopBatchTask(BatchTask):
    abstract = True
    max_batch_size = 5


def test_base_class_of_the_app_keeps_its_headers_and_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state: Any = celery._state
    # It becomes the current one, to which a shared task belongs.
    monkeypatch.setattr(state._tls, "current_app", None)
    app = install(Celery("own", broker="memory://", backend="cache+memory://", task_cls=ShopTask))
    # No app of another test gets the shared task.
    monkeypatch.setattr(state, "_get_active_apps", lambda: [app])
    app.conf.task_default_queue = f"own-{uuid()}"
    try:
        shared: Any = shared_task(base=BatchTask)
        for task in (make(app, shout, name="plain"), shared(shout)):
            task.delay("a")
            assert [message.headers["shop"] for message in waiting(app)] == ["17"]
            assert (task.rate_limit, task.acks_late, task.serializer) == ("7/m", True, "json")
            assert task.apply(["b"]).get() == "B"
            assert ShopTask.ended.pop() == "B"
            assert task("c") == "C"
    finally:
        app.close()


def test_base_class_of_the_app_may_be_a_batch_task() -> None:
    with install(
        Celery("own", broker="memory://", task_cls=ShopBatchTask, set_as_current=False)
    ) as app:
        assert make(app, shout).max_batch_size == 5


def test_function_that_forgot_that_it_gets_a_list_is_given_a_hint(app: Celery) -> None:
    def forgetful(text: Any) -> Any:
        return text.upper()

    with pytest.raises(AttributeError, match="forgetful gets a list of items, not one: loop over"):
        make(app, forgetful)("a")

    def guilty_of_something_else(items: list[Any]) -> list[Any]:
        return [item.upper() for item in items]

    with pytest.raises(AttributeError, match=r"object has no attribute 'upper'$"):
        make(app, guilty_of_something_else)(1)


def reverse(text: str) -> str:
    return text[::-1]


def reverse_by_name(text: "str") -> str:
    return text[::-1]


def count(found: dict[str, int]) -> int:
    return len(found)


def count_bound(self: BatchTask, number: int) -> int:
    return number


@pytest.mark.parametrize(
    ("function", "name"),
    [(reverse, "str"), (reverse_by_name, "str"), (count, "dict"), (count_bound, "int")],
)
def test_a_function_for_one_item_is_refused(function: Any, name: str) -> None:
    """It would give each caller the result of another one."""
    app = Celery("one", set_as_current=False)
    bound = function is count_bound
    with pytest.raises(
        BatchArgumentError, match=rf"annotated {name}, but it gets a list.*{name}\]"
    ):
        app.task(base=BatchTask, shared=False, lazy=False, bind=bound)(function)
    app.close()


def without_argument() -> None:
    """Celery takes it."""


def test_a_function_without_an_argument_is_refused() -> None:
    app = Celery("none", set_as_current=False)
    with pytest.raises(BatchArgumentError, match="takes no argument; it gets a list"):
        app.task(base=BatchTask, shared=False, lazy=False)(without_argument)
    app.close()

"""Options of `submit_many` and of clients: a misspelt one is refused. Celery would ignore it."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Producer

from batchery import AsyncClient, BatcheryError, BatchTask, Client, Publisher, install
from batchery.task import check_options

COUNTS = [2, 50]


@pytest.fixture
def app() -> Iterator[Celery]:
    made = install(Celery("options", broker="memory://", backend="cache+memory://"))
    yield made
    made.close()


def shout(texts: list[str], *, mark: str = "") -> list[str]:
    return [text.upper() + mark for text in texts]


def make(app: Celery, **options: Any) -> Any:
    decorate: Any = app.task(base=BatchTask, shared=False, name="shout", **options)
    return decorate(shout)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("option", ["mark", "prioritty", "kwargs", "s"])
def test_an_unknown_option_is_refused(app: Celery, option: str, count: int) -> None:
    with pytest.raises(TypeError) as caught:
        make(app).submit_many(["a"] * count, **{option: 4})
    assert isinstance(caught.value, BatcheryError)
    text = str(caught.value)
    assert f"shout: submit_many has no option {option!r}" in text
    assert "go into keywords={...}" in text
    assert "priority, queue" in text


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "options",
    [
        {"priority": 4, "headers": {"x": 1}, "expiration": 60, "expires": 60, "countdown": 1},
        {"tenant": "acme", "deadline_s": 5.0, "argsrepr": "(...)", "correlation_id": "c"},
        {"stamped_headers": ["team"], "team": "red"},
        {"link": [], "shadow": "loud", "serializer": "json", "compression": "gzip"},
    ],
)
def test_options_of_celery_and_kombu_stay(app: Celery, options: Any, count: int) -> None:
    assert len(make(app).submit_many(["a"] * count, {"mark": "!"}, **options).results) == count


def test_whatever_celery_names_is_an_option(app: Celery) -> None:
    task = make(app)
    functions: list[Any] = [Task.apply_async, BatchTask.apply_async, Celery.send_task]
    for function in (*functions, Producer.publish):
        parameters = inspect.signature(function).parameters.values()
        named = [each.name for each in parameters if each.kind not in (2, 4)]
        for name in {*named} - {"self", "args", "kwargs", "name", "body"}:
            check_options("shout", {name: None}, task)


def test_an_apply_async_of_the_users_may_take_more(app: Celery) -> None:
    class Shop(BatchTask):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            options["headers"] = {"shop": options.pop("shop", None)}
            return super().apply_async(*args, **options)

    task: Any = app.task(base=Shop, shared=False)(shout)
    assert len(task.submit_many(["a"], shop="north").results) == 1


NOWHERE = "redis://localhost:1/0"


@pytest.mark.parametrize(
    ("call", "nearest"),
    [
        (lambda app: Client(app).task("shout", quee="gpu"), "'quee', the nearest is queue"),
        (lambda _: Client(NOWHERE).task("else", quee="gpu"), "'quee', the nearest is queue"),
        (lambda _: Client(NOWHERE).task("else", deadline_s=1.0), "'deadline_s'; keyword"),
        (lambda app: AsyncClient(app).task("shout", timout_s=1), "nearest is timeout_s"),
        (lambda _: AsyncClient(NOWHERE).task("else", wait=1), "nearest is wait_s"),
        (lambda app: Publisher(app, "shout", prioriti=4), "'prioriti', the nearest is priority"),
        (lambda app: make(app).submit_many(["a"], prioriti=4), "the nearest is priority"),
    ],
)
def test_a_client_refuses_an_unknown_option_at_once(
    app: Celery, call: Callable[[Celery], object], nearest: str
) -> None:
    make(app)
    with pytest.raises(TypeError, match="has no option") as caught:
        call(app)
    assert nearest in str(caught.value)


def test_a_client_takes_what_it_and_celery_know(app: Celery) -> None:
    make(app)
    Client(app).task("shout", queue="gpu", deadline_s=1.0, tenant="acme", headers={"x": 1})
    Client(app).task("else", countdown=1, retry=False, shadow="loud")
    AsyncClient(app).task("else", timeout_s=1, wait_s=1, deadline_s=1, expires=9)
    Publisher(app, "shout", wait_s=0, tenant="acme", priority=3)

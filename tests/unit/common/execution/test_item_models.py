"""`pydantic=True` of batch tasks: how they are declared, and what they do in this process."""

from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from celery import Celery
from kombu.exceptions import EncodeError
from pydantic import BaseModel, Field, field_serializer, field_validator

from batchery import BatchArgumentError, BatchTask, Failed, InvalidItem, install


class Point(BaseModel):
    """An item."""

    x: int
    y: int | None = None


class Unequal(Point):
    """Not what it was, once it was sent."""

    @field_serializer("x")
    def write(self, x: int) -> int:
        return x + 1


class Faulty(BaseModel):
    """Its validator has a fault."""

    x: int

    @field_validator("x")
    @classmethod
    def check(cls, x: int) -> int:
        if x == 13:
            raise LookupError("no thirteen")
        return x


def moved(points: list[Point], *, by: Point | None = None) -> list[Point]:
    assert all(isinstance(each, Point) for each in points)
    return [Point(x=each.x + (by.x if by else 1)) for each in points]


def make(function: Any, **options: Any) -> Any:
    app = install(Celery("typed", broker="memory://", backend="cache+memory://"))
    decorate: Any = app.task(base=BatchTask, pydantic=True, shared=False, **options)
    return decorate(function)


@pytest.mark.parametrize("item", [Point(x=1), {"x": 1}, {"x": "1"}])
def test_items_become_models_and_outcomes_plain_data(item: Any) -> None:
    task = make(moved)
    wanted = {"x": 2, "y": None}
    assert task(item) == task.apply((item,)).get() == wanted
    task.app.conf.task_always_eager = True
    assert task.delay(item).get() == task.submit_many([item]).get()[0] == wanted
    assert task.delay(item, by=Point(x=5)).get()["x"] == 6


def test_neighbours_of_an_invalid_item_run_in_one_call() -> None:
    calls: list[int] = []

    def count(points: Sequence[Point]) -> list[Any]:
        calls.append(len(points))
        return [Failed("zero") if each.x == 0 else each.x for each in points]

    items = [{"x": 1}, {"x": "one"}, {"x": 0}, Point(x=4), 5]
    first, bad, failed, last, number = make(count).run_batch(items, {})
    assert (first, failed.error, last, calls) == (1, "zero", 4, [3])
    assert isinstance(bad.error, InvalidItem)
    assert "count: item.x: Input should be a valid integer" in str(bad.error)
    assert ": item: Input should be a valid dictionary" in str(number.error)


def test_invalid_items_alone_call_nothing() -> None:
    def never(points: list[Point]) -> list[Any]:
        raise AssertionError

    assert [type(each) for each in make(never).run_batch([1, 2], {})] == [Failed, Failed]


def test_a_validator_that_raises_fails_its_item_alone() -> None:
    def values(items: list[Faulty]) -> list[int]:
        return [each.x for each in items]

    one, bad, two = make(values).run_batch([{"x": 1}, {"x": 13}, {"x": 2}], {})
    assert (one, two) == (1, 2)
    assert isinstance(bad.error, LookupError)


def test_celerys_options_hold() -> None:
    strict = make(moved, pydantic_strict=True)
    with pytest.raises(InvalidItem, match="valid integer"):
        strict({"x": "1"})
    assert make(moved, pydantic_dump_kwargs={"exclude_none": True})({"x": 1}) == {"x": 2}
    found: list[Any] = []

    class Seen(BaseModel):
        x: int

        @field_validator("x")
        @classmethod
        def look(cls, x: int, info: Any) -> int:
            found.append(info.context)
            return x

    def values(items: list[Any]) -> list[int]:
        return [each.x for each in items]

    values.__annotations__["items"] = list[Seen]
    task = make(values, pydantic_context={"shop": "north"})
    assert task({"x": 1}) == 1
    (context,) = found
    assert context == {"shop": "north", "celery_app": task.app, "celery_task_name": task.name}


def test_what_pydantic_knows_is_an_item_and_a_bound_task_has_its_request() -> None:
    def cut(self: Any, texts: Sequence[Annotated[str, Field(max_length=3)]]) -> list[Any]:
        return [[text, len(self.request.jobs)] for text in texts]

    task = make(cut, bind=True)
    assert task("abc") == ["abc", 1]
    with pytest.raises(InvalidItem, match="at most 3 characters"):
        task("abcd")


def test_a_model_that_would_not_come_back_equal_is_refused_as_by_celery() -> None:
    with pytest.raises(EncodeError):
        make(moved).delay(Unequal(x=1))


def unknown(points: "list[Nowhere]") -> Any:  # type: ignore[name-defined]  # noqa: F821
    ...


def without(points) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ...


@pytest.mark.parametrize(
    ("function", "annotation", "problem"),
    [
        (without, None, "annotate 'points' as list[MyModel]: found no annotation"),
        (moved, Point, "found <class"),
        (moved, list, "found <class 'list'>"),
        (moved, tuple[Point, ...], "found tuple"),
        (moved, list[Celery], "list[MyModel]: Unable to generate pydantic-core schema"),
        (unknown, None, "name 'Nowhere' is not defined"),
    ],
)
def test_other_annotations_are_refused_at_declaration(
    function: Any, annotation: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if annotation is not None:
        monkeypatch.setitem(function.__annotations__, "points", annotation)
    with pytest.raises(BatchArgumentError) as caught:
        make(function).name  # noqa: B018 - declares it
    assert problem in str(caught.value)
    assert "pydantic=True needs the type of items" in str(caught.value)

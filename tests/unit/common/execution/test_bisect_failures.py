"""A bad item fails alone; the others of its batch have their outcomes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject

from batchery.errors import OutOfMemory, WrongLength
from batchery.execution.bisect_failures import as_failed, has_run_out, is_out_of_memory, isolate
from batchery.outcomes import Failed


def double(items: Sequence[int]) -> list[int]:
    if 13 in items:
        raise LookupError("no thirteen")
    return [2 * item for item in items]


def raising(error: BaseException) -> Callable[[Sequence[int]], Any]:
    def call(items: Sequence[int]) -> Any:
        raise error

    return call


def isolated(call: Callable[[Sequence[int]], Any], *items: int) -> list[Any]:
    return isolate(call, items, name="double")


def failure(outcome: Any) -> Exception:
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Exception)
    return outcome.error


def test_no_items_need_no_call() -> None:
    assert isolated(raising(LookupError())) == []


@pytest.mark.parametrize("place", range(5))
def test_item_that_raises_fails_alone_wherever_it_is(place: int) -> None:
    items = [1, 2, 3, 4, 5]
    items[place] = 13
    outcomes = isolated(double, *items)
    assert str(failure(outcomes.pop(place))) == "no thirteen"
    items.pop(place)
    assert outcomes == [2 * item for item in items]


def test_batch_is_halved_so_that_few_calls_are_needed() -> None:
    calls: list[int] = []

    def count(items: Sequence[int]) -> list[int]:
        calls.append(len(items))
        return double(items)

    isolated(count, 1, 2, 3, 4, 5, 6, 7, 13)
    assert calls == [8, 4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("outcomes", [[1], [1, 2, 3], []])
def test_wrong_number_of_outcomes_fails_every_item(outcomes: list[int]) -> None:
    for outcome in isolated(lambda _: outcomes, 1, 2):
        assert isinstance(failure(outcome), WrongLength)
        assert f"{len(outcomes)} outcome" in str(failure(outcome))


@pytest.mark.parametrize("answer", ["ab", b"ab", {1: 2, 3: 4}, {1, 2}, 12, None])
def test_answer_that_is_no_list_is_refused_although_it_may_have_the_length(answer: Any) -> None:
    for outcome in isolated(lambda _: answer, 1, 2):
        assert f"returned a {type(answer).__name__} for 2 items" in str(failure(outcome))


def test_only_the_keyboard_ends_the_process() -> None:
    with pytest.raises(KeyboardInterrupt):
        isolated(raising(KeyboardInterrupt()), 1)
    (ended,) = isolated(raising(SystemExit(3)), 1)
    assert str(failure(ended)) == "double called sys.exit(3)"

    class Panic(BaseException):
        """As a Rust library's."""

    (panicked,) = isolated(raising(Panic("at once")), 1)
    assert str(failure(panicked)) == "double raised Panic: at once"


def test_exceptions_of_celery_s_are_outcomes_and_all_others_failures() -> None:
    for outcome in (Ignore(), Reject("no")):
        assert isolated(raising(outcome), 1) == [outcome]
        assert as_failed(outcome) is outcome
    error = LookupError("x")
    assert as_failed(error) == Failed(error)
    assert failure(as_failed(Failed(SystemExit(1)))).args == (
        "the batch function called sys.exit(1)",
    )
    assert as_failed("x") == "x"


def test_rows_of_arrays_become_lists() -> None:
    class Row:
        def tolist(self) -> list[float]:
            return [1.0]

    class Text:
        tolist = "no method"

    text = Text()
    assert isolated(lambda _: [Row(), text], 1, 2) == [[1.0], text]


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("of any text"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_type_or_text(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    (outcome,) = isolated(raising(error), 1)
    assert isinstance(failure(outcome), OutOfMemory) == expected


@pytest.mark.parametrize(("text", "said"), [("first\nsecond", "(first)"), ("", "(MemoryError)")])
def test_item_without_memory_says_what_to_do(text: str, said: str) -> None:
    (outcome,) = isolated(raising(MemoryError(text)), 1)
    assert said in str(failure(outcome))
    assert "use a shorter item" in str(failure(outcome))


def test_returned_memory_error_says_that_there_was_no_memory() -> None:
    outcome = as_failed(Failed(MemoryError("host")))
    assert isinstance(failure(outcome), OutOfMemory)


class Untold(RuntimeError):
    """Python cannot print it: `traceback` asks it for its notes."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __str__(self) -> str:
        raise KeyError("text")


def test_exception_that_cannot_be_told_fails_its_item_alone() -> None:
    def call(items: Sequence[int]) -> list[int]:
        return double(items) if 13 not in items else raising(Untold())(items)

    one, other = isolated(call, 13, 1)
    assert other == 2
    assert type(failure(one)) is Untold
    assert one.traceback.endswith("Untold: its text cannot be made: KeyError\n")


def test_memory_has_run_out_if_an_error_came_from_that() -> None:
    outer, inner = ValueError("a layer failed"), LookupError("within")
    outer.__cause__ = inner
    assert not has_run_out(outer)
    inner.__cause__ = MemoryError()
    assert has_run_out(outer)
    assert has_run_out(OutOfMemory("no memory for this item"))
    assert not has_run_out(None)

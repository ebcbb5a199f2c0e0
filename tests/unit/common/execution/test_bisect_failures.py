"""A bad item fails alone; the others of its batch have their outcomes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from batchery.errors import OutOfMemory
from batchery.execution.bisect_failures import has_run_out, isolate
from batchery.outcomes import Failed


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


def test_only_what_has_the_method_becomes_a_list() -> None:
    class Row:
        def tolist(self) -> list[float]:
            return [1.0]

    class Text:
        tolist = "no method"

    text = Text()
    assert isolated(lambda _: [Row(), text], 1, 2) == [[1.0], text]


@pytest.mark.parametrize(("text", "said"), [("first\nsecond", "(first)"), ("", "(MemoryError)")])
def test_item_without_memory_says_what_to_do(text: str, said: str) -> None:
    (outcome,) = isolated(raising(MemoryError(text)), 1)
    assert said in str(failure(outcome))
    assert "use a shorter item" in str(failure(outcome))


class Untold(RuntimeError):
    """Python cannot print it: `traceback` asks it for its notes."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __str__(self) -> str:
        raise KeyError("text")


def test_exception_that_cannot_be_told_fails_its_item_alone() -> None:
    def call(items: Sequence[int]) -> list[int]:
        return [2 * item for item in items] if 13 not in items else raising(Untold())(items)

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

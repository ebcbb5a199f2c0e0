"""Each caller has an exception of its own, which says all that the function's one said."""

import asyncio
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest

from batchery import Failed, batched
from batchery.tracebacks import copy_exception


class Refused(Exception):
    """Its `__init__` takes other arguments than `args`."""

    __slots__ = ("code",)

    def __init__(self, code: int, *, limit: int) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.limit = limit


class Group(ExceptionGroup[Exception]):
    """A group with an attribute."""

    size = 0


def refusal() -> Refused:
    error = Refused(7, limit=3)
    error.__cause__ = KeyError("key")
    error.add_note("a note")
    return error


def fail_all(items: list[str], error: BaseException) -> list[Any]:
    return [Failed(error) for _ in items]


def catch(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        function()
    return caught.value


def check_refusals(errors: list[BaseException], original: Refused) -> None:
    assert len({id(error) for error in [*errors, original]}) == len(errors) + 1
    for error in errors:
        assert type(error) is Refused
        assert (error.args, error.code, error.limit) == (("code 7",), 7, 3)
        assert error.__cause__ is original.__cause__
        assert error.__suppress_context__
        assert error.__notes__ == ["a note"]
    assert original.__traceback__ is None


def test_items_and_callers_that_share_a_batch_or_an_object_share_no_traceback() -> None:
    original = refusal()
    function = batched(lambda items: fail_all(items, original), max_batch_size=8)
    check_refusals(function.options(return_exceptions=True)(["a", "b", "c"]), original)
    errors: list[BaseException] = []

    def call_from_a_thread() -> None:
        errors.append(catch(lambda: function("a")))

    threads = [threading.Thread(target=call_from_a_thread) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def call_from_a_loop() -> list[Any]:
        return await asyncio.gather(
            *(function.acall("a") for _ in range(4)), return_exceptions=True
        )

    errors += asyncio.run(call_from_a_loop())
    futures = [function.submit("a") for _ in range(4)]
    for future in futures:
        assert future.exception(60) is not None
        errors.append(catch(future.result))
    check_refusals(errors, original)
    for error in errors:
        # Whoever waited, once: no frame of another caller.
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert names.count("_value") == 1
        assert names.count("call_from_a_thread") <= 1


def test_fields_of_pythons_own_classes_are_kept() -> None:
    missing = FileNotFoundError(2, "No such file", "a.txt")
    made = copy_exception(missing)
    assert made is not missing
    assert (str(made), made.filename, made.errno) == (str(missing), "a.txt", 2)
    unreadable = catch(lambda: b"\xff".decode())
    assert str(copy_exception(unreadable)) == str(unreadable)
    absent = ImportError("no such module", name="absent", path="/absent")
    assert (copy_exception(absent).name, copy_exception(absent).path) == ("absent", "/absent")
    stop = copy_exception(StopIteration(3))
    assert stop.value == 3


def test_a_group_is_caught_by_its_parts_which_are_copies() -> None:
    inner = refusal()
    group = Group("several", [inner, ValueError("text")])
    group.size = 2
    made = copy_exception(group)
    assert (type(made), made.message, made.size) == (Group, "several", 2)
    caught: list[Exception] = []
    try:
        raise made
    except* Refused as refused:
        caught += refused.exceptions
    except* ValueError as wrong:
        caught += wrong.exceptions
    assert list(map(repr, caught)) == ["Refused('code 7')", "ValueError('text')"]
    assert caught[0] is not inner


def test_what_cannot_be_copied_is_shared() -> None:
    error = catch(lambda: pydantic.TypeAdapter(int).validate_python("a"))
    assert copy_exception(error) is error


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_an_exception_that_refuses_attributes_reaches_its_caller() -> None:
    @batched(max_batch_size=8)
    def refuse(codes: list[int]) -> list[Any]:
        if 0 in codes:
            raise Frozen(0)
        return [Failed(Frozen(code)) for code in codes]

    errors: list[Any] = refuse.options(return_exceptions=True)([0, 7])
    assert errors == [Frozen(0), Frozen(7)]

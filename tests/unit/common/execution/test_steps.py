"""Slots of a step model: joining, ending, making room."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from batchery import Advance, Failed, StepModel, register
from batchery.execution.steps import SlotItem, Slots, run_steps
from batchery.model import GOES_ON


class Letters(StepModel):
    """Spells an item, a letter a step."""

    slots = 2

    def __init__(self) -> None:
        self.left: dict[int, str] = {}

    def join(self, slot: int, prepared: str, pieces: Sequence[Any], **_: Any) -> None:
        if not prepared:
            raise ValueError("nothing to spell")
        self.left[slot] = prepared[len(pieces) :]

    def leave(self, slot: int) -> None:
        del self.left[slot]

    def step(self) -> list[Advance]:
        told = []
        for slot, text in list(self.left.items()):
            self.left[slot] = text[1:]
            ended = not text[1:]
            if ended:
                del self.left[slot]
            told.append(Advance(slot, text[0], "done" if ended else GOES_ON))
        return told


def slots(*texts: str) -> Slots[str]:
    made: Slots[str] = Slots(Letters(), 2)
    made.add(*(SlotItem(text, text, {}, ()) for text in texts))
    return made


def step(some: Slots[str]) -> list[tuple[str, Any, bool]]:
    return [(owner, piece, outcome is not GOES_ON) for owner, piece, outcome in some.step()]


def test_the_next_item_joins_when_one_has_ended() -> None:
    some = slots("ab", "c", "de")
    assert step(some) == [("ab", "a", False), ("c", "c", True)]
    assert step(some) == [("ab", "b", True), ("de", "d", False)]


def test_what_made_room_goes_on_after_its_pieces_before_all_that_wait() -> None:
    some = slots("abc", "def", "x")
    step(some)
    some.put_aside({"def"})
    some.add_first(SlotItem("!", "!", {}, ()))
    assert step(some) == [("abc", "b", False), ("!", "!", True)]
    assert step(some) == [("abc", "c", True), ("def", "e", False)]
    assert step(some) == [("def", "f", True), ("x", "x", True)]


def test_whoever_is_let_in_goes_before_all_that_made_room_and_these_in_their_order() -> None:
    some = slots("abc", "def")
    step(some)
    assert some.put_aside({"def"})
    some.add_first(SlotItem("!", "!", {}, ()))
    step(some)
    assert some.put_aside({"abc"})
    # It has none, so nothing is freed by it.
    assert not some.put_aside({"def"})
    some.add_first(SlotItem("?", "?", {}, ()), SlotItem("1", "1", {}, ()))
    assert step(some) == [("?", "?", True), ("1", "1", True)]
    assert step(some) == [("def", "e", False), ("abc", "c", True)]


def test_what_made_room_twice_repeats_nothing() -> None:
    some = slots("abcd")
    for letter in "abcd":
        assert step(some)[0][1] == letter
        some.put_aside({"abcd"})


def test_the_time_of_an_item_is_that_in_slots() -> None:
    times = iter(range(100))
    some: Slots[str] = Slots(Letters(), 1, lambda: next(times))
    some.add(SlotItem("ab", "ab", {}, ()))
    some.step()
    some.put_aside({"ab"})
    for _ in range(7):
        next(times)
    some.step()
    assert some.take_held_s("ab") == 2
    assert some.take_held_s("ab") == 0


def test_items_that_cannot_join_or_are_dropped_leave_their_slots_to_others() -> None:
    some = slots("abc", "", "de")
    failed, first, other = some.step()
    assert isinstance(failed[2], Failed)
    assert (first[0], other[0]) == ("abc", "de")
    some.drop({"abc", "de"})
    assert some.taken == 0
    assert some.step() == []


def test_a_model_that_advances_an_empty_slot_is_an_error() -> None:
    some = slots("ab")
    step(some)
    model = Letters()
    model.left[1] = "x"
    other: Slots[str] = Slots(model, 2)
    other.add(SlotItem("a", "a", {}, ()))
    with pytest.raises(LookupError, match=r"Letters.step advanced slot 1"):
        other.step()


def test_a_whole_batch_runs_to_its_end_in_order() -> None:
    assert run_steps(Letters(), ["ab", "", "c", "def"], {})[0::2] == ["done", "done"]


class Interrupted(Letters):
    """Its first step reaches a time limit."""

    made: ClassVar[list["Interrupted"]] = []

    def load(self, device: str) -> None:
        self.made.append(self)
        self.is_unloaded = False

    def unload(self) -> None:
        self.is_unloaded = True

    def step(self) -> list[Advance]:
        if len(self.made) == 1:
            raise SoftTimeLimitExceeded(1)
        return super().step()


def test_a_batch_whose_steps_were_interrupted_leaves_nothing_to_the_next_one() -> None:
    task = register(Celery("steps", set_as_current=False), "spell", Interrupted, slots=2)
    with pytest.raises(SoftTimeLimitExceeded):
        task.run(["abc", "def"])
    assert task.run(["g"]) == ["done"]
    assert [model.is_unloaded for model in Interrupted.made] == [True, False]

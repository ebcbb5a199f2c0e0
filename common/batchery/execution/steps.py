"""The slots of a step model: which item is in which, and what each step did."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from batchery.execution.bisect_failures import NON_VALUES, as_failed, isolate
from batchery.model import GOES_ON, StepModel

#: Whatever its owner knows an item by.
Owner = TypeVar("Owner")


class SlotItem(NamedTuple, Generic[Owner]):
    """An item in a slot, or on its way to one."""

    owner: Owner
    prepared: Any
    keywords: Mapping[str, Any]
    pieces: Sequence[Any]
    is_streamed: bool = True


class Slots(Generic[Owner]):
    """The items of a step model; for one thread."""

    def __init__(
        self, model: StepModel, count: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._model = model
        self._free = list(reversed(range(count)))
        self._taken: dict[int, SlotItem[Owner]] = {}
        #: Pieces that each of them made since it joined.
        self._made: dict[int, list[Any]] = {}
        #: Those that have no slot: the first ones of all, those that made room, all others.
        self._first: deque[SlotItem[Owner]] = deque()
        self._aside: deque[SlotItem[Owner]] = deque()
        self._waiting: deque[SlotItem[Owner]] = deque()
        #: When the item of a slot joined; and how long items were in slots before that.
        self._joined_s: dict[int, float] = {}
        self._held_s: dict[Owner, float] = {}

    @property
    def taken(self) -> int:
        """How many items are in slots."""
        return len(self._taken)

    def add(self, *items: SlotItem[Owner]) -> None:
        """Takes items in; they join as soon as there are slots, in order."""
        self._waiting.extend(items)

    def add_first(self, *items: SlotItem[Owner]) -> None:
        """Takes items in that join before all others without a slot."""
        self._first.extend(items)

    def put_aside(self, owners: Collection[Owner]) -> bool:
        """Frees the slots of items that go on later, after their pieces, before all that wait.

        Returns:
            Whether any of them had one.
        """
        slots = [slot for slot, item in self._taken.items() if item.owner in owners]
        for slot in slots:
            item, made = self._taken[slot], self._made[slot]
            rest = self._model.leave(slot) or ()
            self._release(slot)
            self._aside.append(item._replace(pieces=[*item.pieces, *made, *rest]))
        return bool(slots)

    def take_held_s(self, owner: Owner) -> float:
        """How long an item that has ended was in slots, in seconds; once."""
        return self._held_s.pop(owner, 0.0)

    def drop(self, owners: Collection[Owner]) -> None:
        """Frees the slots of items that nobody wants any more."""
        for line in (self._first, self._aside, self._waiting):
            if any(each.owner in owners for each in line):
                kept = [each for each in line if each.owner not in owners]
                line.clear()
                line.extend(kept)
        for slot in [slot for slot, item in self._taken.items() if item.owner in owners]:
            self._model.leave(slot)
            self._release(slot)

    def step(self) -> list[tuple[Owner, Any, Any]]:
        """Lets items join, and takes all of them a step further.

        Returns:
            For items of which there is something to say: the owner, a piece or None, and the
            outcome or `GOES_ON`.

        Raises:
            LookupError: The model has advanced an item that it has not.
            Exception: Whatever the model raises; then nothing is known of any item.
        """
        told = [*self._fill()]
        for slot, piece, outcome in self._model.step() if self._taken else ():
            item = self._taken.get(slot)
            if item is None:
                name = type(self._model).__name__
                raise LookupError(f"{name}.step advanced slot {slot!r}, in which there is no item")
            if outcome is not GOES_ON:
                outcome = as_failed(outcome)
                self._release(slot)
            elif piece is not None:
                self._made[slot].append(piece)
            told.append((item.owner, piece, outcome))
        return told

    def _fill(self) -> list[tuple[Owner, Any, Any]]:
        """Lets items join; returns those that failed to."""
        failed = []
        while self._free and (line := self._first or self._aside or self._waiting):
            item, slot = line.popleft(), self._free.pop()
            failure = self._join(slot, item)
            if failure is None:
                self._taken[slot], self._made[slot] = item, []
                self._joined_s[slot] = self._clock()
            else:
                self._free.append(slot)
                failed.append((item.owner, None, failure))
        return failed

    def _join(self, slot: int, item: SlotItem[Owner]) -> Any:
        """Why an item cannot join; None if it has."""

        def join(prepared: Sequence[Any]) -> list[None]:
            self._model.is_streamed = item.is_streamed
            self._model.join(slot, prepared[0], item.pieces, **item.keywords)
            return [None]

        return isolate(join, [item.prepared], name=f"{type(self._model).__name__}.join")[0]

    def _release(self, slot: int) -> None:
        owner, held_s = self._taken.pop(slot).owner, self._clock() - self._joined_s.pop(slot)
        self._held_s[owner] = self._held_s.get(owner, 0.0) + held_s
        del self._made[slot]
        self._free.append(slot)


def run_steps(model: StepModel, prepared: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Runs prepared items to their ends; returns one outcome per item, in order."""
    outcomes = list(prepared)
    slots: Slots[int] = Slots(model, model.slots)
    left = [at for at, each in enumerate(prepared) if not isinstance(each, NON_VALUES)]
    slots.add(*(SlotItem(at, prepared[at], keywords, ()) for at in left))
    count = len(left)
    while count:
        for at, _, outcome in slots.step():
            if outcome is not GOES_ON:
                outcomes[at] = outcome
                count -= 1
    return outcomes

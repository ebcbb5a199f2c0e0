"""The slots of a step model: which item is in which, and what each step did."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
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


class Slots(Generic[Owner]):
    """The items of a step model; for one thread."""

    def __init__(self, model: StepModel, count: int) -> None:
        """Has no items.

        Args:
            model: Loaded; nobody else may use it.
            count: Maximum number of items at once.
        """
        self._model = model
        self._free = list(reversed(range(count)))
        self._taken: dict[int, SlotItem[Owner]] = {}
        self._waiting: deque[SlotItem[Owner]] = deque()

    @property
    def taken(self) -> int:
        """How many items are in slots."""
        return len(self._taken)

    def add(self, *items: SlotItem[Owner]) -> None:
        """Takes items in; they join as soon as there are slots, in order."""
        self._waiting.extend(items)

    def drop(self, owners: Collection[Owner]) -> None:
        """Frees the slots of items that nobody wants any more."""
        if self._waiting:
            self._waiting = deque(each for each in self._waiting if each.owner not in owners)
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
            told.append((item.owner, piece, outcome))
        return told

    def _fill(self) -> list[tuple[Owner, Any, Any]]:
        """Lets items join; returns those that failed to."""
        failed = []
        while self._waiting and self._free:
            item, slot = self._waiting.popleft(), self._free.pop()
            failure = self._join(slot, item)
            if failure is None:
                self._taken[slot] = item
            else:
                self._free.append(slot)
                failed.append((item.owner, None, failure))
        return failed

    def _join(self, slot: int, item: SlotItem[Owner]) -> Any:
        """Why an item cannot join; None if it has."""

        def join(prepared: Sequence[Any]) -> list[None]:
            self._model.join(slot, prepared[0], item.pieces, **item.keywords)
            return [None]

        return isolate(join, [item.prepared], name=f"{type(self._model).__name__}.join")[0]

    def _release(self, slot: int) -> None:
        del self._taken[slot]
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

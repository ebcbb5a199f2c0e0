"""Runs items through a step model as a device does, without a worker."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchery.model import GOES_ON, StepModel
from batchery.outcomes import Failed
from support.harness import wait_for
from support.patience import patient


class StepDriver:
    """The items in the slots of a model, their pieces and outcomes."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.pieces: dict[int, list[Any]] = {}
        self.outcomes: dict[int, Any] = {}

    def join(self, item: Any, pieces: Sequence[Any] = (), **keywords: Any) -> int:
        """Lets an item in, in a slot of its own; returns the slot."""
        slot = len(self.pieces)
        (prepared,) = self.model.preprocess([item], **keywords)
        if isinstance(prepared, Failed):
            self.outcomes[slot] = prepared
        else:
            self.model.join(slot, prepared, pieces, **keywords)
        # One that could not join has left its slot.
        self.pieces[slot] = []
        return slot

    def step(self) -> None:
        for slot, piece, outcome in self.model.step():
            assert slot not in self.outcomes
            if piece is not None:
                self.pieces[slot].append(piece)
            if outcome is not GOES_ON:
                self.outcomes[slot] = outcome

    def wait(self, *slots: int, timeout_s: float = patient(30.0)) -> list[Any]:
        """Steps until these items have ended, or all; returns their outcomes."""
        chosen = slots or tuple(self.pieces)

        def all_ended() -> bool:
            self.step()
            return all(slot in self.outcomes for slot in chosen)

        wait_for(all_ended, f"{chosen} have ended", timeout_s)
        return [self.outcomes[slot] for slot in chosen]

    def run(self, item: Any, pieces: Sequence[Any] = (), **keywords: Any) -> Any:
        """The result of one item; raises its error."""
        (outcome,) = self.wait(self.join(item, pieces, **keywords))
        if isinstance(outcome, Failed):
            raise outcome.exception
        return outcome

    def text(self, slot: int) -> str:
        """What readers of an item have."""
        return "".join(piece["text"] for piece in self.pieces[slot])


def find_errors(outcomes: Sequence[Any]) -> Mapping[int, str]:
    """The texts of the failures among outcomes, by position."""
    return {
        at: str(outcome.exception)
        for at, outcome in enumerate(outcomes)
        if isinstance(outcome, Failed)
    }

"""A model that makes a piece for each of its jobs at every beat, and says when it made them."""

import time
from collections.abc import Sequence
from typing import Any

from batchery.model import GOES_ON, Advance, StepModel


class Metronome(StepModel):
    """Items are numbers of pieces. A piece is its number, and when it was made.

    The time is that of `time.perf_counter`, which is one clock for all processes of a Linux
    machine.
    """

    resumes = True

    def __init__(self, step_ms: float) -> None:
        self._step_s = step_ms / 1e3
        self._next_s = 0.0
        #: By slot: pieces so far, and pieces to make.
        self._jobs: dict[int, list[int]] = {}

    def join(self, slot: int, prepared: Any, pieces: Sequence[Any], **_: Any) -> None:
        """Begins after the pieces that are there."""
        self._jobs[slot] = [len(pieces), int(prepared)]

    def leave(self, slot: int) -> None:
        """Makes no more of it."""
        del self._jobs[slot]

    def step(self) -> Sequence[Advance]:
        """Waits for the next beat; one that was missed is not made up for."""
        now_s = time.perf_counter()
        self._next_s = max(self._next_s + self._step_s, now_s)
        time.sleep(self._next_s - now_s)
        made_s = time.perf_counter()
        advances = []
        for slot, job in list(self._jobs.items()):
            number, count = job
            job[0] += 1
            outcome = count if job[0] >= count else GOES_ON
            if outcome is not GOES_ON:
                del self._jobs[slot]
            advances.append(Advance(slot, [number, made_s], outcome))
        return advances

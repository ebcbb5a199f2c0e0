"""What a device has: the batch that runs, the one behind it, or jobs in its slots."""

from collections import deque
from time import monotonic

from batchery_worker.batch import DeviceBatch
from batchery_worker.job import DEVICE_DEPTH


class HeldBatches:
    """The batches of a device that are not answered."""

    def __init__(self, slots: int, *, resumes: bool) -> None:
        """Holds none.

        Args:
            slots: Number of slots of its model; 0 if it runs batches.
            resumes: Whether jobs in slots can make room for others; see `StepModel.resumes`.
        """
        self.slots = slots
        self.resumes = resumes
        self.batches: dict[int, DeviceBatch] = {}
        #: Those of them that run one after the other; an urgent one comes in between.
        self.in_turn: list[DeviceBatch] = []
        #: Those that made room for others, and wait for a slot, in the order in which they go on.
        self._aside: deque[DeviceBatch] = deque()
        #: Number of slots that its jobs have, or will have next.
        self._taken = 0
        #: Whether suspects run: then no other job may; and whether one runs alone.
        self.is_reserved = self.is_alone = False
        #: Maximum number of suspects that may share its slots; 0 while it runs none.
        self.cohort = 0

    @property
    def has_room(self) -> bool:
        """Whether one more batch may come, or one more suspect beside those in slots."""
        if self.is_alone or (self.is_reserved and not self.cohort):
            return False
        if self.slots:
            return self._taken < self.slots
        return len(self.in_turn) < DEVICE_DEPTH

    @property
    def free_slots(self) -> int:
        """Number of slots for jobs that are no suspects."""
        return 0 if self.cohort else max(0, self.slots - self._taken)

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken, and none by a suspect."""
        return not self.cohort and self._taken >= self.slots

    @property
    def takes_urgent(self) -> bool:
        """Whether batches run, and no urgent one waits to begin."""
        is_open = bool(self.in_turn) and not (self.slots or self.is_alone or self.is_reserved)
        return is_open and not self.holds_urgent

    @property
    def holds_urgent(self) -> bool:
        """Whether an urgent batch is there that has not begun."""
        return len(self.batches) > len(self.in_turn) and any(
            each.work.urgent and each.began_s is None for each in self.batches.values()
        )

    def oldest_batch_s(self, now_s: float) -> float:
        """For how long the batch that began first has run, in seconds; 0 if none has begun."""
        began_s = (each.began_s for each in [*self.batches.values()] if each.began_s is not None)
        return now_s - min(began_s, default=now_s)

    def add(self, batch: DeviceBatch) -> None:
        """Takes a batch in."""
        self.batches[batch.work.id] = batch
        if not batch.work.urgent:
            self.in_turn.append(batch)
        if self.slots:
            batch.began_s = monotonic()
            batch.items_left = batch.formed.items
            self._taken += batch.items_left
        self._note_suspects()

    def remove(self, batch: DeviceBatch) -> None:
        """Forgets a batch that is answered."""
        del self.batches[batch.work.id]
        if not batch.work.urgent:
            self.in_turn.remove(batch)
        self._taken -= batch.items_left
        if batch.is_aside:
            self._aside.remove(batch)
        self._note_resumed()
        self._note_suspects()

    def free_slot(self, batch_id: int) -> None:
        """Notes that an item has left its slot, and others of its job go on."""
        self.batches[batch_id].items_left -= 1
        self._taken -= 1
        self._note_resumed()

    def put_aside(self, batch: DeviceBatch) -> None:
        """Notes that a job makes room for another one."""
        batch.is_aside = True
        self._aside.append(batch)

    def _note_suspects(self) -> None:
        running = [each.formed for each in self.in_turn]
        self.is_reserved = any(each.jobs[0].recovered for each in running)
        self.is_alone = bool(running) and running[0].alone
        self.cohort = min((each.cohort for each in running), default=0)

    def _note_resumed(self) -> None:
        """Notes which jobs have slots again: those that are free go to them in order."""
        waiting = sum(each.items_left for each in self._aside)
        while self._aside:
            waiting -= self._aside[0].items_left
            if self._taken - waiting > self.slots:
                return
            self._aside.popleft().is_aside = False

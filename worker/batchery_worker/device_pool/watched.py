"""The batches of a device of which it tells its worker, and how long each of them may still run.

A device tells only of batches whose time is limited: the worker kills a process that takes too
long, as a function that hangs may hold the whole interpreter.
"""

from dataclasses import dataclass
from math import inf

from batchery_worker.ipc.messages import Began, Ended, Loaded, Loads, OfBatch, ResultsWait, Running

#: After so much time a job that had to leave its slots has its process killed, in seconds, as has a
#: batch whose jobs were all terminated: it may hang. Most end by themselves, which costs no load.
MAX_STEP_S = 10.0


@dataclass(slots=True)
class WatchedBatch:
    """A batch on a device."""

    told: Running
    #: Maximum time that it may run, in seconds; then its process is killed.
    hard_limit_s: float | None = None
    #: Whether it reached the hard limit.
    expired: bool = False
    #: Whether all of its jobs were terminated, so that it must end soon.
    is_unwanted: bool = False
    #: Until when its device may be silent, and its limits do not count, as its model is loaded or
    #: Redis may be away; 0 if neither is so.
    excused_until_s: float = 0.0
    #: Since when that is so.
    excused_since_s: float = 0.0
    #: When it began, less the time of urgent batches since then; its time limit counts from here.
    #: A batch begins when it is the first one of its device, an urgent one when the device says so.
    began_s: float | None = None

    def __str__(self) -> str:
        first, others = self.told.job_ids[0], len(self.told.job_ids) - 1
        return f"{self.told.task}[{first}]" + (f" and {others} of its batch" if others else "")

    def ran_s(self, now_s: float) -> float:
        """For how long it has run, in seconds; 0 if it has not begun."""
        return 0.0 if self.began_s is None else max(0.0, now_s - self.began_s)

    @property
    def due_s(self) -> float:
        """When it must have ended, or loaded its model; infinite while its time has no limit."""
        if self.excused_until_s:
            return self.excused_until_s
        if self.began_s is None or self.hard_limit_s is None:
            return inf
        return self.began_s + self.hard_limit_s

    @property
    def was_too_long(self) -> bool:
        """Whether its only job is to blame that it reached the hard limit."""
        # Behind an urgent one another has begun.
        return self.expired and len(self.told.job_ids) == 1 and not self.told.is_urgent


class WatchedBatches(dict[int, WatchedBatch]):
    """Those of one device process, by their ids."""

    def note(self, reply: OfBatch, now_s: float, load_timeout_s: float) -> None:
        """Notes what the device says of a batch.

        Args:
            reply: What it says.
            now_s: The time, on the monotonic clock.
            load_timeout_s: How long the load of a model may take, in seconds.
        """
        if isinstance(reply, Running) and reply.id not in self:
            self._add(reply)
        batch = self[reply.id]
        match reply:
            case Running(is_unwanted=True):
                batch.is_unwanted = True
                end_s = batch.ran_s(now_s) + MAX_STEP_S
                batch.hard_limit_s = min(end_s, batch.hard_limit_s or end_s)
            case Began():
                batch.began_s = now_s
            case Loads():
                # A batch begins after the load of its model.
                batch.excused_until_s = now_s + load_timeout_s
                batch.began_s = now_s + reply.expected_s
            case Loaded():
                batch.excused_until_s, batch.began_s = 0.0, now_s
            case ResultsWait(is_over=False):
                batch.excused_until_s, batch.excused_since_s = inf, now_s
            case ResultsWait():
                batch.excused_until_s = 0.0
                if batch.began_s is not None:
                    batch.began_s += now_s - max(batch.began_s, batch.excused_since_s)
            case Ended():
                del self[reply.id]
                self._give_time_back(batch, now_s)
        self._begin_first(now_s)

    def _add(self, told: Running) -> None:
        limit_s = told.hard_limit_s
        if told.in_slots and limit_s is not None:
            # The device minds it itself, between two steps.
            limit_s += MAX_STEP_S
        self[told.id] = WatchedBatch(told, limit_s)

    def _begin_first(self, now_s: float) -> None:
        """Starts the clocks of jobs in slots, and of the first batch: those behind have not begun.

        That of an urgent one runs only once the device has said so.
        """
        is_first = True
        for batch in self.values():
            if batch.told.in_slots or (is_first and not batch.told.is_urgent):
                batch.began_s = now_s if batch.began_s is None else batch.began_s
            is_first = is_first and batch.told.is_urgent

    def _give_time_back(self, ended: WatchedBatch, now_s: float) -> None:
        """The time of an urgent batch does not count for the batch that it has interrupted."""
        if not ended.told.is_urgent or ended.began_s is None:
            return
        for batch in self.values():
            if batch.began_s is not None and not batch.told.is_urgent:
                batch.began_s += now_s - max(ended.began_s, batch.began_s)

    def find_due(self, now_s: float) -> WatchedBatch | None:
        """A batch that must have ended by now, and whose process is not killed for it yet."""
        for batch in self.values():
            is_behind = any(
                each.told.is_urgent and each is not batch and each.began_s is not None
                for each in self.values()
            )
            # The rest of its time counts after an urgent batch between its passes.
            is_paused = batch.expired or is_behind
            if batch.due_s <= now_s and (batch.excused_until_s or not is_paused):
                return batch
        return None

    def oldest_s(self, now_s: float) -> float:
        """For how long the batch that began first has run, in seconds; 0 if there is none."""
        # Of a copy, as threads look that answer probes.
        return max((each.ran_s(now_s) for each in [*self.values()]), default=0.0)

"""Which jobs, when: pure policy. Time is an argument, devices are numbers, nothing here waits.

The rules, in the order in which they are asked:

1. Suspects first, one at a time, alone on an empty device: only then can a death be blamed. One
   that may have killed a whole worker has this one to itself, with all of its devices.
2. An idle device takes what is there, at once, unless `max_wait_ms` asks it to let the batch grow.
3. A busy device takes a second batch only when that one is full: until then the batch keeps
   growing, and nothing is lost by waiting, because the device would only put it aside.
4. A job whose twin, of the same key and the same item, is on another device waits until that one is
   back: then there may be a result for both. Its own device sees for itself that they are equal.
5. Batch keys take turns. A key that was passed over because its batch was still growing goes next,
   full or not, so that a busy neighbour cannot starve it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic

from batchery_worker.job import DEVICE_DEPTH, Batch, BatchKey, Job, Limits, T


@dataclass(slots=True)
class _Lane(Generic[T]):
    """The waiting jobs of one key, oldest first."""

    jobs: deque[Job[T]] = field(default_factory=deque)
    items: int = 0
    passed_over: bool = False

    @property
    def limits(self) -> Limits:
        return self.jobs[0].limits

    @property
    def full(self) -> bool:
        return self.items >= self.limits.max_batch_size

    @property
    def due_s(self) -> float:
        """From when on an idle device no longer waits for more."""
        return self.jobs[0].arrived_s + self.limits.max_wait_s


class Scheduler(Generic[T]):
    """Holds the jobs that wait in the worker and forms their batches as late as possible."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[BatchKey, _Lane[T]] = OrderedDict()
        self._suspects: deque[Job[T]] = deque()
        #: Suspects, too; but they have not been started here.
        self._recovered: deque[Job[T]] = deque()
        #: On which device a job is that has or may get twins.
        self._flying: dict[tuple[BatchKey, bytes], str] = {}
        #: The twins, which wait for it.
        self._held: dict[tuple[BatchKey, bytes], list[Job[T]]] = {}

    def __len__(self) -> int:
        """How many jobs wait, suspects included."""
        in_lanes = sum(len(lane.jobs) for lane in self._lanes.values())
        held = sum(map(len, self._held.values()))
        return in_lanes + held + len(self._suspects) + len(self._recovered)

    def __iter__(self) -> Iterator[Job[T]]:
        yield from self._suspects
        yield from self._recovered
        for lane in self._lanes.values():
            yield from lane.jobs
        for twins in self._held.values():
            yield from twins

    def admit(self, job: Job[T]) -> None:
        """Takes a job in; it waits behind those of its key that came before."""
        lane = self._lanes.setdefault(job.key, _Lane())
        lane.jobs.append(job)
        lane.items += job.items

    def quarantine(self, job: Job[T]) -> None:
        """Takes back a job that was on a device which died; it will run alone."""
        self._suspects.append(job)

    def quarantine_recovered(self, job: Job[T]) -> None:
        """Takes in a job that was on a device when an earlier worker died; it will run alone."""
        self._recovered.append(job)

    def clear(self) -> list[Job[T]]:
        """Forgets every job that waits but was never started; returns them.

        Suspects stay: they were started, and the broker's messages are still theirs.
        """
        dropped = [job for lane in self._lanes.values() for job in lane.jobs]
        dropped += self._recovered
        dropped += [job for twins in self._held.values() for job in twins]
        self._held.clear()
        self._lanes.clear()
        self._recovered.clear()
        return dropped

    def departed(self, jobs: Iterable[Job[T]], device: str) -> None:
        """These jobs are on a device from now on."""
        for job in jobs:
            if job.fold is not None:
                self._flying[job.key, job.fold] = device

    def landed(self, jobs: Iterable[Job[T]]) -> None:
        """These jobs are back, whatever became of them: their twins wait like any other job."""
        for job in jobs if self._flying else ():
            if job.fold is not None:
                self._flying.pop((job.key, job.fold), None)
                for twin in reversed(self._held.pop((job.key, job.fold), ())):
                    lane = self._lanes.setdefault(job.key, _Lane())
                    # They have waited longer than those.
                    lane.jobs.appendleft(twin)
                    lane.items += twin.items

    def next_batch(
        self, in_flight: int, alone: bool, now_s: float, elsewhere: int = 0, device: str = ""
    ) -> Batch[T] | None:
        """The batch that a device should get now.

        Args:
            in_flight: Batches that the device holds already, 0 to `DEVICE_DEPTH`.
            alone: Whether one of them is a suspect, next to which nothing may run.
            now_s: The time, on the clock of `Job.arrived_s`.
            elsewhere: Batches that the worker's other devices hold.
            device: Its name.

        Returns:
            A batch, whose jobs no longer wait here; or None if the device should get nothing now.
        """
        if alone or in_flight >= DEVICE_DEPTH:
            return None
        suspects = self._suspects or self._recovered
        if suspects:
            if in_flight or (elsewhere and suspects[0].recovered):
                return None
            return Batch((suspects.popleft(),), alone=True)
        skipped: list[_Lane[T]] = []
        for key, lane in list(self._lanes.items()):
            if self._flying and not self._hold_twins(key, lane, device):
                continue
            due = now_s >= lane.due_s
            if lane.full or (due and (in_flight == 0 or lane.passed_over)):
                for each in skipped:
                    each.passed_over = True
                return self._take(key, lane)
            if due:
                skipped.append(lane)
        return None

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened; None for never."""
        return min((lane.due_s for lane in self._lanes.values()), default=None)

    def _hold_twins(self, key: BatchKey, lane: _Lane[T], device: str) -> bool:
        """Puts aside what is on another device; returns whether anything is left."""
        left: deque[Job[T]] = deque()
        for job in lane.jobs:
            if job.fold is None or self._flying.get((key, job.fold), device) == device:
                left.append(job)
            else:
                self._held.setdefault((key, job.fold), []).append(job)
                lane.items -= job.items
        lane.jobs = left
        if not lane.jobs:
            del self._lanes[key]
        return bool(lane.jobs)

    def _take(self, key: BatchKey, lane: _Lane[T]) -> Batch[T]:
        limit = lane.limits.max_batch_size
        jobs = [lane.jobs.popleft()]
        items = jobs[0].items
        while lane.jobs and items + lane.jobs[0].items <= limit:
            items += lane.jobs[0].items
            jobs.append(lane.jobs.popleft())
        lane.items -= items
        lane.passed_over = False
        if lane.jobs:
            self._lanes.move_to_end(key)
        else:
            del self._lanes[key]
        return Batch(tuple(jobs))

"""Which jobs, when: pure policy. Time is an argument, devices are numbers, nothing here waits.

The rules, in the order in which they are asked:

1. Suspects go first, one at a time, alone on an empty device: only then can a death be blamed.
   Those that may have killed a whole worker have this worker to themselves, with all its devices.
   A worker that dies seldom died of its jobs, so at first they run in halves of their batch.
2. An idle device takes what is there at once, unless `max_wait_ms` asks it to let the batch grow.
3. A busy device takes a second batch only when that batch is full. Until then the batch keeps
   growing. Nothing is lost by waiting, because the device would only put the batch aside.
4. Lanes share the time of the devices: see `shares.py`. The key of the lane that is owed most goes
   next, and its batch has jobs of all lanes of that key. A key that was passed over because its
   batch was still growing goes next, full or not, so that a busy neighbour cannot starve it.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Generic

from batchery_worker.batching.shares import Charge, Flow, Shares
from batchery_worker.job import DEVICE_DEPTH, USUAL_LANE, Batch, BatchKey, Job, Lane, Limits, T

#: The shares of a scheduler that knows of no classes.
ONE_CLASS = {USUAL_LANE.priority_class: 1.0}


@dataclass(slots=True)
class _KeyQueue(Generic[T]):
    """The waiting jobs of one key, in the flows of their lanes; never empty."""

    flows: dict[Lane, Flow[T]] = field(default_factory=dict)
    items: int = 0
    passed_over: bool = False

    def __iter__(self) -> Iterator[Job[T]]:
        return chain.from_iterable(flow.jobs for flow in self.flows.values())

    @property
    def limits(self) -> Limits:
        return next(iter(self)).limits

    @property
    def tag(self) -> float:
        """The lowest of its flows."""
        return min(flow.tag for flow in self.flows.values())

    @property
    def oldest_s(self) -> float:
        return min(flow.jobs[0].arrived_s for flow in self.flows.values())

    @property
    def full(self) -> bool:
        return self.items >= self.limits.max_batch_size

    @property
    def due_s(self) -> float:
        """When an idle device stops waiting for more."""
        return self.oldest_s + self.limits.max_wait_s


class Scheduler(Generic[T]):
    """Holds the jobs that wait in the worker and forms their batches as late as possible."""

    def __init__(self, shares: Mapping[str, float] = ONE_CLASS) -> None:
        """Holds no jobs.

        Args:
            shares: Share of each priority class, above 0; only their ratios matter.
        """
        self._shares = Shares(shares)
        self._queues: dict[BatchKey, _KeyQueue[T]] = {}
        self._suspects: deque[Job[T]] = deque()
        #: Suspects of an earlier worker: they were not started here.
        self._recovered: deque[Job[T]] = deque()

    def __len__(self) -> int:
        """How many jobs wait, suspects included."""
        flows = chain.from_iterable(each.flows.values() for each in self._queues.values())
        return sum(len(flow.jobs) for flow in flows) + len(self._suspects) + len(self._recovered)

    def __iter__(self) -> Iterator[Job[T]]:
        yield from self._suspects
        yield from self._recovered
        for waiting in self._queues.values():
            yield from waiting

    def admit(self, job: Job[T]) -> None:
        """Takes a job in; it waits behind those of its lane and key that came before."""
        waiting = self._queues.get(job.key)
        if waiting is None:
            waiting = self._queues[job.key] = _KeyQueue()
        flow = waiting.flows.get(job.lane)
        if flow is None:
            flow = waiting.flows[job.lane] = self._shares.wake(job.key, job.lane)
        flow.jobs.append(job)
        waiting.items += job.items

    def quarantine(self, job: Job[T]) -> None:
        """Takes back a job that was on a device which died; it will run alone."""
        self._suspects.append(job)

    def quarantine_recovered(self, job: Job[T]) -> None:
        """Takes in a job that was on a device when an earlier worker died.

        It will run alone, or first with others of its kind: see `Job.among`.
        """
        self._recovered.append(job)

    def clear(self) -> list[Job[T]]:
        """Forgets every job that waits but was never started; returns them.

        Suspects stay: they were started, and the broker's messages are still theirs.
        """
        held = self.held()
        dropped = [*held, *self._recovered]
        self.remove(held)
        self._recovered.clear()
        return dropped

    def held(self) -> list[Job[T]]:
        """Every job that waits, was never started, and could as well wait elsewhere."""
        return [job for waiting in self._queues.values() for job in waiting]

    @property
    def oldest_held_s(self) -> float | None:
        """When the oldest of the jobs came that `held` returns; None if there is none."""
        return min((waiting.oldest_s for waiting in self._queues.values()), default=None)

    @property
    def has_suspects(self) -> bool:
        """Whether a job waits that must run alone."""
        return bool(self._suspects or self._recovered)

    def remove(self, jobs: Iterable[Job[T]]) -> None:
        """Forgets jobs that went to another worker."""
        # Two messages may have the same id.
        gone = set(map(id, jobs))
        for key, waiting in list(self._queues.items()):
            for flow in list(waiting.flows.values()):
                kept = [job for job in flow.jobs if id(job) not in gone]
                flow.jobs.clear()
                flow.jobs.extend(kept)
                self._end_if_empty(waiting, flow)
            waiting.items = sum(job.items for job in waiting)
            if not waiting.flows:
                del self._queues[key]

    def next_batch(
        self, in_flight: int, alone: bool, now_s: float, elsewhere: int = 0
    ) -> Batch[T] | None:
        """The batch that a device should get now.

        Args:
            in_flight: Batches that the device holds already, 0 to `DEVICE_DEPTH`.
            alone: Whether one of them is a suspect, next to which nothing may run.
            now_s: The time, on the clock of `Job.arrived_s`.
            elsewhere: Batches that the worker's other devices hold.

        Returns:
            A batch, whose jobs no longer wait here; or None if the device should get nothing now.
        """
        if alone or in_flight >= DEVICE_DEPTH:
            return None
        if self._suspects:
            if in_flight or (elsewhere and self._suspects[0].recovered):
                return None
            return Batch((self._suspects.popleft(),), alone=True)
        if self._recovered:
            return None if in_flight or elsewhere else self._take_recovered()
        skipped: list[_KeyQueue[T]] = []
        for key, waiting in sorted(self._queues.items(), key=lambda each: each[1].tag):
            due = now_s >= waiting.due_s
            if waiting.full or (due and (in_flight == 0 or waiting.passed_over)):
                for each in skipped:
                    each.passed_over = True
                return self._take(key, waiting)
            if due:
                skipped.append(waiting)
        return None

    def ended(self, batch: Batch[T], run_s: float | None) -> None:
        """Notes that a batch of `next_batch` is back.

        Args:
            batch: The batch, perhaps with fewer jobs than it had.
            run_s: How long it had its device, in seconds; None if the device died.
        """
        if batch.charges:
            self._shares.ended(batch.charges, run_s)

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened; None for never."""
        return min((waiting.due_s for waiting in self._queues.values()), default=None)

    def _take_recovered(self) -> Batch[T]:
        waiting = self._recovered
        jobs = [waiting.popleft()]
        items = jobs[0].items
        limits = jobs[0].limits
        while (
            waiting
            and waiting[0].key == jobs[0].key
            and len(jobs) < min(jobs[0].among, waiting[0].among)
            and items + waiting[0].items <= limits.max_batch_size
        ):
            items += waiting[0].items
            jobs.append(waiting.popleft())
        return Batch(tuple(jobs), alone=len(jobs) == 1)

    def _take(self, key: BatchKey, waiting: _KeyQueue[T]) -> Batch[T]:
        flows = list(waiting.flows.values())
        self._shares.began(waiting.tag)
        if len(flows) == 1:
            jobs, charges = self._take_from_one(flows[0], waiting.limits.max_batch_size)
        else:
            jobs, charges = self._take_from_many(flows, waiting.limits.max_batch_size)
        waiting.items -= sum(charge.items for charge in charges)
        waiting.passed_over = False
        for charge in charges:
            self._end_if_empty(waiting, charge.flow)
        if not waiting.flows:
            del self._queues[key]
        return Batch(tuple(jobs), charges=tuple(charges))

    def _take_from_one(self, flow: Flow[T], limit: int) -> tuple[list[Job[T]], list[Charge]]:
        jobs = [flow.jobs.popleft()]
        items = jobs[0].items
        while flow.jobs and items + flow.jobs[0].items <= limit:
            items += flow.jobs[0].items
            jobs.append(flow.jobs.popleft())
        return jobs, [self._shares.charge(flow, items)]

    def _take_from_many(
        self, flows: list[Flow[T]], limit: int
    ) -> tuple[list[Job[T]], list[Charge]]:
        """Takes the jobs in the order of their tags, as if each was charged by itself."""
        item_s = self._shares.item_s(flows[0].key.task)
        weights = [self._shares.weight(flow) for flow in flows]
        turns = [(flow.tag, place) for place, flow in enumerate(flows)]
        heapify(turns)
        jobs: list[Job[T]] = []
        items, taken = 0, [0] * len(flows)
        while turns:
            tag, place = turns[0]
            waiting = flows[place].jobs
            if jobs and items + waiting[0].items > limit:
                break
            job = waiting.popleft()
            jobs.append(job)
            items += job.items
            taken[place] += job.items
            if waiting:
                heapreplace(turns, (tag + item_s * job.items / weights[place], place))
            else:
                heappop(turns)
        charged = zip(flows, taken, strict=True)
        return jobs, [self._shares.charge(flow, count) for flow, count in charged if count]

    def _end_if_empty(self, waiting: _KeyQueue[T], flow: Flow[T]) -> None:
        if not flow.jobs:
            del waiting.flows[flow.lane]
            self._shares.sleep(flow)

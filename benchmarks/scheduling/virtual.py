"""Devices and jobs in virtual time, where any policy decides what runs next. Pure.

A device only takes time: so much for a batch, so much for each item, and so much to prepare a batch
beside the one before. It is asked as the worker asks: idle devices first, then for batches that go
before what a device holds, then for those that are prepared behind it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from batchery_worker.batching.batch_times import BatchTimes
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits

TASK = "task"


class Arrival(NamedTuple):
    """A job that comes."""

    time_s: float
    lane: Lane
    items: int = 1
    #: Seconds from its arrival.
    deadline_s: float = inf


VirtualJob = Job[Arrival]
VirtualBatch = Batch[Arrival]


class Policy(Protocol):
    """Which jobs are in the next batch: what all have of the scheduler's methods."""

    def admit(self, job: VirtualJob) -> None:
        """Takes a job in."""

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        behind: Sequence[VirtualBatch] = (),
        left_s: float = 0.0,
    ) -> VirtualBatch | None:
        """The batch that a device should get that holds `in_flight`."""

    def ended(self, batch: VirtualBatch, run_s: float | None) -> None:
        """Notes how long a batch had its device."""

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""

    def take_late(self, now_s: float) -> list[VirtualJob]:
        """The jobs that are given up; they wait no longer."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices, all alike."""

    count: int = 4
    pass_s: float = 0.010
    item_s: float = 0.0005
    prepare_s: float = 0.002

    def seconds(self, items: int) -> float:
        """How long a batch is computed."""
        return self.pass_s + self.item_s * items

    def capacity_per_s(self, max_batch_size: int) -> float:
        """Items per second of all devices in full batches."""
        return self.count * max_batch_size / self.seconds(max_batch_size)


class Sent(NamedTuple):
    """A batch that waits on its device."""

    batch: VirtualBatch
    sent_s: float


@dataclass(slots=True, eq=False)
class Device:
    """What one device holds: the batch that runs, an urgent one, one that is prepared."""

    number: int
    running: VirtualBatch | None = None
    urgent: Sent | None = None
    prepared: Sent | None = None
    began_s: float = 0.0
    #: When it may get a batch behind the one that runs.
    opens_s: float = 0.0

    @property
    def held(self) -> list[VirtualBatch]:
        """What may be overtaken by something urgent."""
        batches = [self.running, self.prepared and self.prepared.batch]
        return [batch for batch in batches if batch is not None]


@dataclass(slots=True)
class Run:
    """What became of the jobs."""

    #: Jobs that were done, with the seconds from arrival to answer.
    done: list[tuple[Arrival, float]] = field(default_factory=list)
    given_up: list[Arrival] = field(default_factory=list)
    end_s: float = 0.0
    busy_s: float = 0.0
    batches: int = 0


class Simulation:
    """Jobs, devices, a policy; for one run."""

    def __init__(self, policy: Policy, fleet: Fleet, limits: Limits) -> None:
        """Starts at 0 seconds with idle devices; the policy must be fresh."""
        self._policy, self._fleet, self._limits = policy, fleet, limits
        self._devices = [Device(number) for number in range(fleet.count)]
        self._times = BatchTimes()
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._run = Run()
        self._wake_s = inf

    def run(self, arrivals: Iterable[Arrival]) -> Run:
        """Runs until all jobs are done; they must be in the order of time, and end."""
        stream = iter(arrivals)

        def admit(arrival: Arrival) -> None:
            number = str(next(self._numbers))
            due_s = arrival.time_s + arrival.deadline_s
            self._policy.admit(
                Job(
                    number,
                    BatchKey(TASK),
                    self._limits,
                    arrival.items,
                    self._now_s,
                    arrival,
                    arrival.lane,
                    due_s,
                )
            )
            wait_for_next()

        def wait_for_next() -> None:
            arrival = next(stream, None)
            if arrival is not None:
                self._plan(arrival.time_s, lambda: admit(arrival))

        wait_for_next()
        while self._events:
            self._now_s = self._events[0][0]
            while self._events and self._events[0][0] == self._now_s:
                heappop(self._events)[2]()
            self._dispatch()
        return self._run

    def _plan(self, time_s: float, call: Callable[[], None]) -> None:
        heappush(self._events, (time_s, next(self._numbers), call))

    def _dispatch(self) -> None:
        self._shed()
        if all(map(self._start, [each for each in self._devices if not each.running])):
            busy = sorted(self._devices, key=lambda each: each.began_s)
            if isinstance(self._policy, Scheduler):
                all(map(self._interrupt, busy))
            all(map(self._prepare, [each for each in busy if not each.prepared]))
        self._shed()
        wake_s = self._policy.wake_s()
        if wake_s is not None and self._now_s < wake_s < self._wake_s:
            self._wake_s = wake_s
            self._plan(wake_s, self._awake)

    def _awake(self) -> None:
        self._wake_s = inf

    def _shed(self) -> None:
        self._run.given_up += [job.payload for job in self._policy.take_late(self._now_s)]

    def _start(self, device: Device) -> bool:
        """Gives an idle device a batch; returns whether there was one."""
        batch = self._policy.next_batch(0, False, self._now_s)
        if batch is not None:
            self._begin(device, batch, self._now_s)
        return batch is not None

    def _interrupt(self, device: Device) -> bool:
        """Lets a batch go before what a device holds; returns whether more may be urgent."""
        if device.urgent is None:
            assert isinstance(self._policy, Scheduler)
            batch = self._policy.urgent_batch(device.held, self._now_s, self._left_s(device))
            device.urgent = Sent(batch, self._now_s) if batch else None
        return device.urgent is not None

    def _prepare(self, device: Device) -> bool:
        """Gives a busy device its next batch; returns whether the next device may get one."""
        if self._now_s < device.opens_s:
            return True
        behind = device.held if device.urgent else []
        batch = self._policy.next_batch(1, False, self._now_s, behind, self._left_s(device))
        device.prepared = Sent(batch, self._now_s) if batch else None
        return batch is not None

    def _left_s(self, device: Device) -> float:
        """How long a device has to do with what it holds, as the scheduler has learned."""
        if not isinstance(self._policy, Scheduler):
            return inf
        costs = self._policy.costs
        if not costs.knows(TASK):
            return inf
        left_s = sum(costs.expected_s(TASK, batch.items) for batch in device.held)
        return max(0.0, left_s - (self._now_s - device.began_s))

    def _begin(self, device: Device, batch: VirtualBatch, sent_s: float) -> None:
        device.running, device.began_s = batch, self._now_s
        ran_s = max(self._now_s, sent_s + self._fleet.prepare_s)
        device.opens_s = self._times.next_s(TASK, batch.items, self._now_s)
        if device.opens_s > self._now_s:
            self._plan(device.opens_s, lambda: None)
        self._plan(ran_s + self._fleet.seconds(batch.items), lambda: self._end(device, ran_s))

    def _end(self, device: Device, ran_s: float) -> None:
        batch, had_s, found = device.running, self._now_s - device.began_s, self._run
        assert batch is not None
        self._times.ran(TASK, batch.items, had_s, self._fleet.prepare_s)
        self._policy.ended(batch, had_s)
        found.end_s = self._now_s
        found.busy_s += self._now_s - ran_s
        found.batches += 1
        found.done += [(job.payload, self._now_s - job.arrived_s) for job in batch.jobs]
        device.running = None
        following = device.urgent or device.prepared
        if device.urgent:
            device.urgent = None
        else:
            device.prepared = None
        if following:
            self._begin(device, *following)

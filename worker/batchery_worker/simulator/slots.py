"""Devices with slots in virtual time: jobs join and leave between steps. Pure.

Each item of a job is a step, such as a token that is generated. A step takes `pass_ms`, `item_ms`
for each job in a slot, and `token_ms` for each token of a prompt that is read in it.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from batchery_worker.job import BatchKey, Job, Limits
from batchery_worker.simulator.engine import Fleet
from batchery_worker.simulator.outcome import Recorder, Sent, SimulatedRun
from batchery_worker.simulator.policies import Policy, SimulatedJob
from batchery_worker.simulator.workload import MS_PER_S, Arrival

#: In the place of a device's number: all idle ones look whether a batch is due.
WAKE = -1


@dataclass(slots=True, eq=False)
class Slot:
    """A job in a slot."""

    job: SimulatedJob
    sent: Sent
    #: Steps that it still needs.
    left: int
    #: Tokens that are read in its next step: its prompt, and what it had when it was put aside.
    to_read: int
    #: When it was first in a slot.
    joined_s: float
    has_begun: bool = False
    #: How long it was in slots.
    had_s: float = 0.0


@dataclass(slots=True, eq=False)
class SlotDevice:
    """What one device is doing."""

    number: int
    slowness: float = 1.0
    active: list[Slot] = field(default_factory=list)
    #: Jobs that made room for a higher class; they come back before anything else.
    aside: deque[Slot] = field(default_factory=deque)
    #: Jobs of a static batch that have ended, and are answered with the last one.
    ended: list[Slot] = field(default_factory=list)
    is_running: bool = False


class SlotSimulation:
    """One policy, devices with slots, virtual time; for one run."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        slots: int,
        *,
        preempting: Sequence[str] = (),
        is_static: bool = False,
    ) -> None:
        """Starts at 0 seconds, with empty slots.

        Args:
            policy: Fresh.
            fleet: The devices, none of which dies.
            slots: Maximum number of jobs at once on a device.
            preempting: Classes, highest first: where all slots are taken, an urgent job takes that
                of a lower class. None to let every job stay.
            is_static: Whether a batch stays as it is until its longest job has ended.
        """
        self._policy = policy
        self._fleet = fleet
        self._slots = slots
        self._preempting = list(preempting)
        self._is_static = is_static
        self._limits = Limits(slots if is_static else 1)
        self._recorder = Recorder(fleet.service.overhead_ms / MS_PER_S)
        self._now_s = 0.0
        self._admitted = 0
        self._wake_s = math.inf
        #: Ends of steps, and numbers of their devices; or `WAKE`.
        self._steps: list[tuple[float, int]] = []
        self._devices = [
            SlotDevice(number, fleet.slowness.get(number, 1.0)) for number in range(fleet.count)
        ]

    def run(self, arrivals: Iterable[Arrival]) -> SimulatedRun:
        """Runs until all jobs are done.

        Args:
            arrivals: In the order of time, and not endless.
        """
        stream = iter(arrivals)
        arrival = next(stream, None)
        while arrival is not None or self._steps:
            arrival_s = math.inf if arrival is None else arrival.time_s
            now_s = min(arrival_s, self._steps[0][0]) if self._steps else arrival_s
            self._pass_time(now_s - self._now_s)
            self._now_s = now_s
            while self._steps and self._steps[0][0] == self._now_s:
                _, number = heappop(self._steps)
                if number == WAKE:
                    self._wake_s = math.inf
                else:
                    self._end_step(self._devices[number])
            arrival = self._admit(arrival, stream)
            for device in self._devices:
                if not device.is_running:
                    self._begin_step(device)
            self._plan_wake()
        return self._recorder.close(lambda end_s: end_s * len(self._devices))

    def _pass_time(self, more_s: float) -> None:
        """Has lanes charged for the slots that their jobs have."""
        for device in self._devices if more_s and not self._is_static else ():
            for slot in device.active:
                slot.had_s += more_s
                self._policy.progress(slot.sent.batch, more_s, 1)

    def _admit(self, arrival: Arrival | None, stream: Iterator[Arrival]) -> Arrival | None:
        """Admits all jobs that come now; returns the next one."""
        while arrival is not None and arrival.time_s == self._now_s:
            self._admitted += 1
            key = BatchKey(arrival.task)
            # To the scheduler a job is one item: nobody knows in advance how long a text gets.
            job = Job(
                *(str(self._admitted), key, self._limits, 1, self._now_s, arrival, arrival.lane)
            )
            self._recorder.came(job)
            self._policy.admit(job)
            arrival = next(stream, None)
        return arrival

    def _begin_step(self, device: SlotDevice) -> None:
        while len(device.active) < self._slots:
            if device.aside:
                device.active.append(slot := device.aside.popleft())
                self._policy.progress(slot.sent.batch, 0.0, 1)
            elif (self._is_static and device.active) or not self._join_next(device):
                break
        if self._preempting and len(device.active) == self._slots:
            self._preempt(device)
        if not device.active:
            return
        service = self._fleet.service
        # A static batch is computed as wide as it was at first.
        width = len(device.active) + len(device.ended)
        to_read = sum(slot.to_read for slot in device.active)
        step_ms = service.pass_ms + service.item_ms * width + service.token_ms * to_read
        for slot in device.active:
            slot.to_read = 0
        device.is_running = True
        end_s = self._now_s + step_ms * device.slowness / MS_PER_S
        heappush(self._steps, (end_s, device.number))

    def _join_next(self, device: SlotDevice) -> bool:
        """Lets the next batch join; returns whether there was one."""
        batch = self._policy.next_batch(0, False, self._now_s)
        if batch is not None:
            self._join(device, Sent(batch, self._now_s, self._recorder.contended))
        return batch is not None

    def _join(self, device: SlotDevice, sent: Sent) -> None:
        self._recorder.left(sent.batch.jobs)
        device.active += [
            Slot(job, sent, job.payload.items, job.payload.tokens, self._now_s)
            for job in sent.batch.jobs
        ]

    def _preempt(self, device: SlotDevice) -> None:
        """Puts jobs aside for those of a higher class: of the lowest, the one that came last."""
        rank = self._preempting.index
        while True:
            victim = max(
                device.active, key=lambda slot: (rank(slot.job.lane.priority_class), slot.joined_s)
            )
            # What is put aside goes on where it was: it only reads its tokens once more.
            batch = self._policy.urgent_batch([victim.sent.batch], self._now_s, math.inf)
            if batch is None:
                return
            device.active.remove(victim)
            self._policy.progress(victim.sent.batch, 0.0, 0)
            arrival = victim.job.payload
            victim.to_read = arrival.tokens + arrival.items - victim.left
            device.aside.append(victim)
            self._join(device, Sent(batch, self._now_s, self._recorder.contended))

    def _end_step(self, device: SlotDevice) -> None:
        device.is_running = False
        still: list[Slot] = []
        for slot in device.active:
            if not slot.has_begun:
                slot.has_begun = True
                self._recorder.began(slot.job, self._now_s)
            slot.left -= 1
            (still if slot.left else device.ended).append(slot)
        device.active = still
        if self._is_static and still:
            return
        for slot in {id(slot.sent): slot for slot in device.ended}.values():
            run_s = self._now_s - slot.sent.sent_s if self._is_static else slot.had_s
            self._policy.ended(slot.sent.batch, run_s)
            # So the utilisation is the share of the slots that is taken.
            share_s = run_s * len(slot.sent.batch.jobs) / self._slots
            self._recorder.done(slot.sent, share_s, self._now_s)
        device.ended = []

    def _plan_wake(self) -> None:
        """Plans to come back where a batch waits to fill, and a device is idle."""
        wake_s = self._policy.wake_s()
        is_idle = not all(device.is_running for device in self._devices)
        if is_idle and wake_s is not None and self._now_s < wake_s < self._wake_s:
            self._wake_s = wake_s
            heappush(self._steps, (wake_s, WAKE))

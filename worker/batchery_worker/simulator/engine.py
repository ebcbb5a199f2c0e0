"""Virtual time: jobs come, devices take batches, a policy decides. Pure.

Devices only take time: a batch costs it, some devices are slow, some die.

It asks the policy as the worker's dispatcher asks the scheduler. All that happens at one time is
noted first. Then the device with the fewest batches asks, until the policy has nothing for it. A
device that runs a long batch gets its second one late: `BatchTimes` says when. Urgent batches go
between the passes of another one, whose passes all take the same time here.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from random import Random

from batchery_worker.batching.batch_times import BatchTimes
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits
from batchery_worker.simulator.outcome import Recorder, Sent, SimulatedRun
from batchery_worker.simulator.policies import Policy, SimulatedBatch
from batchery_worker.simulator.workload import MS_PER_S, Arrival

#: Maximum number of devices: beyond it, one process would not do for their jobs in reality either.
MAX_DEVICES = 1000

#: Share of a pass by which a time may miss its end, as sums of times are not exact.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ServiceTime:
    """How long a device takes: a pass has a fixed cost, each item and token its own."""

    pass_ms: float = 10.0
    item_ms: float = 0.5
    token_ms: float = 0.0
    #: From sending a batch until it can run; passes beside the batch before.
    prepare_ms: float = 0.0
    #: From the moment when a caller sends a job until the worker has it; keeps no device busy.
    overhead_ms: float = 0.0
    #: Maximum number of items in a forward pass; None for the whole batch in one.
    micro_batch_size: int | None = None
    #: Standard deviation of the logarithm of a factor on each batch; 0 for none.
    noise: float = 0.0

    def passes(self, items: int) -> int:
        """Number of forward passes of a batch."""
        return math.ceil(items / self.micro_batch_size) if self.micro_batch_size else 1

    def seconds(self, items: int, tokens: float = 0.0) -> float:
        """How long a batch takes without noise."""
        ms = self.pass_ms * self.passes(items) + self.item_ms * items + self.token_ms * tokens
        return ms / MS_PER_S

    def batch_seconds(self, batch: Batch[Arrival], random: Random) -> float:
        """How long a batch takes, with noise."""
        tokens = sum(job.payload.tokens for job in batch.jobs) if self.token_ms else 0
        seconds = self.seconds(batch.items, tokens)
        if self.noise:
            # The mean of the factor is 1.
            seconds *= random.lognormvariate(-(self.noise**2) / 2, self.noise)
        return seconds


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices of a worker."""

    count: int = 1
    service: ServiceTime = ServiceTime()
    #: Number of a device, from 0 -> how many times as long as the others it takes.
    slowness: Mapping[int, float] = field(default_factory=dict)
    #: Number of a device, from 0 -> when it dies, for good, in seconds.
    deaths_s: Mapping[int, float] = field(default_factory=dict)
    #: Tasks whose batches have a time of their own, by name.
    task_services: Mapping[str, ServiceTime] = field(default_factory=dict)

    def find_service(self, task: str) -> ServiceTime:
        """How long a batch of a task takes."""
        return self.task_services.get(task, self.service)

    def capacity_per_s(
        self,
        max_batch_size: int,
        tokens: float = 0.0,
        items: Mapping[str, int] | None = None,
    ) -> float:
        """Items per second that all devices together compute in full batches, while none is dead.

        Args:
            max_batch_size: Items of a full batch.
            tokens: Mean of an item.
            items: How many there are of each task; only the ratios count.
        """
        full_tokens = tokens * max_batch_size
        if items:
            seconds = sum(
                count * self.find_service(task).seconds(max_batch_size, full_tokens)
                for task, count in items.items()
            ) / sum(items.values())
        else:
            seconds = self.service.seconds(max_batch_size, full_tokens)
        speed = sum(1 / self.slowness.get(number, 1.0) for number in range(self.count))
        return speed * max_batch_size / seconds


@dataclass(slots=True, eq=False)
class VirtualDevice:
    """What one device is doing."""

    number: int
    slowness: float = 1.0
    #: The first runs; the second waits behind it.
    batches: deque[Sent] = field(default_factory=deque)
    #: When its first batch was the first.
    began_s: float = 0.0
    #: When that batch was prepared, and ran.
    ran_s: float = 0.0
    #: How many batches it began: says whether an event is of the batch that runs.
    begun: int = 0
    #: Whether its first batch has begun, and not only an urgent one.
    runs: bool = False
    #: When its first batch will end, and how long each pass of it takes.
    ends_s: float = 0.0
    pass_s: float = 0.0
    #: A batch that goes between passes, or between batches; when it ran, if it does.
    urgent: Sent | None = None
    urgent_ran_s: float | None = None
    #: What it holds, if something may go before it; else nothing.
    flows: frozenset[tuple[str, Lane]] = frozenset()
    is_dead: bool = False
    #: Whether it may get a batch behind the one that runs.
    is_open: bool = False
    #: Gets the time when it holds nothing any more; while it is set, the device gets no batch.
    on_stopped: Callable[[float], None] | None = None

    @property
    def name(self) -> str:
        """Of the device, as `BatchTimes` wants it."""
        return str(self.number)


class DeviceLine:
    """Devices that can take a batch, in the order in which the dispatcher asks them.

    A device that cannot any more is not looked for: it leaves when it comes first.
    """

    def __init__(
        self, devices: list[VirtualDevice], held: int, order: Callable[[VirtualDevice], float]
    ) -> None:
        """Is empty.

        Args:
            devices: All, by number.
            held: Batches that the devices of this line hold.
            order: What they are ordered by, then by number; as of when they join.
        """
        self._devices = devices
        self._held = held
        self._order = order
        self._numbers: list[tuple[float, int]] = []
        self._is_in = [False] * len(devices)

    def add(self, device: VirtualDevice) -> None:
        """Takes in a device, once."""
        if not self._is_in[device.number]:
            self._is_in[device.number] = True
            heappush(self._numbers, (self._order(device), device.number))

    def first(self) -> VirtualDevice | None:
        """The first device that can take a batch; it stays. None if there is none."""
        numbers = self._numbers
        while numbers:
            device = self._devices[numbers[0][1]]
            can_take = device.is_open and not device.is_dead and device.on_stopped is None
            if can_take and len(device.batches) == self._held:
                return device
            self._is_in[heappop(numbers)[1]] = False
        return None


class _Event(IntEnum):
    """What happens to a device; WAKE happens to all idle ones, CALL to whoever asked for it."""

    DIES = 0
    ENDS = 1
    ENDS_URGENT = 2
    OPENS = 3
    WAKE = 4
    CALL = 5


class Simulation:
    """One policy, one worker, virtual time; for one run."""

    def __init__(
        self,
        policy: Policy,
        fleet: Fleet,
        limits: Limits,
        seed: int = 0,
        on_done: Callable[[SimulatedBatch, float, float], None] | None = None,
    ) -> None:
        """Starts at 0 seconds, with idle devices.

        Args:
            policy: Fresh.
            fleet: The devices.
            limits: Of all batches.
            seed: Of the noise.
            on_done: Is told of each batch that is back: since when it ran, and until when.
        """
        self._policy = policy
        self._fleet = fleet
        self._limits = limits
        self._prepare_s = fleet.service.prepare_ms / MS_PER_S
        #: All jobs take as long to the worker. So here they come when they are sent, and it is
        #: added to their latencies.
        self._overhead_s = fleet.service.overhead_ms / MS_PER_S
        self._random = Random(seed)
        self._on_done = on_done
        self._times = BatchTimes()
        self._recorder = Recorder(self._overhead_s)
        self._keys: dict[str, BatchKey] = {}
        self._now_s = 0.0
        self._in_flight = 0
        self._admitted = 0
        self._planned = 0
        self._wake_s = math.inf
        #: Time, kind, number of the device, number of its batch.
        self._events: list[tuple[float, _Event, int, int]] = []
        self._calls: dict[int, Callable[[float], None]] = {}
        self._devices = [
            VirtualDevice(number, fleet.slowness.get(number, 1.0), is_open=True)
            for number in range(fleet.count)
        ]
        #: Devices before whose batches something may go, by what they hold.
        self._groups: dict[frozenset[tuple[str, Lane]], set[int]] = {}
        self._idle = DeviceLine(self._devices, 0, lambda device: device.number)
        self._busy = DeviceLine(self._devices, 1, lambda device: device.began_s)
        for device in self._devices:
            self._idle.add(device)
        for number, death_s in fleet.deaths_s.items():
            heappush(self._events, (death_s, _Event.DIES, number, 0))

    def run(self, arrivals: Iterable[Arrival]) -> SimulatedRun:
        """Runs until all jobs are done, or no device is left.

        Args:
            arrivals: In the order of time, and not endless.

        Raises:
            ValueError: They are not in the order of time.
        """
        stream = iter(arrivals)
        arrival = next(stream, None)
        events = self._events
        while arrival is not None or events:
            arrival_s = math.inf if arrival is None else arrival.time_s
            now_s = min(arrival_s, events[0][0]) if events else arrival_s
            if now_s < self._now_s:
                raise ValueError(f"an arrival at {now_s:g} s comes after {self._now_s:g} s")
            self._now_s = now_s
            while events and events[0][0] == now_s:
                self._happen(*heappop(events)[1:])
            if arrival_s == now_s:
                arrival = self._admit(arrival, stream)
            self._dispatch()
        return self._recorder.close(self._alive_s)

    def call_at(self, time_s: float, call: Callable[[float], None]) -> None:
        """Plans a call, as of an autoscaler; a run does not end before it."""
        self._planned += 1
        self._calls[self._planned] = call
        heappush(self._events, (time_s, _Event.CALL, self._planned, 0))

    def stop_device(self, number: int, on_stopped: Callable[[float], None]) -> None:
        """Gives a device no more batches; those that it holds are finished.

        Args:
            number: Of a device that has not been stopped.
            on_stopped: Gets the time when they are; at once if there are none.
        """
        device = self._devices[number]
        device.on_stopped = on_stopped
        self._regroup(device)
        if not device.batches and device.urgent is None:
            on_stopped(self._now_s)

    def start_device(self, number: int) -> None:
        """Gives batches to a device again, which has stopped."""
        device = self._devices[number]
        device.on_stopped = None
        self._idle.add(device)

    def _admit(self, arrival: Arrival | None, stream: Iterator[Arrival]) -> Arrival | None:
        """Admits all jobs that come now; returns the next one."""
        now_s = self._now_s
        while arrival is not None and arrival.time_s == now_s:
            key = self._keys.get(arrival.task)
            if key is None:
                key = self._keys[arrival.task] = BatchKey(arrival.task)
            self._admitted += 1
            number = str(self._admitted)
            due_s = math.inf
            if arrival.deadline_s is not None:
                due_s = now_s + arrival.deadline_s - self._overhead_s
            job = Job(
                number,
                key,
                self._limits,
                arrival.items,
                now_s,
                arrival,
                arrival.lane,
                deadline_s=due_s,
            )
            self._recorder.came(job)
            self._policy.admit(job)
            arrival = next(stream, None)
        return arrival

    def _happen(self, event: _Event, number: int, begun: int) -> None:
        if event is _Event.WAKE:
            self._wake_s = math.inf
            return
        if event is _Event.CALL:
            self._calls.pop(number)(self._now_s)
            return
        device = self._devices[number]
        if event is _Event.DIES:
            self._die(device)
        elif event is _Event.ENDS_URGENT:
            self._end_urgent(device)
        elif begun != device.begun or device.is_dead:
            return
        elif event is _Event.ENDS:
            self._end(device)
        else:
            device.is_open = True
            self._busy.add(device)

    def _dispatch(self) -> None:
        """Gives out batches: to idle devices, then urgent ones, then those to be prepared."""
        if late := self._policy.take_late(self._now_s):
            self._recorder.shed(late)
        idle = self._give_out(self._idle)
        if idle is None:
            if self._policy.takes_urgent and self._recorder.waiting:
                self._interrupt()
            self._give_out(self._busy)
        if late := self._policy.take_late(self._now_s):
            self._recorder.shed(late)
        if idle is not None:
            wake_s = self._policy.wake_s()
            if wake_s is not None and self._now_s < wake_s < self._wake_s:
                self._wake_s = wake_s
                heappush(self._events, (wake_s, _Event.WAKE, 0, 0))

    def _give_out(self, line: DeviceLine) -> VirtualDevice | None:
        """Gives batches to the devices of a line; returns the first one that should get none."""
        policy = self._policy
        while device := line.first():
            held = len(device.batches)
            behind = [each.batch for each in device.batches] if device.urgent else ()
            elsewhere = self._in_flight - held - (device.urgent is not None)
            left_s = self._left_s(device)
            batch = policy.next_batch(held, False, self._now_s, elsewhere, behind, left_s)
            if batch is None:
                return device
            device.batches.append(self._sent(batch))
            # Full with a second one, it leaves its line by itself.
            if not held:
                self._begin(device)
            self._regroup(device)
        return None

    def _sent(self, batch: SimulatedBatch) -> Sent:
        self._recorder.left(batch.jobs)
        self._in_flight += 1
        flows: frozenset[tuple[str, Lane]] = frozenset()
        if self._policy.takes_urgent:
            task = batch.jobs[0].key.task
            flows = frozenset([(task, lane) for lane in {job.lane for job in batch.jobs}])
        return Sent(batch, self._now_s, self._recorder.contended, flows)

    def _interrupt(self) -> None:
        """Sends urgent batches to devices that are busy with something else."""
        for flows in list(self._groups):
            while numbers := self._groups.get(flows):
                device = self._devices[next(iter(numbers))]
                behind = [each.batch for each in device.batches]
                batch = self._policy.urgent_batch(behind, self._now_s, self._left_s(device))
                if batch is None:
                    break
                device.urgent = self._sent(batch)
                self._regroup(device)
                self._send_urgent(device, device.urgent)

    def _left_s(self, device: VirtualDevice) -> float:
        """How long a device has to do with what it holds, as the worker's costs expect."""
        left_s = 0.0
        for each in device.batches:
            expected_s = self._policy.expected_s(each.batch)
            is_first = each is device.batches[0]
            ran_s = self._now_s - device.began_s if is_first and device.runs else 0.0
            left_s += max(0.0, expected_s - ran_s)
        return left_s

    def _send_urgent(self, device: VirtualDevice, sent: Sent) -> None:
        """Lets a batch run before the next pass of the one that runs, or else behind it."""
        ready_s = self._now_s + self._prepare_s
        passes = max(0, math.ceil((ready_s - device.ran_s) / device.pass_s - ROUNDING))
        free_s = device.ran_s + passes * device.pass_s
        if free_s >= device.ends_s - ROUNDING * device.pass_s:
            return
        run_s = self._run_urgent(device, sent, free_s)
        # The time does not count for the batch that waits meanwhile.
        device.began_s += run_s
        device.ran_s += run_s
        device.ends_s += run_s
        self._plan_end(device)

    def _run_urgent(self, device: VirtualDevice, sent: Sent, ran_s: float) -> float:
        """Plans the end of an urgent batch; returns how long it runs."""
        run_s = self._find_service(sent.batch).batch_seconds(sent.batch, self._random)
        run_s *= device.slowness
        device.urgent_ran_s = ran_s
        heappush(self._events, (ran_s + run_s, _Event.ENDS_URGENT, device.number, 0))
        return run_s

    def _find_service(self, batch: SimulatedBatch) -> ServiceTime:
        return self._fleet.find_service(batch.jobs[0].key.task)

    def _regroup(self, device: VirtualDevice) -> None:
        """Notes whether something may go before what a device holds."""
        if device.flows:
            numbers = self._groups[device.flows]
            numbers.discard(device.number)
            if not numbers:
                del self._groups[device.flows]
            device.flows = frozenset()
        can_wait = device.urgent is None and device.on_stopped is None
        if device.batches and can_wait and not device.batches[0].batch.alone:
            device.flows = frozenset().union(*(each.flows for each in device.batches))
            if device.flows:
                self._groups.setdefault(device.flows, set()).add(device.number)

    def _begin(self, device: VirtualDevice) -> None:
        """Starts the first batch of a device, and plans its end."""
        batch, sent_s, *_ = device.batches[0]
        device.runs = True
        device.began_s = self._now_s
        device.ran_s = max(self._now_s, sent_s + self._prepare_s)
        service = self._find_service(batch)
        run_s = service.batch_seconds(batch, self._random) * device.slowness
        device.ends_s = device.ran_s + run_s
        device.pass_s = run_s / service.passes(batch.items)
        device.is_open = False
        self._plan_end(device)

    def _plan_end(self, device: VirtualDevice) -> None:
        """Plans the end of the first batch, and when the one behind it is sent."""
        batch = device.batches[0].batch
        device.begun += 1
        heappush(self._events, (device.ends_s, _Event.ENDS, device.number, device.begun))
        if batch.alone or len(device.batches) > 1 or device.is_open:
            return
        task = batch.jobs[0].key.task
        open_s = self._times.next_s(device.name, task, batch.items, device.began_s)
        if open_s <= self._now_s:
            device.is_open = True
            self._busy.add(device)
        else:
            heappush(self._events, (open_s, _Event.OPENS, device.number, device.begun))

    def _end(self, device: VirtualDevice) -> None:
        sent = device.batches.popleft()
        # What policies and the worker learn has the time in which the device waited for the batch.
        self._came_back(device, sent, self._now_s - device.began_s, device.ran_s)
        device.is_open = device.runs = False
        if device.urgent is not None:
            self._run_urgent(
                device, device.urgent, max(self._now_s, device.urgent.sent_s + self._prepare_s)
            )
        else:
            self._go_on(device)
        self._regroup(device)

    def _end_urgent(self, device: VirtualDevice) -> None:
        sent, ran_s = device.urgent, device.urgent_ran_s
        if sent is None or ran_s is None:
            return
        device.urgent = device.urgent_ran_s = None
        self._came_back(device, sent, self._now_s - ran_s, ran_s)
        if not device.runs:
            self._go_on(device)
        self._regroup(device)

    def _go_on(self, device: VirtualDevice) -> None:
        """Starts the next batch; without one the device is idle."""
        if device.batches:
            self._begin(device)
        else:
            device.is_open = True
            if device.on_stopped is None:
                self._idle.add(device)
            else:
                device.on_stopped(self._now_s)

    def _came_back(self, device: VirtualDevice, sent: Sent, had_s: float, ran_s: float) -> None:
        """Tells everybody of a batch that had its device for a time, and ran since a time."""
        batch = sent.batch
        self._in_flight -= 1
        task = batch.jobs[0].key.task
        self._times.ran(device.name, task, batch.items, had_s, self._prepare_s)
        self._policy.ended(batch, had_s)
        self._recorder.done(sent, self._now_s - ran_s, self._now_s)
        if self._on_done is not None:
            self._on_done(batch, ran_s, self._now_s)

    def _die(self, device: VirtualDevice) -> None:
        device.is_dead = True
        lost = [*device.batches, *([device.urgent] if device.urgent else [])]
        device.batches.clear()
        device.urgent = device.urgent_ran_s = None
        self._regroup(device)
        self._in_flight -= len(lost)
        self._recorder.died(lost, max(0.0, self._now_s - device.ran_s) if lost else 0.0)
        for sent in lost:
            self._policy.ended(sent.batch, None)
            for job in sent.batch.jobs:
                self._recorder.came(job)
                self._policy.quarantine(job)

    def _alive_s(self, end_s: float) -> float:
        """How long all devices together lived until a time."""
        deaths_s = self._fleet.deaths_s
        return sum(min(end_s, deaths_s.get(each.number, end_s)) for each in self._devices)

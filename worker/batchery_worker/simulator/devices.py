"""Devices that only take time: what a batch costs, which devices are slow, which ones die. Pure."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

from batchery_worker.job import Batch, Lane
from batchery_worker.simulator.workload import Arrival

#: Maximum number of devices: beyond it, one process would not do for their jobs in reality either.
MAX_DEVICES = 1000

MS_PER_S = 1000


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


class Sent(NamedTuple):
    """A batch on a device."""

    batch: Batch[Arrival]
    sent_s: float
    #: Whether all lanes still had waiting jobs when it left: only then do the shares decide.
    contended: bool
    #: Its tasks and lanes: of those that have the same ones, all or none may be interrupted.
    flows: frozenset[tuple[str, Lane]] = frozenset()


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
            if len(device.batches) == self._held and device.is_open and not device.is_dead:
                return device
            self._is_in[heappop(numbers)[1]] = False
        return None

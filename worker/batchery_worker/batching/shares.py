"""Whose turn it is: lanes share the time of the devices, by start-time fair queueing. Pure.

Each lane of jobs has a tag, its virtual time: the device time that it was given, divided by its
weight. The lane with the lowest tag is next. A lane that was empty starts at the present virtual
time, so it can save up nothing. Nobody has to know in advance how long a job takes: a batch is
charged with an estimate when it leaves, and corrected when it is back.

P. Goyal, H. M. Vin, H. Cheng: Start-time Fair Queueing, SIGCOMM 1996. While two lanes both wait for
one device, what they were given, divided by their weights, differs by a batch of each at most.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from batchery_worker.job import BatchKey, Job, Lane, T

#: Device time of an item of a task that never ran, in seconds. It is corrected after each batch.
#: Until then too much only makes lanes take turns; too little would let one run ahead.
UNKNOWN_ITEM_S = 1.0

#: Weight of the latest batch in the learnt time of an item.
NEW_SHARE = 0.25

#: Number of empty lanes that are remembered; beyond it, those that owe nothing are forgotten.
MAX_ASLEEP = 1024


@dataclass(slots=True, eq=False)
class Flow(Generic[T]):
    """The waiting jobs of one lane and one key, oldest first."""

    key: BatchKey
    lane: Lane
    #: Virtual time at which its oldest job begins.
    tag: float = 0.0
    jobs: deque[Job[T]] = field(default_factory=deque)

    @property
    def group(self) -> tuple[str, str]:
        """Task and tenant: flows that differ only in the rest of their keys are one group."""
        return self.key.task, self.lane.tenant


class Charge(NamedTuple):
    """What a flow was charged for its part of a batch."""

    flow: Flow[Any]
    items: int
    estimate_s: float
    weight: float


class Shares:
    """The tags of all flows; decides nothing itself."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """Starts with no flow.

        Args:
            shares: Share of each priority class, above 0; only their ratios matter.
        """
        self._shares = shares
        self._now = 0.0
        self._item_s: dict[str, float] = {}
        self._asleep: dict[tuple[BatchKey, Lane], Flow[Any]] = {}
        #: Class -> task and tenant -> number of its keys that have waiting jobs.
        self._awake: dict[str, dict[tuple[str, str], int]] = {name: {} for name in shares}
        #: Number of batches that are not back.
        self._running = 0

    def wake(self, key: BatchKey, lane: Lane) -> Flow[Any]:
        """The flow of a lane and key that has its first waiting job."""
        if not self._running and not any(self._awake.values()):
            # Nobody had to wait, so nobody owes anything.
            self._asleep.clear()
        flow = self._asleep.pop((key, lane), None) or Flow(key, lane)
        flow.tag = max(flow.tag, self._now)
        keys = self._awake[lane.priority_class]
        keys[flow.group] = keys.get(flow.group, 0) + 1
        return flow

    def sleep(self, flow: Flow[Any]) -> None:
        """Notes that a flow has no waiting job left."""
        keys = self._awake[flow.lane.priority_class]
        keys[flow.group] -= 1
        if not keys[flow.group]:
            del keys[flow.group]
        self._asleep[flow.key, flow.lane] = flow
        if len(self._asleep) > MAX_ASLEEP:
            self._asleep = {
                (each.key, each.lane): each
                for each in self._asleep.values()
                if each.tag > self._now
            }

    def weight(self, flow: Flow[Any]) -> float:
        """The share of a flow: that of its class, divided by all tenants and tasks that wait in it.

        A tenant or task with jobs of several keys has no more for it.
        """
        groups = self._awake[flow.lane.priority_class]
        return self._shares[flow.lane.priority_class] / (len(groups) * groups[flow.group])

    def item_s(self, task: str) -> float:
        """Expected device time of an item, in seconds."""
        return self._item_s.get(task, UNKNOWN_ITEM_S)

    def began(self, tag: float) -> None:
        """Moves the virtual time to the tag of a batch that leaves, and counts the batch."""
        self._now = max(self._now, tag)
        self._running += 1

    def charge(self, flow: Flow[Any], items: int) -> Charge:
        """Charges a flow for items that leave in a batch. It must not be asleep yet."""
        estimate_s, weight = self.item_s(flow.key.task) * items, self.weight(flow)
        flow.tag += estimate_s / weight
        return Charge(flow, items, estimate_s, weight)

    def ended(self, charges: Sequence[Charge], run_s: float | None) -> None:
        """Corrects the charges of a batch that is back.

        Args:
            charges: All of the batch.
            run_s: How long it had its device, in seconds; None if that is not known, as its device
                died.
        """
        self._running -= 1
        if run_s is None:
            return
        items = sum(charge.items for charge in charges)
        for charge in charges:
            charge.flow.tag += (run_s * charge.items / items - charge.estimate_s) / charge.weight
        task = charges[0].flow.key.task
        found_s = run_s / items
        known_s = self._item_s.get(task, found_s)
        self._item_s[task] = known_s + NEW_SHARE * (found_s - known_s)

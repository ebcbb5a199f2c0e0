"""Whose turn it is: lanes share the time of the devices, by start-time fair queueing. Pure.

Each lane of jobs has a tag, its virtual time: the device time that it was given, divided by its
weight. The lane with the lowest tag is next. A lane that was empty starts at the present virtual
time, so it can save up nothing. Nobody has to know in advance how long a job takes: a batch is
charged with an estimate when it leaves, and corrected when it is back.

P. Goyal, H. M. Vin, H. Cheng: Start-time Fair Queueing, SIGCOMM 1996. While two lanes both wait for
one device, what they were given, divided by their weights, differs by a batch of each at most.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchery_worker.batching.flow import Flow
from batchery_worker.batching.task_costs import TaskCosts
from batchery_worker.job import BatchKey, Lane

#: Number of empty lanes that are remembered; beyond it, those that owe nothing are forgotten.
MAX_ASLEEP = 1024


class Charge(NamedTuple):
    """What a flow was charged for its part of a batch."""

    flow: Flow[Any]
    items: int
    estimate_s: float
    weight: float


class Shares:
    """The tags of all flows; decides nothing itself."""

    def __init__(self, shares: Mapping[str, float], costs: TaskCosts) -> None:
        """Starts with no flow.

        Args:
            shares: Share of each priority class, above 0; only their ratios matter.
            costs: Expects how long batches take, and learns from those that are back.
        """
        self._shares = shares
        self._costs = costs
        self._now = 0.0
        self._asleep: dict[tuple[BatchKey, Lane], Flow[Any]] = {}
        #: Class -> task and tenant -> number of its keys that have waiting jobs.
        self._awake: dict[str, dict[tuple[str, str], int]] = {name: {} for name in shares}

    def wake(self, key: BatchKey, lane: Lane) -> Flow[Any]:
        """The flow of a lane and key that has its first waiting job."""
        if not any(self._awake.values()):
            self._forgive()
        flow = self._asleep.pop((key, lane), None)
        if flow is None:
            flow = Flow(key, lane)
        flow.tag = max(flow.tag, self._now)
        keys = self._awake[lane.priority_class]
        keys[flow.group] = keys.get(flow.group, 0) + 1
        return flow

    def _forgive(self) -> None:
        """Lets flows owe nothing but the batches that run, as nobody waits.

        Otherwise a lane that has long had more than its share, of devices with time to spare, would
        pay for it when others come.
        """
        for flow in self._asleep.values():
            flow.tag = min(flow.tag, self._now + flow.running)
        self._forget()

    def _forget(self) -> None:
        """Forgets the empty flows that owe nothing."""
        self._asleep = {
            (each.key, each.lane): each for each in self._asleep.values() if each.tag > self._now
        }

    def sleep(self, flow: Flow[Any]) -> None:
        """Notes that a flow has no waiting job left."""
        keys = self._awake[flow.lane.priority_class]
        keys[flow.group] -= 1
        if not keys[flow.group]:
            del keys[flow.group]
        self._asleep[flow.key, flow.lane] = flow
        if len(self._asleep) > MAX_ASLEEP:
            self._forget()

    def weight(self, flow: Flow[Any]) -> float:
        """The share of a flow: that of its class, divided by all tenants and tasks that wait in it.

        A tenant or task with jobs of several keys has no more for it.
        """
        name = flow.lane.priority_class
        groups = self._awake[name]
        return self._shares[name] / (len(groups) * groups[flow.group])

    def item_s(self, task: str, items: int) -> float:
        """Expected device time of each item of a batch, in seconds.

        Args:
            task: Task of the batch.
            items: Number of all its items.
        """
        return self._costs.expected_s(task, items) / items

    def began(self, tag: float) -> None:
        """Moves the virtual time to the tag of a batch that leaves."""
        self._now = max(self._now, tag)

    def charge(self, flow: Flow[Any], items: int, item_s: float) -> Charge:
        """Charges a flow for its part of a batch that leaves. It must not be asleep yet.

        Args:
            flow: Whose items they are.
            items: Number of its items.
            item_s: Of `item_s`, for the whole batch.
        """
        estimate_s, weight = item_s * items, self.weight(flow)
        flow.tag += estimate_s / weight
        flow.running += estimate_s / weight
        return Charge(flow, items, estimate_s, weight)

    def ended(self, charges: Sequence[Charge], run_s: float | None) -> None:
        """Corrects the charges of a batch that is back.

        Args:
            charges: All of the batch.
            run_s: How long it had its device, in seconds; None if that is not known, as its device
                died.
        """
        for charge in charges:
            charge.flow.running -= charge.estimate_s / charge.weight
        if run_s is None:
            return
        items = sum([charge.items for charge in charges])
        for charge in charges:
            charge.flow.tag += (run_s * charge.items / items - charge.estimate_s) / charge.weight
        self._costs.ran(charges[0].flow.key.task, items, run_s)

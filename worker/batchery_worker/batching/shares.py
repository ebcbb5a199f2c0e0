"""Whose turn it is: lanes share the time of the devices, by start-time fair queueing. Pure.

Each lane of jobs has a tag, its virtual time: the device time that it was given, divided by its
weight. The lane with the lowest tag is next. A lane that was empty starts at the present virtual
time, the tag of what is in service, so it can save up nothing. Nobody has to know in advance how
long a job takes: a batch is charged with an estimate when it leaves, and corrected when it is back.
A job in slots is charged as it runs, and a little in advance for each slot as long as it has it. So
lanes that owe each other nothing share the slots themselves.

To load a model takes device time as well. The class and tenant whose batch needs it pay for that
with all of their tasks, and newly come ones. If only the task paid whose model it is, it would wait
until their others have had as much, and its model might have to make room before its next batch.

P. Goyal, H. M. Vin, H. Cheng: Start-time Fair Queueing, SIGCOMM 1996. While two lanes both wait for
one device, what they were given, divided by their weights, differs by a batch of each at most.

Lanes that come once would keep that time where it is, as each is in service at the tag with which
it came: all others would starve, and all that came would have to be remembered. So a lane that is
not known starts at the tag of a flow that all newcomers of its class are together, which is charged
with the first batch of each. Virtual time follows them, and passes the lanes that are empty: those
behind it owe nothing and are forgotten.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from math import inf
from typing import Any, Generic

from batchery_worker.batching.cost_model import UNKNOWN_ITEM_S, TaskCosts
from batchery_worker.job import BatchKey, Job, Lane, Limits, T

#: A job counts as due so long after it came, in seconds, unless its deadline is earlier. So those
#: with deadlines go first, and can hold up the others for so long at most.
DUE_S = 60.0

#: For how long a lane is charged in advance for each slot that it has, in seconds. A lane that had
#: so much more of slots than its share counts as if it had one slot more.
SLOT_AHEAD_S = 1.0

_numbers = count()


@dataclass(slots=True, eq=False)
class Flow(Generic[T]):
    """The waiting jobs of one lane and one key: earliest deadline first, then as they came."""

    key: BatchKey
    lane: Lane
    #: Virtual time at which its next job begins.
    tag: float = 0.0
    #: Virtual time for which it was charged in batches that are not back.
    running: float = 0.0
    #: Number of those batches.
    batches: int = 0
    #: Whether it is not known from before, and had no batch yet.
    is_new: bool = False
    #: Number of items of its jobs.
    items: int = 0
    #: Task and tenant: flows that differ only in the rest of their keys are one group.
    group: tuple[str, str] = field(init=False)
    #: Jobs without an early deadline, as they came.
    _undated: deque[Job[T]] = field(default_factory=deque)
    #: A heap of jobs with an early deadline: when they are due, number, job.
    _dated: list[tuple[float, int, Job[T]]] = field(default_factory=list)
    #: When the oldest of those came; None if that must be looked up.
    _oldest_dated_s: float | None = inf

    def __post_init__(self) -> None:
        self.group = self.key.task, self.lane.tenant

    def __len__(self) -> int:
        """Number of its jobs."""
        return len(self._undated) + len(self._dated)

    def __iter__(self) -> Iterator[Job[T]]:
        return chain((job for _, _, job in self._dated), self._undated)

    @property
    def oldest_s(self) -> float:
        """When the oldest of its jobs came; it must have one."""
        if self._oldest_dated_s is None:
            self._oldest_dated_s = min((job.arrived_s for _, _, job in self._dated), default=inf)
        if not self._undated:
            return self._oldest_dated_s
        return min(self._undated[0].arrived_s, self._oldest_dated_s)

    def add(self, job: Job[T]) -> None:
        """Takes a job in."""
        self.items += job.items
        if job.deadline_s < job.arrived_s + DUE_S:
            # One whose deadline is over would otherwise go before others for ever.
            due_s = max(job.deadline_s, job.arrived_s)
            heappush(self._dated, (due_s, next(_numbers), job))
            if self._oldest_dated_s is not None:
                self._oldest_dated_s = min(self._oldest_dated_s, job.arrived_s)
        else:
            self._undated.append(job)

    def first(self) -> Job[T]:
        """The job that is due first; there must be one."""
        return self._dated[0][2] if self._is_dated_first() else self._undated[0]

    def pop(self) -> Job[T]:
        """Takes the job out that is due first; there must be one."""
        if self._is_dated_first():
            job = heappop(self._dated)[2]
            if job.arrived_s == self._oldest_dated_s:
                self._oldest_dated_s = None
        else:
            job = self._undated.popleft()
        self.items -= job.items
        return job

    def take(self, is_wanted: Callable[[Job[T]], bool]) -> list[Job[T]]:
        """Takes out the jobs that are wanted."""
        taken = [job for job in self if is_wanted(job)]
        if taken:
            # Two messages may have the same id.
            gone = set(map(id, taken))
            self._undated = deque(job for job in self._undated if id(job) not in gone)
            self._dated = [entry for entry in self._dated if id(entry[2]) not in gone]
            heapify(self._dated)
            self._oldest_dated_s = None
            self.items -= sum(job.items for job in taken)
        return taken

    def _is_dated_first(self) -> bool:
        if not self._dated:
            return False
        return not self._undated or self._dated[0][0] < self._undated[0].arrived_s + DUE_S


@dataclass(slots=True)
class KeyFlows(Generic[T]):
    """The waiting jobs of one key, in the flows of their lanes; never empty."""

    key: BatchKey
    limits: Limits
    flows: dict[Lane, Flow[T]] = field(default_factory=dict)
    passed_over: bool = False

    def __iter__(self) -> Iterator[Job[T]]:
        return chain.from_iterable(self.flows.values())

    @property
    def items(self) -> int:
        """Number of items of its jobs."""
        return sum([flow.items for flow in self.flows.values()])

    @property
    def oldest_s(self) -> float:
        """When the oldest of its jobs came."""
        return min(flow.oldest_s for flow in self.flows.values())

    @property
    def due_s(self) -> float:
        """When an idle device stops waiting for more."""
        return self.oldest_s + self.limits.max_wait_s


@dataclass(slots=True, eq=False)
class Charge:
    """What a flow was charged for its part of a batch."""

    flow: Flow[Any]
    items: int
    estimate_s: float
    weight: float
    #: The weight of all newcomers of its class, if it is the first batch of one; otherwise 0.
    newcomers: float
    #: For how long it was charged for slots that its items had, in seconds, beside the estimate.
    had_s: float = 0.0


@dataclass(slots=True)
class _Group:
    """The waiting flows of a task and tenant."""

    keys: int = 0
    newcomers: int = 0


@dataclass(slots=True)
class _PriorityClass:
    """What the flows of a class have in common."""

    share: float
    groups: dict[tuple[str, str], _Group] = field(default_factory=dict)
    #: The tag with which newcomers start, unless virtual time is ahead of it.
    entry: float = 0.0
    #: How many groups wait of each tenant.
    tenants: Counter[str] = field(default_factory=Counter)
    #: How many groups' shares those newcomers have together that wait.
    newcomers: float = 0.0
    #: The same when the last batch left.
    newcomers_then: float = 0.0

    def count(self, flow: Flow[Any], keys: int, newcomers: int) -> None:
        """Counts a flow that begins or ends to wait, or to be new."""
        self.tenants[flow.lane.tenant] += flow.group not in self.groups
        group = self.groups.setdefault(flow.group, _Group())
        self.newcomers -= group.newcomers / max(1, group.keys)
        group.keys += keys
        group.newcomers += newcomers
        self.newcomers += group.newcomers / max(1, group.keys)
        if not group.keys:
            del self.groups[flow.group]
            self.tenants[flow.lane.tenant] -= 1
            if not self.tenants[flow.lane.tenant]:
                del self.tenants[flow.lane.tenant]
        if not self.groups:
            self.newcomers = 0.0


class Shares:
    """The tags of all flows; decides nothing itself."""

    def __init__(
        self, shares: Mapping[str, float], costs: TaskCosts, *, in_slots: bool = False
    ) -> None:
        """Starts with no flow.

        Args:
            shares: Share of each priority class, above 0; only their ratios matter.
            costs: Expects how long batches take, and learns from those that are back.
            in_slots: Whether each job takes slots for itself, and `progress` says for how long.
        """
        self._in_slots = in_slots
        self._classes = {name: _PriorityClass(share) for name, share in shares.items()}
        self._costs = costs
        #: Number of flows with jobs.
        self._awake = 0
        #: Virtual time: the lowest tag of the batch that left last.
        self._now = 0.0
        #: Class and tenant -> virtual time at which a flow of theirs begins that had no job: later
        #: than the present, if they have loads to pay for.
        self._loaded: dict[tuple[str, str], float] = {}
        #: Empty flows that still owe something, or have batches that are not back.
        self._asleep: dict[tuple[BatchKey, Lane], Flow[Any]] = {}
        #: A heap of them: tag, number, flow. Those that woke meanwhile are passed over.
        self._owing: list[tuple[float, int, Flow[Any]]] = []
        self._numbers = count()

    def __len__(self) -> int:
        """Number of empty flows that are remembered."""
        return len(self._asleep)

    def wake(self, key: BatchKey, lane: Lane) -> Flow[Any]:
        """The flow of a lane and key that has its first waiting job."""
        if not self._awake:
            self._forgive()
        self._awake += 1
        own = self._classes[lane.priority_class]
        flow = self._asleep.pop((key, lane), None)
        if flow is None:
            flow = Flow(key, lane, own.entry, is_new=True)
        loaded = self._loaded.get(lane[:2], 0.0)
        flow.tag = max(flow.tag, loaded, self._now + flow.running * self._in_slots)
        own.count(flow, 1, int(flow.is_new))
        return flow

    def _forgive(self) -> None:
        """Lets flows owe nothing but the batches that run, as nobody waits.

        Otherwise a lane that has long had more than its share, of devices with time to spare, would
        pay for it when others come.
        """
        for each in self._classes.values():
            each.entry = self._now
        self._owing.clear()
        self._loaded.clear()
        self._asleep = {place: flow for place, flow in self._asleep.items() if flow.batches}
        for flow in self._asleep.values():
            flow.tag = min(flow.tag, self._now + flow.running)

    def sleep(self, flow: Flow[Any]) -> None:
        """Notes that a flow has no waiting job left."""
        self._awake -= 1
        self._classes[flow.lane.priority_class].count(flow, -1, -int(flow.is_new))
        if not flow.is_new:
            self._asleep[flow.key, flow.lane] = flow
            self._remember(flow)

    def _remember(self, flow: Flow[Any]) -> None:
        """Remembers an empty flow until virtual time has reached its tag, which is final."""
        if not flow and not flow.batches:
            heappush(self._owing, (flow.tag, next(self._numbers), flow))
            self._forget()

    def _forget(self) -> None:
        """Forgets the empty flows that owe nothing."""
        while self._owing and self._owing[0][0] <= self._now:
            flow = heappop(self._owing)[2]
            place = flow.key, flow.lane
            if not flow.batches and flow.tag <= self._now and self._asleep.get(place) is flow:
                del self._asleep[place]

    def weight(self, flow: Flow[Any]) -> float:
        """The share of a flow: that of its class, divided by all tenants and tasks that wait in it.

        A tenant or task with jobs of several keys has no more for it.
        """
        own = self._classes[flow.lane.priority_class]
        return own.share / (len(own.groups) * own.groups[flow.group].keys)

    def weigh_lane(self, flow: Flow[Any]) -> float:
        """The share of all flows that wait of the class and tenant of one."""
        own, tenant = self._classes[flow.lane.priority_class], flow.lane.tenant
        return own.share * own.tenants[tenant] / max(1, len(own.groups))

    def others(self, weight: float, names: Collection[str] = ()) -> float:
        """How many batches of others come in between two of some flows, by their shares.

        Args:
            weight: The sum of the weights of these flows.
            names: Their classes, where none of their jobs waits any more.
        """
        shares = [
            each.share for name, each in self._classes.items() if each.groups or name in names
        ]
        return max(0.0, sum(shares) / weight - 1)

    def item_s(self, task: str, items: int) -> float:
        """Expected device time of each item of a batch, in seconds."""
        return self._costs.expected_s(task, items) / items

    def charged_item_s(self, task: str, items: int) -> float:
        """The same, as a batch that leaves is charged with it: little before costs are fitted.

        A first batch may compile for a minute. If others were charged so much before they are back,
        virtual time would be ahead of all that wait, and newcomers would starve for that minute.
        """
        item_s = self.item_s(task, items)
        return item_s if self._costs.are_fitted(task) else min(item_s, UNKNOWN_ITEM_S)

    def began(self, tag: float) -> None:
        """Moves the virtual time to the tag of a batch that leaves."""
        if not self._in_slots:
            self._now = max(self._now, tag)
        for each in self._classes.values():
            each.entry = max(each.entry, self._now)
            each.newcomers_then = each.newcomers
        self._forget()

    def charge(self, flow: Flow[Any], items: int, item_s: float) -> Charge:
        """Charges a flow for its part of a batch that leaves. It must not be asleep yet.

        Args:
            flow: Whose items they are.
            items: Number of its items.
            item_s: Of `charged_item_s`, for the whole batch.
        """
        own, weight = self._classes[flow.lane.priority_class], self.weight(flow)
        estimate_s = (SLOT_AHEAD_S if self._in_slots else item_s) * items
        flow.tag += estimate_s / weight
        flow.running += estimate_s / weight
        flow.batches += 1
        newcomers = 0.0
        if flow.is_new:
            newcomers = max(weight, own.share * own.newcomers_then / len(own.groups))
            own.count(flow, 0, -1)
            flow.is_new = False
        return Charge(flow, items, estimate_s, weight, newcomers)

    def progress(self, charge: Charge, had_s: float, slots: int) -> None:
        """Charges a job in slots as it runs, as nobody knows how long it will.

        Args:
            charge: Of a job that is not back.
            had_s: How long its items had slots since the last call, in seconds together.
            slots: How many they have now; none while it makes room for another job.
        """
        flow, weight = charge.flow, charge.weight
        ahead_s = SLOT_AHEAD_S * slots
        change, charge.estimate_s = (ahead_s - charge.estimate_s) / weight, ahead_s
        flow.running += change
        flow.tag += change + had_s / weight
        charge.had_s += had_s
        if charge.newcomers:
            self._classes[flow.lane.priority_class].entry += had_s / charge.newcomers
        # The tag of the job, if it was the last one of its flow to begin.
        self._now = max(self._now, flow.tag - flow.running - charge.had_s / weight)

    def ended(self, charges: Sequence[Charge], run_s: float | None) -> None:
        """Corrects the charges of a batch that is back.

        Args:
            charges: All of the batch.
            run_s: How long it had its device, in seconds; None if that is not known, as its device
                died.
        """
        items = sum([charge.items for charge in charges])
        for charge in charges:
            flow, estimate_s, weight = charge.flow, charge.estimate_s, charge.weight
            took_s = charge.had_s or estimate_s if run_s is None else run_s * charge.items / items
            flow.running -= estimate_s / weight
            flow.batches -= 1
            flow.tag += (took_s - charge.had_s - estimate_s) / weight
            if charge.newcomers:
                entry_s = took_s - charge.had_s
                self._classes[flow.lane.priority_class].entry += entry_s / charge.newcomers
            self._remember(flow)
        if run_s is not None:
            self._costs.ran(charges[0].flow.key.task, items, run_s)

    def loaded(
        self, charges: Sequence[Charge], load_s: float, waiting: Collection[Flow[Any]]
    ) -> None:
        """Charges classes and tenants for the load of a model, each for its part of the batch.

        Args:
            charges: All of the batch.
            load_s: How long the device has loaded, in seconds.
            waiting: All flows that wait.
        """
        self._loaded = {lane: tag for lane, tag in self._loaded.items() if tag > self._now}
        added: dict[tuple[str, str], float] = {}
        item_s = load_s / sum([charge.items for charge in charges])
        for charge in charges:
            weight = max(charge.weight, self.weigh_lane(charge.flow))
            lane = charge.flow.lane[:2]
            added[lane] = added.get(lane, 0.0) + charge.items * item_s / weight
        for lane, more in added.items():
            self._loaded[lane] = max(self._loaded.get(lane, 0.0), self._now) + more
        for flow in [*waiting, *self._asleep.values()]:
            if flow.lane[:2] in added:
                flow.tag += added[flow.lane[:2]]
                self._remember(flow)

"""Which jobs, when: pure policy of one device. Time is an argument, nothing here waits.

The rules, in the order in which they are asked:

1. Suspects go first, alone on an empty device: only then can a death be blamed. A process that dies
   seldom died of its jobs, so at first they run in halves of their batch, and then one at a time.
   Those in slots always run in halves: one by one they would take too long.
2. An idle device takes what is there at once, unless `max_wait_ms` asks it to let the batch grow.
3. A busy device takes a second batch only when that batch is full. Until then the batch keeps
   growing. Nothing is lost by waiting, because the device would only put the batch aside.
4. Between the passes of a batch that runs, a batch of a higher class may go first: see
   `urgent_batch`.
5. Lanes share the time of the devices: see `shares.py`. The key of the lane that is owed most goes
   next, and its batch has jobs of all lanes of that key. A key that was passed over because its
   batch was still growing goes next, full or not, so that a busy neighbour cannot starve it.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Generic

from batchery_worker.batching.cost_model import TaskCosts
from batchery_worker.batching.latency_target import LatencyTarget
from batchery_worker.batching.shares import Charge, Flow, KeyFlows, Shares
from batchery_worker.job import DEVICE_DEPTH, USUAL_LANE, Batch, BatchKey, Job, T

#: Jobs of a higher class have a batch of their own if it saves them so many times its own time to
#: wait: each such batch adds a pass, and costs the others a tenth of their throughput at most.
MIN_SAVED_TIMES = 10.0

#: The shares of a scheduler that knows of no classes.
ONE_CLASS = {USUAL_LANE.priority_class: 1.0}


class Scheduler(Generic[T]):
    """Holds the jobs that wait for a device and forms their batches as late as possible."""

    def __init__(
        self,
        shares: Mapping[str, float] = ONE_CLASS,
        costs: TaskCosts | None = None,
        *,
        sheds_late: bool = False,
        in_slots: bool = False,
        sharers: int = 1,
    ) -> None:
        """Holds no jobs.

        Args:
            shares: Share of each priority class, above 0, highest class first; only the ratios of
                the shares matter.
            costs: What batches cost, learned from `ended`; of its own by default.
            sheds_late: Whether jobs that cannot make their deadline are given up, as `take_late`
                says.
            in_slots: Whether jobs run in slots of the device; each job is a batch.
            sharers: How many devices take turns on the card, with this one.
        """
        self._sharers = sharers
        self._in_slots = in_slots
        self.costs = costs or TaskCosts()
        self._shares = Shares(shares, self.costs, in_slots=in_slots)
        self._sheds_late = sheds_late
        self._targets: dict[str, LatencyTarget] = {}
        #: Jobs that were given up and not told yet.
        self._late: list[Job[T]] = []
        self._ranks = {name: rank for rank, name in enumerate(shares)}
        self._queues: dict[BatchKey, KeyFlows[T]] = {}
        #: Jobs that may have killed a device, in the order in which they run.
        self._suspects: deque[Job[T]] = deque()

    def __len__(self) -> int:
        """How many jobs wait, suspects included."""
        flows = chain.from_iterable(each.flows.values() for each in self._queues.values())
        return sum(map(len, flows)) + len(self._suspects)

    def __iter__(self) -> Iterator[Job[T]]:
        yield from self._suspects
        for waiting in self._queues.values():
            yield from waiting

    def admit(self, job: Job[T]) -> None:
        """Takes a job in; it waits behind those of its lane and key that came before."""
        waiting = self._queues.get(job.key)
        if waiting is None:
            waiting = self._queues[job.key] = KeyFlows(job.key, job.limits)
        flow = waiting.flows.get(job.lane)
        if flow is None:
            flow = waiting.flows[job.lane] = self._shares.wake(job.key, job.lane)
        flow.add(job)

    def quarantine(self, job: Job[T]) -> None:
        """Takes in a job that was on a device which died.

        It will run alone, or first with others of its kind: see `Job.among`.
        """
        self._suspects.append(job)

    def clear(self) -> list[Job[T]]:
        """Forgets every job that waits; returns them."""
        dropped = list(self)
        self.remove(dropped)
        return dropped

    def held(self) -> list[Job[T]]:
        """Every job that could as well wait elsewhere: suspects could not."""
        return [job for waiting in self._queues.values() for job in waiting]

    def count_items(self, task: str, priority_class: str) -> int:
        """How many items of a task and class wait that could share a batch: those of one key."""
        own = [
            [
                flow.items
                for flow in waiting.flows.values()
                if flow.lane.priority_class == priority_class
            ]
            for waiting in self._queues.values()
            if waiting.key.task == task
        ]
        return max(map(sum, own), default=0)

    def goes_before(self, priority_class: str, behind: Sequence[Batch[T]]) -> bool:
        """Whether jobs of a class may go before batches that run, as `urgent_batch` sees it."""
        flows = self._find_flows(behind)
        return bool(flows) and self._ranks[priority_class] < min(map(self._rank, flows))

    def oldest_held_s(self) -> float | None:
        """When the oldest of the jobs came that `held` returns; None if there is none."""
        return min((waiting.oldest_s for waiting in self._queues.values()), default=None)

    @property
    def holds_any(self) -> bool:
        """Whether any job waits, suspects included."""
        return bool(self._queues or self._suspects)

    @property
    def holds_part(self) -> bool:
        """Whether jobs wait, but no full batch of them: it would be larger if more were here."""
        return bool(self._queues) and not any(
            waiting.items >= self._max_items(waiting) for waiting in self._queues.values()
        )

    @property
    def has_suspects(self) -> bool:
        """Whether suspects wait: the device leaves all else until they have run."""
        return bool(self._suspects)

    def remove(self, jobs: Iterable[Job[T]]) -> None:
        """Forgets jobs that went to another worker."""
        # Two messages may have the same id.
        gone = set(map(id, jobs))
        self._suspects = deque(job for job in self._suspects if id(job) not in gone)
        for waiting in list(self._queues.values()):
            self._take_out(waiting, waiting.flows.values(), lambda job: id(job) in gone)

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        behind: Sequence[Batch[T]] = (),
        left_s: float = 0.0,
        *,
        cohort: int = 0,
    ) -> Batch[T] | None:
        """The batch that the device should get now.

        Args:
            in_flight: Batches that the device holds already, 0 to `DEVICE_DEPTH`, or fewer than it
                has slots; urgent ones do not count.
            alone: Whether one of them is a suspect, next to which nothing may run.
            now_s: The time, on the clock of `Job.arrived_s`.
            behind: The batches of `in_flight`, where an urgent one waits before them: jobs that
                may go before these are left to `urgent_batch`, and nothing goes before such jobs.
            left_s: How long the device has to do with what it holds, in seconds.
            cohort: Maximum number of suspects that may share its slots, where it runs some.

        Returns:
            A batch, whose jobs no longer wait here; or None if the device should get nothing now.
        """
        if alone or (in_flight >= DEVICE_DEPTH and not self._in_slots):
            return None
        if self._suspects or cohort:
            return self._take_suspects(in_flight, cohort)
        turn = self._find_turn(behind) if behind else None
        return self._take_next(
            lambda _, rank, tag: not _goes_before(turn, rank, tag),
            now_s,
            left_s,
            is_idle=in_flight == 0 or self._in_slots,
            least=inf if turn is None else self._urgent_tag(turn, now_s),
        )

    def _take_suspects(self, in_flight: int, cohort: int) -> Batch[T] | None:
        """The suspects whose turn it is, if the device may begin them now."""
        waiting = self._suspects
        joins = self._in_slots and waiting and in_flight < min(cohort, waiting[0].among)
        if not waiting or (in_flight and not joins):
            return None
        first = waiting.popleft()
        if self._in_slots:
            return Batch((first,), alone=first.among == 1, cohort=first.among)
        jobs, items = [first], first.items
        while (
            waiting
            and waiting[0].key == first.key
            and len(jobs) < min(first.among, waiting[0].among)
            and items + waiting[0].items <= first.limits.max_batch_size
        ):
            items += waiting[0].items
            jobs.append(waiting.popleft())
        return Batch(tuple(jobs), alone=len(jobs) == 1)

    def urgent_batch(
        self,
        behind: Sequence[Batch[T]],
        now_s: float,
        left_s: float = inf,
    ) -> Batch[T] | None:
        """A batch that should run before the rest of what a device holds.

        Its jobs are of a higher class than all of those, and their lanes have had no more of their
        shares: whoever has used up its share waits its turn. It costs a pass of its own, so there
        must be enough to wait for.

        Args:
            behind: What the device holds.
            now_s: The time, on the clock of `Job.arrived_s`.
            left_s: How long the device has to do with that, in seconds.

        Returns:
            A batch, whose jobs no longer wait here; or None if nothing is that urgent.
        """
        if self._suspects or not self._queues:
            return None
        turn = self._find_turn(behind)

        def accepts(waiting: KeyFlows[T], rank: int, tag: float) -> bool:
            return _goes_before(turn, rank, tag) and self._saves(waiting, rank, left_s)

        return self._take_next(accepts, now_s, 0.0)

    def _saves(self, waiting: KeyFlows[T], rank: int, left_s: float) -> bool:
        """Whether jobs of a class gain enough by a batch of their own.

        Otherwise they would wait for what the device holds, and then for a batch with all others.
        """
        task, limit = waiting.key.task, self._max_items(waiting)
        own = sum(flow.items for flow in waiting.flows.values() if self._rank(flow) == rank)
        return not self.costs.knows(task) or self._is_long(
            left_s, task, min(limit, waiting.items), min(limit, own)
        )

    def _is_long(self, left_s: float, task: str, items: int, own: int) -> bool:
        """Whether some time and a batch of `items` are long for jobs with `own` items."""
        wait_s = left_s + self.costs.expected_s(task, items)
        return wait_s >= MIN_SAVED_TIMES * self.costs.expected_s(task, own)

    def _find_turn(self, behind: Sequence[Batch[T]]) -> tuple[int, float] | None:
        """Highest class of batches and their tag; None if nothing may go before them."""
        if not (flows := self._find_flows(behind)):
            return None
        rank = min(map(self._rank, flows))
        return rank, min(flow.tag for flow in flows)

    def _find_flows(self, batches: Sequence[Batch[T]]) -> list[Flow[T]]:
        """The flows that batches were taken from; none if one of them has suspects."""
        if not all(batch.charges for batch in batches):
            return []
        return [charge.flow for batch in batches for charge in batch.charges]

    def _take_next(
        self,
        accepts: Callable[[KeyFlows[T], int, float], bool],
        now_s: float,
        left_s: float,
        *,
        is_idle: bool = True,
        least: float = inf,
    ) -> Batch[T] | None:
        """A batch of flows whose class and tag are wanted, to run in `left_s`.

        Nothing if the tag of the chosen ones is above `least`.
        """
        while True:
            best, chosen = inf, None
            for waiting in self._queues.values():
                limit = self._max_items(waiting)
                is_due = (is_idle or waiting.passed_over) and now_s >= waiting.due_s
                may_leave = is_due or waiting.items >= limit
                flows = [
                    flow
                    for flow in waiting.flows.values()
                    if may_leave and accepts(waiting, self._rank(flow), flow.tag)
                ]
                if not flows or not (is_due or sum(flow.items for flow in flows) >= limit):
                    continue
                first = min(flow.tag for flow in flows)
                if chosen is None or first < best:
                    best, chosen = first, (waiting, flows, limit)
            if chosen is None or best > least:
                return None
            waiting, flows, limit = chosen
            flows = self._apart(waiting.key.task, flows, limit)
            if not self._shed_late(waiting, flows, limit, now_s + left_s):
                break
        if not is_idle and len(self._queues) > 1:
            self._pass_over(waiting, best, now_s)
        return self._take(waiting, flows, limit)

    def _urgent_tag(self, turn: tuple[int, float], now_s: float) -> float:
        """The lowest tag of the flows that may go before others; infinity for none."""
        tags = [
            flow.tag
            for waiting in self._queues.values()
            if now_s >= waiting.due_s
            for flow in waiting.flows.values()
            if _goes_before(turn, self._rank(flow), flow.tag)
        ]
        return min(tags, default=inf)

    def _apart(self, task: str, flows: list[Flow[T]], limit: int) -> list[Flow[T]]:
        """Leaves out the highest class or all others, if together they would take much longer.

        A few live jobs in a batch full of bulk would be answered only with the whole batch.
        """
        if len(flows) == 1:
            return flows
        highest = min(map(self._rank, flows))
        own = sum(flow.items for flow in flows if self._rank(flow) == highest)
        items = sum(flow.items for flow in flows)
        if own == items or not self.costs.knows(task):
            return flows
        if not self._is_long(0.0, task, min(limit, items), min(limit, own)):
            return flows
        is_first = self._rank(min(flows, key=attrgetter("tag"))) == highest
        return [flow for flow in flows if (self._rank(flow) == highest) == is_first]

    def rank(self, priority_class: str) -> int:
        """Place of a class among all; 0 is the highest."""
        return self._ranks[priority_class]

    def _rank(self, flow: Flow[T]) -> int:
        return self._ranks[flow.lane.priority_class]

    def _pass_over(self, chosen: KeyFlows[T], best: float, now_s: float) -> None:
        """Notes which keys were before the chosen one, but for the size of their batches."""
        came_before = True
        for waiting in self._queues.values():
            if waiting is chosen:
                came_before = False
            elif now_s >= waiting.due_s:
                first = min(flow.tag for flow in waiting.flows.values())
                if first < best or (came_before and first == best):
                    waiting.passed_over = True

    def _max_items(self, waiting: KeyFlows[T]) -> int:
        task, limits = waiting.key.task, waiting.limits
        if limits.target_s is None:
            return limits.max_batch_size
        target = self._targets.get(task)
        if target is None:
            target = self._targets[task] = LatencyTarget(limits)
        return target.max_items(task, self.costs, self._count_others(self._weigh(waiting)))

    def _count_others(self, weight: float, names: Collection[str] = ()) -> float:
        """How many batches of others come in between two of some flows; see `Shares.others`."""
        return (1 + self._shares.others(weight, names)) * self._sharers - 1

    def take_late(self, now_s: float) -> list[Job[T]]:
        """Takes out the jobs that cannot make their deadline, if such jobs are to be given up.

        Those that would be too late even alone, on a device that is idle now; and those that would
        have been too late in the batch whose turn it was. Both as far as the costs of their task
        can be believed: otherwise, those whose deadline is over.
        """
        if self._sheds_late:
            for waiting in list(self._queues.values()):
                is_late = self._is_late(waiting.key.task, now_s)
                self._late += self._take_out(waiting, waiting.flows.values(), is_late)
        late, self._late = self._late, []
        return late

    def _shed_late(
        self, waiting: KeyFlows[T], flows: list[Flow[T]], limit: int, begin_s: float
    ) -> bool:
        """Gives up jobs that the next batch answers too late, as settings say; returns whether."""
        task = waiting.key.task
        if not self._sheds_late or begin_s == inf or not self.costs.is_believable(task):
            return False
        items = sum(flow.items for flow in flows)
        end_s = begin_s + self.costs.expected_s(task, min(limit, items))
        late = self._take_out(waiting, flows, lambda job: job.deadline_s < end_s)
        self._late += late
        return bool(late)

    def _take_out(
        self,
        waiting: KeyFlows[T],
        flows: Iterable[Flow[T]],
        is_wanted: Callable[[Job[T]], bool],
    ) -> list[Job[T]]:
        """Takes jobs out of some flows of a key."""
        taken = [job for flow in flows for job in flow.take(is_wanted)]
        self._end_empty(waiting)
        return taken

    def _weigh(self, waiting: KeyFlows[T]) -> float:
        """The share of all flows of a key."""
        return sum(map(self._shares.weight, waiting.flows.values()))

    def _is_late(self, task: str, now_s: float) -> Callable[[Job[T]], bool]:
        """Says of a job of a task whether it cannot make its deadline any more."""
        margin_s = self._margin_s(task)
        return lambda job: job.deadline_s - margin_s(job.items) < now_s

    def _margin_s(self, task: str) -> Callable[[int], float]:
        """Says how long before its deadline a job with so many items must begin."""
        if not self.costs.is_believable(task):
            return lambda _: 0.0
        # All waiting jobs are asked about at once, and few differ in their number of items.
        return cache(partial(self.costs.expected_s, task))

    def late_s(self) -> float | None:
        """When `take_late` has something to do, if nothing else happens; None for never."""
        if not self._sheds_late:
            return None
        latest_s = inf
        for waiting in self._queues.values():
            margin_s = self._margin_s(waiting.key.task)
            latest_s = min(latest_s, *(job.deadline_s - margin_s(job.items) for job in waiting))
        return None if latest_s == inf else latest_s

    def progress(self, batch: Batch[T], had_s: float, slots: int) -> None:
        """Charges lanes for a job in slots as it runs: before jobs are admitted, or asked for.

        Args:
            batch: The job.
            had_s: How long its items had slots since the last call, in seconds together.
            slots: How many they have now; none while it makes room for another job.
        """
        for charge in batch.charges:
            self._shares.progress(charge, had_s, slots)

    def ended(self, batch: Batch[T], run_s: float | None, load_s: float = 0.0) -> None:
        """Notes that a batch of `next_batch` is back.

        Args:
            batch: The batch, perhaps with fewer jobs than it had.
            run_s: How long it had its device, in seconds; None if the device died.
            load_s: How long its model was loaded before that, in seconds.
        """
        if not batch.charges:
            return
        self._shares.ended(batch.charges, run_s)
        if load_s:
            waiting = [flow for each in self._queues.values() for flow in each.flows.values()]
            self._shares.loaded(batch.charges, load_s, waiting)
        target = self._targets.get(batch.jobs[0].key.task) if batch.jobs else None
        if target is not None and run_s is not None:
            names = {charge.flow.lane.priority_class for charge in batch.charges}
            weight = sum([charge.weight for charge in batch.charges])
            target.ended(batch.items, run_s, self._count_others(weight, names))

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened; None for never."""
        return min((waiting.due_s for waiting in self._queues.values()), default=None)

    def _take(self, waiting: KeyFlows[T], flows: list[Flow[T]], limit: int) -> Batch[T]:
        self._shares.began(min(flow.tag for flow in flows))
        if len(flows) == 1:
            jobs, charges = self._take_from_one(flows[0], limit)
        else:
            jobs, charges = self._take_from_many(flows, limit)
        waiting.passed_over = False
        self._end_empty(waiting)
        return Batch(tuple(jobs), charges=tuple(charges))

    def _take_from_one(self, flow: Flow[T], limit: int) -> tuple[list[Job[T]], list[Charge]]:
        jobs = [flow.pop()]
        items = jobs[0].items
        while flow and items + flow.first().items <= limit:
            job = flow.pop()
            items += job.items
            jobs.append(job)
        shares = self._shares
        item_s = shares.charged_item_s(flow.key.task, items)
        return jobs, [shares.charge(flow, items, item_s)]

    def _take_from_many(
        self, flows: list[Flow[T]], limit: int
    ) -> tuple[list[Job[T]], list[Charge]]:
        """Takes the jobs in the order of their tags, as if each was charged by itself."""
        task = flows[0].key.task
        # As of a full batch: most are, where several lanes wait.
        shares = self._shares
        item_s = shares.item_s(task, limit)
        weights = [shares.weight(flow) for flow in flows]
        turns = [(flow.tag, number) for number, flow in enumerate(flows)]
        heapify(turns)
        jobs: list[Job[T]] = []
        items, taken = 0, [0] * len(flows)
        while turns:
            tag, number = turns[0]
            flow = flows[number]
            if jobs and items + flow.first().items > limit:
                break
            job = flow.pop()
            jobs.append(job)
            items += job.items
            taken[number] += job.items
            if not flow:
                heappop(turns)
            else:
                heapreplace(turns, (tag + item_s * job.items / weights[number], number))
        item_s = shares.charged_item_s(task, items)
        charged = zip(flows, taken, strict=True)
        return jobs, [shares.charge(flow, count, item_s) for flow, count in charged if count]

    def _end_empty(self, waiting: KeyFlows[T]) -> None:
        """Forgets the flows without jobs, and the key if it has no other."""
        for flow in list(waiting.flows.values()):
            if not flow:
                del waiting.flows[flow.lane]
                self._shares.sleep(flow)
        if not waiting.flows:
            del self._queues[waiting.key]


def _goes_before(turn: tuple[int, float] | None, rank: int, tag: float) -> bool:
    """Whether a flow may go before batches of this highest class and lowest tag."""
    return turn is not None and rank < turn[0] and tag < turn[1]

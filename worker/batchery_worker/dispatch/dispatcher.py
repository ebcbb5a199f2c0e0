"""What waits for a device, what it has, and what becomes of each job: the heart of the feed.

Whoever calls this holds the lock of the feed, and nothing here blocks: the device computes,
completion threads store.
"""

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple, cast

from celery import Celery

from batchery.errors import BatcheryError, DeadlineExceeded, InvalidItem
from batchery.model_task import ModelTask
from batchery.settings import Settings
from batchery.task import BatchTask
from batchery.transport.dead_letters import find_queue
from batchery.transport.lease_store import LeaseStore
from batchery_worker.batch import DeviceBatch
from batchery_worker.batching.batch_times import AHEAD_BATCHES, BatchTimes
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.commit.eligibility import CommitEligibility, piece_context
from batchery_worker.commit.listeners import call_before, listens_before
from batchery_worker.completion.settlement import Settlement
from batchery_worker.dispatch.admission import Admission
from batchery_worker.dispatch.being_read import JobsBeingRead
from batchery_worker.dispatch.held import HeldBatches
from batchery_worker.dispatch.poison import PoisonDetector, find_culprits
from batchery_worker.dispatch.recycling import RecyclingLimits
from batchery_worker.dispatch.slots import charge_slots, limit_in_slots, list_victims
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.ipc.messages import RecycleDue, Reply, Running, Setup
from batchery_worker.job import Batch, Job, TimeLimits
from batchery_worker.metrics import Metrics, log_batch
from batchery_worker.work import NO_LIMITS, Cancel, Work

logger = logging.getLogger("batchery.pool")

#: How long listeners may hold up the device before the log says so, in seconds.
MAX_HELD_UP_S = 1.0

#: How much later than it could be known a job is found to be too late, in seconds; then those are
#: found with it that come next.
LATE_GRAIN_S = 0.005

#: Maximum number of batches that were computed and are not settled, before another one is begun; of
#: jobs in slots, as many as there are slots.
MAX_UNSETTLED = 2

#: How many batches of a task are read ahead: one is due, and some items of the others may have to
#: wait for a host that is slow.
READ_BATCHES = 4

#: Why a device cannot run a job that came by another queue than that of its task.
NO_DEVICE = (
    "this worker serves only models with slots, and not this task; send its jobs to their own queue"
)


class Turn(NamedTuple):
    """A batch whose turn it is."""

    formed: Batch[TaskCall]
    #: Whether it goes before what the device has.
    urgent: bool = False
    #: Ids of the batches one of which makes room for it.
    instead_of: Sequence[int] = ()


class Dispatcher:
    """Admits jobs, forms the batch that the device gets next, settles each job exactly once."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        setup: Setup,
        max_batch_size: int,
        call_soon: Callable[[Callable[[], None]], None],
        tell: Callable[[Reply], None],
        *,
        resumes: bool,
    ) -> None:
        """Has no jobs.

        Args:
            app: The app of the tasks.
            settings: Of the worker.
            setup: Of the device.
            max_batch_size: The largest of all tasks.
            call_soon: Calls a function where the lock is held; from any thread.
            tell: Sends a message to the worker.
            resumes: As of `HeldBatches`.
        """
        self._app = app
        self._settings = settings
        self._setup = setup
        self._max_batch_size = max_batch_size
        self._tell = tell
        #: Whether the worker must know of each batch, which kills a device whose batch hangs.
        self.is_watched = settings.max_pass_s is not None or bool(
            app.conf.worker_soft_shutdown_timeout
        )
        self.admission = Admission(settings)
        self.held = HeldBatches(setup.slots, resumes=resumes)
        self._scheduler: Scheduler[TaskCall] = Scheduler(
            settings.shares,
            sheds_late=settings.shed_late,
            in_slots=bool(setup.slots),
            sharers=cast(ModelTask, app.tasks[setup.task]).feeders if setup.feeder else 1,
        )
        self._times = BatchTimes()
        self._eligibility = CommitEligibility(app)
        self._metrics = Metrics()
        self._in_flight = InFlight()
        shared = self._metrics, self._in_flight, call_soon
        self._settlement = Settlement(app, settings.completion_threads, *shared)
        self._poison = PoisonDetector(self._scheduler, self._settlement, self._in_flight)
        self._being_read = JobsBeingRead(app, setup, call_soon, self._admit_read)
        limits = settings.device_max_jobs, settings.device_max_memory_bytes
        self._recycling = RecyclingLimits(*limits) if any(limits) else None
        self._batch_ids = itertools.count(1)
        self._cancels: deque[Cancel] = deque()
        #: Mean items of the jobs of each task and class, in their last batch.
        self._job_items: dict[tuple[str, str], float] = {}
        #: Number of batches that were computed, and are not settled.
        self._unsettled = 0
        #: Whether nothing more is begun.
        self._is_over = False
        #: Number of jobs that were answered, and whether the worker knows that they are enough.
        self._jobs, self._recycle_due = 0, False
        #: Tasks whose listeners have held up the device, and that cannot keep their target.
        self._told_slow, self._told_target = set[str](), set[str]()

    # Jobs that come

    def admit(self, call: TaskCall, task: BatchTask, limits: TimeLimits) -> None:
        """Takes a job in; settles it at once if it can never be in a batch."""
        if task.slots:
            # What others had before it came is no credit of it.
            charge_slots(self._scheduler, self.held, monotonic())
        try:
            job = self.admission.job(call, task, limits, monotonic())
        except Exception as error:  # noqa: BLE001 - a message may be malformed in any way
            known = isinstance(error, BatcheryError)
            problem = f"the message cannot be understood: {type(error).__name__}: {error}"
            self._refuse(call, error if known else InvalidItem(problem))
            return
        if self._setup.task not in ("", task.name):
            self._refuse(call, InvalidItem(f"{task.name}: {NO_DEVICE}"))
            return
        self.take_in(job)

    def take_in(self, job: Job[TaskCall]) -> None:
        """Takes a job in; its items may have to be read first."""
        if self._being_read.reads(job.key.task):
            self._being_read.add(job)
        else:
            self._admit_read(job)

    def _admit_read(self, job: Job[TaskCall]) -> None:
        """Takes a job in whose items a batch may have."""
        if job.payload.is_plain:
            self._scheduler.admit(job)
        else:
            self._poison.admit(job)

    def _refuse(self, call: TaskCall, error: Exception) -> None:
        self._in_flight.add(call, os.getpid())
        self._settlement.fail(call, error)

    def list_calls(self) -> list[TaskCall]:
        """The calls of all jobs that are here."""
        return [*self._in_flight, *(job.payload for job in self._list_waiting())]

    def list_begun(self) -> list[TaskCall]:
        """The calls of all jobs that have begun, and are not settled."""
        return [*self._in_flight]

    def forget_waiting(self, *, lost_only: bool = False) -> None:
        """Drops jobs that have not begun: they will be delivered again.

        Args:
            lost_only: Whether those stay whose leases are held here.
        """
        leases = [(job, job.payload.lease) for job in self._list_waiting()]
        gone = [job for job, lease in leases if not (lost_only and lease and lease.is_held)]
        self._scheduler.remove(gone)
        self._being_read.remove(gone)

    def _list_waiting(self) -> Iterator[Job[TaskCall]]:
        """All jobs that are here, and have not begun."""
        return itertools.chain(self._scheduler, self._being_read)

    def find_wanted(self) -> frozenset[str]:
        """The tasks whose jobs wait."""
        return frozenset(job.key.task for job in self._list_waiting())

    # What is wanted of the broker

    @property
    def holds_part(self) -> bool:
        """Whether the device has nothing to do, and what waits for it is no full batch."""
        return not self.held.batches and self._scheduler.holds_part

    @property
    def is_low(self) -> bool:
        """Whether what waits for the device is no full batch."""
        return not self._scheduler.holds_any or self._scheduler.holds_part

    @property
    def _is_blocked(self) -> bool:
        """Whether suspects wait or run that keep other jobs from the device."""
        return self._scheduler.has_suspects or self.held.is_reserved

    def count_free(self) -> int:
        """How many more jobs could begin at once."""
        if self._is_over or self._is_blocked:
            return 0
        idle_size = 0 if self.held.batches else self._max_batch_size
        free = self.held.free_slots if self.held.slots else idle_size
        return max(0, free - len(self._scheduler) - len(self._being_read))

    def count_wanted(self, sizes: Mapping[str, int], name: str) -> int:
        """How many more jobs to take: a batch if the device is idle, or soon will be.

        While short batches run it is some batches more, as to ask for each one would be felt; and
        always so of items that must be read first.

        Args:
            sizes: Maximum batch size of each task whose jobs count, by its name.
            name: The class.
        """
        if self._is_over or self._is_blocked:
            return 0
        held = self.held
        if not (held.slots or held.batches or self._scheduler.holds_any or self._being_read):
            return sum(self._count_jobs_of(task, name, size) for task, size in sizes.items())
        if held.slots:
            batches = held.free_slots or self._count_turns(name)
        elif self._wants_batch(monotonic()) or self._wants_urgent(name):
            is_ahead = held.in_turn and self._times.are_short(sizes)
            batches = 1 + AHEAD_BATCHES * bool(is_ahead)
        else:
            batches = 0
        return max(0, sum(self._count_more(*each, name, batches) for each in sizes.items()))

    def _count_more(self, task: str, size: int, name: str, batches: int) -> int:
        """How many more jobs of a task and class to take, if so many batches may be here."""
        here = self._scheduler.count_items(task, name)
        if self._being_read.reads(task):
            batches += self.held.slots or READ_BATCHES
            here += self._being_read.count_items(task, name)
        elif not batches:
            return 0
        return self._count_jobs_of(task, name, batches * size - here)

    def _count_jobs_of(self, task: str, name: str, items: int) -> int:
        """How many jobs of a task and class have so many items, if they are as large as of late."""
        return ceil(items / self._job_items.get((task, name), 1.0))

    def _note_sizes(self, formed: Batch[TaskCall]) -> None:
        """Notes how many items the jobs of each class have, of a batch that leaves."""
        if formed.items == len(formed.jobs) and not self._job_items:
            return
        for name in {job.lane.priority_class for job in formed.jobs}:
            items = [job.items for job in formed.jobs if job.lane.priority_class == name]
            self._job_items[formed.jobs[0].key.task, name] = fmean(items)

    def is_short_of(self, sizes: Mapping[str, int], name: str) -> bool:
        """Whether jobs of a class are wanted, as too few are here for a batch of them alone.

        Args:
            sizes: As of `count_wanted`.
            name: The class.
        """
        here = sum(self._scheduler.count_items(task, name) for task in sizes)
        return here < max(sizes.values(), default=0) and self.count_wanted(sizes, name) > 0

    def find_oldest_s(self) -> float | None:
        """When the oldest job came that cannot begin now; None if there is none."""
        if self._is_over:
            return None
        may_begin = not self._is_blocked and (self.held.free_slots or not self.held.batches)
        return None if may_begin else self._scheduler.oldest_held_s()

    def offer(self, before_s: float, give: Callable[[Sequence[Any]], Collection[Any]]) -> None:
        """Offers the jobs that came before a time to other devices.

        Args:
            before_s: The time, on the clock of `find_oldest_s`.
            give: Gives jobs away, by their calls; returns those that went.
        """
        held = sorted(self._scheduler.held(), key=lambda job: job.arrived_s)
        # A device that is almost done has its next batch here.
        is_kept = not self.held.slots and self._wants_batch(monotonic())
        kept = is_kept * max((job.limits.max_batch_size for job in held), default=0)
        items = itertools.accumulate(job.items for job in held)
        free = [job for job, so_far in zip(held, items, strict=True) if so_far > kept]
        old = [job for job in free if job.arrived_s <= before_s and job.payload.lease is not None]
        given = give([job.payload for job in old]) if old else ()
        self._scheduler.remove(job for job in old if job.payload in given)

    def _wants_batch(self, now_s: float) -> bool:
        """Whether the device is idle, or will soon need a batch that is not there yet."""
        if not (in_turn := self.held.in_turn):
            return not self.held.batches
        first = in_turn[0]
        if len(in_turn) > 1 and not self._times.are_short([first.work.task]):
            return False
        about = first.work.task, first.formed.items, first.runs_since_s
        return self._times.ends_soon(*about, now_s)

    def _wants_urgent(self, priority_class: str) -> bool:
        """Whether jobs of a class could run between the passes of what the device runs."""
        return self.held.takes_urgent and self._scheduler.goes_before(
            priority_class, [each.formed for each in self.held.in_turn]
        )

    def _count_turns(self, priority_class: str) -> int:
        """How many jobs of a class may have their turn while all slots are taken.

        Those of lower classes would make room. Beside higher ones a job must be here before a slot
        is free: otherwise the slot goes to those that are here, whoever's turn it is.
        """
        if not self.held.is_full:
            return 0
        own = self._scheduler.rank(priority_class)
        ranks = [self._rank(each) for each in self.held.in_turn if not each.is_aside]
        return sum(each > own for each in ranks) or int(min(ranks, default=own) < own)

    def _rank(self, batch: DeviceBatch) -> int:
        """The place of a batch's class; 0 is the highest."""
        return self._scheduler.rank(batch.formed.jobs[0].lane.priority_class)

    # Out to the device

    def next(self) -> DeviceBatch | Cancel | None:
        """What the device gets now: a batch, or an order for one that it has; None for nothing."""
        if self._cancels:
            return self._cancels.popleft()
        self._read_ahead()
        if self._is_over or not (self._scheduler.holds_any or self._being_read):
            return None
        if self._unsettled > max(MAX_UNSETTLED, self.held.slots):
            # Redis is away, or slow: results would pile up.
            return None
        if self._scheduler.has_suspects and (self._unsettled or self._settlement.pending):
            # A suspect may end this process: what has failed before must not come again by that.
            return None
        now_s = monotonic()
        if self.held.slots:
            charge_slots(self._scheduler, self.held, now_s)
        self._give_up_late(now_s)
        while (turn := self._take_urgent(now_s) or self._take_next(now_s)) is not None:
            if (batch := self._send(turn)) is not None:
                return batch
        # Those too that a batch would have answered too late, if no other job waits.
        self._give_up_late(now_s)
        return None

    def _read_ahead(self) -> None:
        """Has the items of the next jobs read, as far as there is room for them."""
        reads, size = self._being_read.reads, self._max_batch_size
        if self._being_read and not self._is_over:
            held = sum(job.items for job in self._scheduler if reads(job.key.task))
            self._being_read.begin(held, max(self.held.slots, READ_BATCHES * size))

    def find_due_s(self) -> float:
        """When to ask for the next batch although nothing else has happened; infinity for never.

        That is when the oldest job has waited long enough for an idle device, when a busy one
        should get its next batch, or when a job can no longer make its deadline.

        A job that has waited long enough by now waits for something else, such as the end of a job
        that must run alone. Coming back for it would mean coming back at once, for ever.
        """
        now_s, times_s = monotonic(), list[float]()
        if self._settings.shed_late:
            times_s.append(self._being_read.late_s() + LATE_GRAIN_S)
        if not self._scheduler.holds_any:
            return min((time_s for time_s in times_s if time_s > now_s), default=inf)
        if self.held.has_room:
            in_turn, wake_s = self.held.in_turn, self._scheduler.wake_s()
            times_s.append(self._find_next_s() if in_turn else inf if wake_s is None else wake_s)
        if (late_s := self._scheduler.late_s()) is not None:
            times_s.append(late_s + LATE_GRAIN_S)
        return min((time_s for time_s in times_s if time_s > now_s), default=inf)

    def _take_next(self, now_s: float) -> Turn | None:
        """The batch whose turn it is, if the device should have it by now."""
        held = self.held
        if not held.has_room or self._find_next_s() > now_s:
            return None
        in_turn = [each.formed for each in held.in_turn]
        batch = self._scheduler.next_batch(
            *(len(in_turn), held.is_alone, now_s),
            # Otherwise what is urgent has been sent by now.
            behind=in_turn if held.holds_urgent else (),
            left_s=self._find_left_s(now_s),
            cohort=held.cohort,
        )
        return None if batch is None else Turn(batch)

    def _take_urgent(self, now_s: float) -> Turn | None:
        """A batch that goes before what the device has."""
        held = self.held
        if held.slots:
            return self._take_instead(now_s) if held.resumes else None
        if not held.takes_urgent:
            return None
        behind = [each.formed for each in held.in_turn]
        batch = self._scheduler.urgent_batch(behind, now_s, self._find_left_s(now_s))
        return None if batch is None else Turn(batch, urgent=True)

    def _take_instead(self, now_s: float) -> Turn | None:
        """A job of a higher class that has the slot of another one, which goes on later."""
        held = self.held
        # Nearly always nobody waits who could take a slot, and there may be hundreds of slots.
        if not held.is_full or held.is_reserved:
            return None
        ranks = {number: self._rank(each) for number, each in held.batches.items()}
        victims = list_victims(held.batches, ranks)
        victim = held.batches[victims[0]]
        if victim.is_aside:
            return None
        batch = self._scheduler.urgent_batch([victim.formed], now_s)
        if batch is None:
            return None
        own = self._scheduler.rank(batch.jobs[0].lane.priority_class)
        return Turn(batch, instead_of=[number for number in victims if ranks[number] > own])

    def _find_left_s(self, now_s: float) -> float:
        """How long the device has to do with what it holds, in seconds, as far as that is known."""
        left_s, costs = 0.0, self._scheduler.costs
        for batch in () if self.held.slots else self.held.in_turn:
            task = batch.work.task
            if not costs.knows(task):
                return inf
            ran_s = 0.0 if batch.began_s is None else now_s - batch.began_s
            left_s += max(0.0, costs.expected_s(task, batch.formed.items) - ran_s)
        return left_s

    def _find_next_s(self) -> float:
        """When the device should get its next batch: as late as possible, but in time."""
        if self.held.slots or not self.held.in_turn:
            return 0.0
        first = self.held.in_turn[0]
        return self._times.next_s(first.work.task, first.formed.items, first.runs_since_s)

    def _give_up_late(self, now_s: float) -> None:
        """Fails the jobs that cannot make their deadline, before they cost anything."""
        if not self._settings.shed_late:
            return
        for job in (*self._scheduler.take_late(now_s), *self._being_read.take_late(now_s)):
            self._metrics.shed_jobs += 1
            call = job.payload
            if self._in_flight.wants(call):
                late_s = now_s - job.deadline_s
                when = f"was {late_s:.3f} s ago" if late_s >= 0 else f"is in only {-late_s:.3f} s"
                text = f"{job.key.task}[{job.id}] was not begun: its deadline {when}"
                self._refuse(call, DeadlineExceeded(text))

    def _send(self, turn: Turn) -> DeviceBatch | None:
        """Makes a batch for the device; None if nobody wants one of its jobs any more."""
        formed = turn.formed
        self._note_sizes(formed)
        jobs = tuple(job for job in formed.jobs if self._may_begin(job.payload))
        task = cast(BatchTask, self._app.tasks[formed.jobs[0].key.task])
        if jobs and listens_before(task):
            jobs = self._call_before(task, jobs)
        if not jobs:
            self._scheduler.ended(formed, run_s=0.0)
            return None
        leases = [job.payload.lease for job in jobs]
        store = next((lease.store for lease in leases if lease is not None), None)
        work = self._make_work(task, jobs, store, turn)
        if formed.alone and formed.items > 1 and store is not None and not self.held.slots:
            culprits = find_culprits(jobs[0].payload)
            work = replace(work, culprits=culprits, cache=None, pieces=None)
        batch = DeviceBatch(task, work, replace(formed, jobs=jobs), store=store)
        if turn.instead_of:
            victim = self.held.batches[turn.instead_of[0]]
            self.held.put_aside(victim)
            self._scheduler.progress(victim.formed, 0.0, 0)
        if store is not None:
            # Before the batch runs, which may kill this process: then these are the suspects.
            batch.note = store.began(
                {
                    lease.token: job.id
                    for job, lease in zip(jobs, leases, strict=True)
                    if lease is not None and lease.store is store
                },
                alone=formed.alone,
                in_slots=bool(self.held.slots),
            )
        if work.is_timed:
            self._tell(self._describe(batch))
        self.held.add(batch)
        for job in jobs:
            self._in_flight.add(job.payload, os.getpid())
        return batch

    def _make_work(
        self,
        task: BatchTask,
        jobs: Sequence[Job[TaskCall]],
        store: LeaseStore | None,
        turn: Turn,
    ) -> Work:
        soft_limit_s, hard_limit_s = jobs[0].key.time_limits
        options, settings = self.admission.options(task), self._settings
        limits = NO_LIMITS
        if self.held.slots:
            limits = limit_in_slots(jobs[0], sheds_late=settings.shed_late)
        return Work(
            id=next(self._batch_ids),
            task=task.name,
            keywords=jobs[0].payload.keywords,
            jobs=[(job.id, job.payload.items, job.payload.is_multi_item) for job in jobs],
            max_batch_size=jobs[0].limits.max_batch_size,
            max_batch_tokens=options.max_batch_tokens,
            soft_time_limit_s=soft_limit_s,
            contexts=[job.payload.context for job in jobs] if options.needs_context else (),
            commit=self._eligibility.context(task, jobs, store, monotonic()),
            pieces=piece_context(jobs, store, settings),
            cache=options.cache,
            urgent=turn.urgent,
            is_timed=hard_limit_s is not None or self.is_watched,
            slot_limits=limits,
            instead_of=turn.instead_of,
        )

    def _may_begin(self, call: TaskCall) -> bool:
        """Whether a job is wanted, and no other device has it by now."""
        if not self._in_flight.wants(call):
            return False
        lease = call.lease
        if lease is None or lease.store.holds(lease.token):
            return True
        self._settlement.fenced(call)
        return False

    def _call_before(
        self, task: BatchTask, jobs: Sequence[Job[TaskCall]]
    ) -> tuple[Job[TaskCall], ...]:
        """Calls what listens before the task; settles the jobs that `before_start` ends.

        Returns:
            The others.
        """
        began_s = monotonic()
        left = []
        for job in jobs:
            call = job.payload
            self._in_flight.add(call, os.getpid())
            call_before(task, call)
            if call.listened.error is None:
                left.append(job)
            else:
                self._settlement.fail(call, call.listened.error)
        took_s = monotonic() - began_s
        if took_s > MAX_HELD_UP_S and task.name not in self._told_slow:
            self._told_slow.add(task.name)
            logger.warning(
                "task %s: before_start and the receivers of task_prerun took %.1f s for %d jobs;"
                " the device reads no messages meanwhile, so do less there",
                *(task.name, took_s, len(jobs)),
            )
        return tuple(left)

    def _describe(self, batch: DeviceBatch, *, is_unwanted: bool = False) -> Running:
        """What the worker must know of a batch whose time is limited, or that must end."""
        jobs, work = batch.formed.jobs, batch.work
        return Running(
            work.id,
            work.task,
            [job.id for job in jobs],
            jobs[0].key.time_limits[1],
            is_urgent=work.urgent,
            in_slots=bool(self.held.slots),
            is_alone=batch.formed.alone,
            is_unwanted=is_unwanted,
        )

    def cancel(self, job_id: str) -> None:
        """Ends the batch of a job that was terminated, unless it has jobs that were not."""
        for batch in self.held.batches.values():
            jobs = batch.formed.jobs
            is_its = any(job.id == job_id for job in jobs)
            if is_its and not any(self._in_flight.wants(job.payload) for job in jobs):
                if self.held.slots:
                    self._cancels.append(Cancel(batch.work.id))
                # The worker kills the process if that takes long.
                self._tell(self._describe(batch, is_unwanted=True))

    # Back from the device

    def end(self, batch: DeviceBatch) -> None:
        """Notes that a batch was computed, and learns from it."""
        self.held.remove(batch)
        self._unsettled += 1
        formed, task, run_s = batch.formed, batch.work.task, batch.forward_ms / 1e3
        # The card computes for others, too, who pay for that.
        self._scheduler.ended(formed, batch.computed_ms / 1e3 or run_s, batch.load_s)
        self._times.ran(task, formed.items, run_s, batch.prepare_ms / 1e3)
        self._check_target(task, formed.jobs[0].limits.target_s)

    def settle(self, batch: DeviceBatch) -> None:
        """Settles the jobs of a batch that the device has answered."""
        self._unsettled -= 1
        if batch.store is not None:
            # Redis hears it with the next batch.
            batch.store.ended(batch.note)
        if self._recycling is not None:
            self._count_jobs(self._recycling, len(batch.answers))
        jobs, items, task = batch.formed.jobs, batch.formed.items, batch.work.task
        waited_ms = [(batch.formed_s - job.sent_s) * 1e3 for job in jobs]
        self._metrics.batch_done(batch, items)
        log_batch(task, batch.info, tokens=batch.tokens, waited_ms=max(waited_ms))
        self._settlement.settle_batch(
            (job.payload, answer, {**batch.info, "waited_ms": round(waited, 3)})
            for job, waited, answer in zip(jobs, waited_ms, batch.answers, strict=True)
        )

    def _count_jobs(self, limits: RecyclingLimits, count: int) -> None:
        self._jobs += count
        if not self._recycle_due and limits.reached(self._jobs, os.getpid()):
            self._recycle_due = True
            self._tell(RecycleDue(self._jobs))

    def _check_target(self, task: str, target_s: float | None) -> None:
        """Says once that no batch of a task can keep its target, if that can be believed."""
        costs = self._scheduler.costs
        if target_s is None or task in self._told_target or not costs.is_believable(task):
            return
        alone_s = costs.expected_s(task, 1)
        if alone_s > target_s:
            self._told_target.add(task)
            logger.warning(
                "task %s: target_latency_ms = %g cannot be kept, as one item alone takes %.1f ms;"
                " raise it, or use a smaller model",
                *(task, target_s * 1e3, alone_s * 1e3),
            )

    # The end

    @property
    def is_done(self) -> bool:
        """Whether nothing is on the device, and nothing is being completed."""
        return not (self.held.batches or self._unsettled or self._settlement.pending)

    def stop(self) -> None:
        """Drops what waits, which goes back to its queue; what is on the device is finished."""
        self._is_over = True
        self.forget_waiting()

    def finish(self) -> None:
        """Ends the threads that complete jobs."""
        self._settlement.stop()
        self._being_read.close()

    def figures(self) -> dict[str, Any]:
        """What `celery inspect stats` and `celery inspect batchery` show of the device."""
        now_s = monotonic()
        oldest_s = min((job.sent_s for job in self._list_waiting()), default=None)
        device = {
            "state": "ready",
            "pid": os.getpid(),
            "batches_in_flight": len(self.held.batches),
            "oldest_batch_s": round(self.held.oldest_batch_s(now_s), 3),
            "done": self._metrics.sums(),
        }
        return {
            "devices": {self._setup.name: device},
            "costs": self._scheduler.costs.figures(),
            "clock_s": round(now_s, 3),
            "waiting": len(self._scheduler) + len(self._being_read),
            "oldest_waiting_s": None if oldest_s is None else round(now_s - oldest_s, 3),
            "waiting_by_queue": self._count_by_queue(now_s),
            "batches": self._metrics.snapshot(),
        }

    def _count_by_queue(self, now_s: float) -> dict[str, dict[str, Any]]:
        """`jobs` and `oldest_s` of each queue whose jobs wait for the device."""
        found: dict[str, dict[str, Any]] = {}
        for job in self._list_waiting():
            queue = found.setdefault(_find_queue(job.payload), {"jobs": 0, "oldest_s": 0.0})
            queue["jobs"] += 1
            queue["oldest_s"] = max(queue["oldest_s"], round(now_s - job.sent_s, 3))
        return found


def _find_queue(call: TaskCall) -> str:
    handle = call.lease
    if handle is not None and (lease := handle.store.leases.get(handle.token)) is not None:
        return find_queue(lease.key, handle.store.keys.prefix)
    # Another transport: the name of the queue, if nobody has given it another key.
    return str((call.message.get("delivery_info") or {}).get("routing_key") or "")

"""Takes jobs to the device and their outcomes back: the heart of the feed.

Whoever calls this holds the lock of the feed, and nothing here blocks: the device computes,
completion threads store.
"""

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any, cast

from celery import Celery

from batchery.errors import BatcheryError, DeadlineExceeded, InvalidItem
from batchery.settings import Settings
from batchery.task import BatchTask
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.commit.eligibility import CommitEligibility
from batchery_worker.commit.listeners import Listeners, Stacks
from batchery_worker.completion.settlement import Settlement
from batchery_worker.device_pool.process import DeviceProcess, RecyclingLimits
from batchery_worker.dispatch.admission import Admission
from batchery_worker.dispatch.demand import BatchDemand
from batchery_worker.dispatch.launches import Launches
from batchery_worker.dispatch.pieces import piece_context
from batchery_worker.dispatch.poison import PoisonDetector, note_begin, note_end
from batchery_worker.dispatch.slots import charge_slots, limit_in_slots, list_victims
from batchery_worker.in_flight import DispatchedBatch, InFlight, TaskCall
from batchery_worker.ipc.messages import Cancel, Done, Reply, Work, batch_info
from batchery_worker.job import Batch, Job, TimeLimits
from batchery_worker.metrics import Metrics, log_batch, trace_batch

logger = logging.getLogger("batchery.pool")

#: How long listeners may hold up the event loop before the log says so, in seconds.
MAX_HELD_UP_S = 1.0

#: How much later than it could be known a job is found to be too late, in seconds; then those are
#: found with it that come next.
LATE_GRAIN_S = 0.005

#: Why a worker cannot run a job that came by another queue than that of its task.
NO_DEVICE = (
    "this worker serves only models with slots, and not this task; send its jobs to their own queue"
)


class Dispatcher:
    """Admits jobs, forms batches when a device has room, settles each job exactly once."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        device: DeviceProcess,
        max_batch_size: int,
        hub: Any,
        out: Callable[[Work | Cancel], None],
        inform: Callable[[Reply], None],
    ) -> None:
        """Has no jobs.

        Args:
            app: The app of the tasks.
            settings: Of the worker.
            device: Takes the batches.
            max_batch_size: The largest of all tasks.
            hub: Calls back in its turns, and at times.
            out: As of `Launches`.
            inform: The same.
        """
        devices = [device]
        self._app = app
        self._settings = settings
        #: The kinds of devices, see `Scheduler.next_batch`.
        self._kinds = list(dict.fromkeys(device.setup.task for device in devices))
        #: Whether whoever supervises must know of each batch.
        self.is_watched = settings.max_pass_s is not None or bool(
            app.conf.worker_soft_shutdown_timeout
        )
        self.admission = Admission(settings)
        self._listeners = Listeners()
        self._eligibility = CommitEligibility(app, self._listeners)
        self._scheduler: Scheduler[TaskCall] = Scheduler(
            settings.shares,
            sheds_late=settings.shed_late,
            slotted=[device.setup.task for device in devices if device.setup.task],
        )
        self._launches = Launches(
            device,
            RecyclingLimits(settings.device_max_jobs, settings.device_max_memory_bytes),
            *(out, inform),
            on_ready=self._plan_dispatch,
            on_done=self._on_done,
        )
        self._batch_ids = itertools.count(1)
        self._hub = hub
        self._metrics = Metrics()
        self._in_flight = in_flight = InFlight()
        shared = self._metrics, in_flight, self._listeners, self._hub
        self._settlement = Settlement(app, settings.completion_threads, *shared)
        self._settlement.on_idle = self._plan_dispatch
        #: What is wanted of the broker.
        self.demand = BatchDemand(
            self._scheduler, self._launches, in_flight, settings, max_batch_size
        )
        self._poison = PoisonDetector(self._scheduler, self._settlement, self._in_flight)
        self._dispatch_planned = self._draining = False
        self._wake_planned_s = float("inf")
        #: Tasks whose listeners have held up the loop, and those that cannot keep their target.
        self._told_slow, self._told_target = set[str](), set[str]()

    def admit(self, call: TaskCall, task: BatchTask, limits: TimeLimits) -> None:
        """Takes a job in; settles it at once if it can never be in a batch."""
        if self._in_flight.takes(call):
            return
        if task.slots and not self._dispatch_planned:
            # What others had before it came is no credit of it.
            charge_slots(self._scheduler, self._launches.devices, monotonic())
        try:
            job = self.admission.job(call, task, limits, monotonic())
        except Exception as error:  # noqa: BLE001 - a message may be malformed in any way
            known = isinstance(error, BatcheryError)
            self._in_flight.add(call, os.getpid())
            problem = f"the message cannot be understood: {type(error).__name__}: {error}"
            self._settlement.fail(call, error if known else InvalidItem(problem))
            return
        if "" not in self._kinds and task.name not in self._kinds:
            self._in_flight.add(call, os.getpid())
            self._settlement.fail(call, InvalidItem(f"{task.name}: {NO_DEVICE}"))
            return
        self.take_in(job)

    def take_in(self, job: Job[TaskCall]) -> None:
        """Takes a job in that was read."""
        self._poison.admit(job)
        self._plan_dispatch()

    def list_calls(self) -> list[TaskCall]:
        """The calls of all jobs that are here."""
        return [*self._in_flight, *(job.payload for job in self._scheduler)]

    def list_begun(self) -> list[TaskCall]:
        """The calls of all jobs that have begun, and are not settled."""
        return [*self._in_flight]

    def forget_waiting(self) -> None:
        """Drops every job that was not accepted: the broker will deliver it again."""
        self._scheduler.clear()

    @property
    def pending(self) -> int:
        """How many jobs are being completed."""
        return self._settlement.pending

    def stop_taking(self) -> None:
        """Drops what waits, which goes back to its queue; what is on a device is finished."""
        self._draining = self.demand.is_over = True
        self._scheduler.clear()

    def finish(self) -> None:
        """Ends the threads that complete jobs."""
        self._settlement.stop()

    def info(self) -> dict[str, Any]:
        """What `celery inspect stats` and `celery inspect batchery` show of the pool."""
        now_s = monotonic()
        oldest_s = min((job.sent_s for job in self._scheduler), default=None)
        return {
            "devices": {
                device.name: {**device.figures(), "done": self._metrics.of_device(device.name)}
                for device in self._launches.devices
            },
            "costs": self._scheduler.costs.figures(),
            "clock_s": round(now_s, 3),
            "waiting": len(self._scheduler),
            "oldest_waiting_s": None if oldest_s is None else round(now_s - oldest_s, 3),
            "waiting_by_queue": self.demand.waiting_by_queue(now_s),
            "batches": self._metrics.snapshot(),
        }

    # Out to the devices

    def _plan_dispatch(self) -> None:
        # Not at once: first all messages of this turn are read.
        if not self._dispatch_planned:
            self._dispatch_planned = True
            self._hub.call_soon(self._dispatch_planned_jobs)

    def _dispatch_planned_jobs(self) -> None:
        # What was planned may have been done in the meantime.
        if self._dispatch_planned:
            self._dispatch()

    def _dispatch(self) -> None:
        self._dispatch_planned = False
        if self._draining:
            return
        if self._scheduler.has_suspects and self._settlement.pending:
            # A suspect may end this process: what has failed before must not come again by that.
            return
        now_s = monotonic()
        if self._scheduler.slotted:
            charge_slots(self._scheduler, self._launches.devices, now_s)
        self._give_up_late(now_s)
        # First those that have nothing to do, then what is urgent, then what is prepared meanwhile.
        self._dispatch_to(lambda device: not device.batches, now_s)
        # A batch that has just left may be so short that the next one is due.
        now_s = monotonic()
        if self._scheduler.holds_any:
            self._dispatch_urgent(now_s)
            self._dispatch_to(lambda device: self._next_batch_s(device) <= now_s, now_s)
        # Those too that a batch would have answered too late, if no other job waits.
        self._give_up_late(now_s)
        self._plan_wake(now_s)

    def _give_up_late(self, now_s: float) -> None:
        """Fails the jobs that cannot make their deadline, before they cost anything."""
        for job in self._scheduler.take_late(now_s) if self._settings.shed_late else ():
            self._metrics.shed_jobs += 1
            call = job.payload
            if self._in_flight.wants(call):
                self._in_flight.add(call, os.getpid())
                late_s = now_s - job.deadline_s
                when = f"was {late_s:.3f} s ago" if late_s >= 0 else f"is in only {-late_s:.3f} s"
                text = f"{job.key.task}[{job.id}] was not begun: its deadline {when}"
                self._settlement.fail(call, DeadlineExceeded(text))

    def _dispatch_to(self, wants: Callable[[DeviceProcess], bool], now_s: float) -> None:
        for task in self._kinds:
            self._dispatch_to_kind(task, wants, now_s)

    def _dispatch_to_kind(
        self, task: str, wants: Callable[[DeviceProcess], bool], now_s: float
    ) -> None:
        while self._scheduler.holds_any:
            # Suspects may share the slots of their device.
            is_reserved = self._launches.is_reserved
            devices = [
                each
                for each in self._launches.devices
                if each.setup.task == task
                and each.has_room
                and not (is_reserved and not each.cohort)
                and wants(each)
            ]
            if not devices:
                return
            device = devices[0] if len(devices) == 1 else min(devices, key=_began)
            held = [dispatched.batch for dispatched in device.in_turn]
            elsewhere = self._launches.dispatched - len(device.batches)
            batch = self._scheduler.next_batch(
                len(held),
                device.alone,
                now_s,
                elsewhere,
                # Otherwise what is urgent has been sent by now.
                held if device.holds_urgent else (),
                self._left_s(device, now_s) if held else 0.0,
                task=task,
                cohort=device.cohort if task else 0,
            )
            if batch is None:
                return
            self._launch(device, batch)

    def _dispatch_urgent(self, now_s: float) -> None:
        """Sends what is urgent to devices that are busy with something else."""
        for device in self._launches.devices:
            if device.setup.slots and device.resumes:
                self._preempt(device, now_s)
            elif device.takes_urgent and not self._launches.is_reserved:
                behind = [dispatched.batch for dispatched in device.in_turn]
                left_s = self._left_s(device, now_s)
                batch = self._scheduler.urgent_batch(behind, now_s, left_s)
                if batch is not None:
                    self._launch(device, batch, urgent=True)

    def _preempt(self, device: DeviceProcess, now_s: float) -> None:
        """Lets jobs of a higher class have the slots of others, which go on when some are free."""
        task, rank = device.setup.task, self._scheduler.rank
        # Nearly always nobody waits who could take a slot, and there may be hundreds of slots.
        while device.is_full and self._scheduler.holds_any and not self._launches.is_reserved:
            classes = {
                number: rank(each.batch.jobs[0].lane.priority_class)
                for number, each in device.batches.items()
            }
            victims = list_victims(device.batches, classes)
            victim = device.batches[victims[0]]
            if victim.is_aside:
                return
            batch = self._scheduler.urgent_batch([victim.batch], now_s, task=task)
            if batch is None:
                return
            own = rank(batch.jobs[0].lane.priority_class)
            lower = [number for number in victims if classes[number] > own]
            self._launch(device, batch, instead_of=lower)

    def _left_s(self, device: DeviceProcess, now_s: float) -> float:
        """How long a device has to do with what it holds, in seconds, as far as that is known."""
        left_s, costs = 0.0, self._scheduler.costs
        if device.setup.slots:
            return left_s
        for dispatched in device.in_turn:
            task = dispatched.batch.jobs[0].key.task
            if not costs.knows(task):
                return inf
            ran_s = 0.0 if dispatched.began_s is None else now_s - dispatched.began_s
            left_s += max(0.0, costs.expected_s(task, dispatched.batch.items) - ran_s)
        return left_s

    def _next_batch_s(self, device: DeviceProcess) -> float:
        """When a device should get its next batch: as late as possible, but in time."""
        for dispatched in () if device.setup.slots else device.in_turn:
            batch = dispatched.batch
            began_s = dispatched.began_s or dispatched.dispatched_s
            return self.demand.times.next_s(
                device.name, batch.jobs[0].key.task, batch.items, began_s
            )
        return 0.0

    def _plan_wake(self, now_s: float) -> None:
        """Plans to come back when the oldest waiting job has waited long enough for an idle device.

        Or when a busy device should get its next batch, which may have to be fetched; when an idle
        one may load a model; or when a job can no longer make its deadline.

        A job that has waited long enough by now waits for something else, such as the end of a job
        that must run alone. Coming back for it would mean coming back at once, for ever.
        """
        due_s = self._scheduler.wake_s()
        idle_s = inf if due_s is None else due_s
        times_s = [
            self._next_batch_s(device) if device.in_turn else idle_s
            for device in self._launches.devices
            if device.has_room
        ]
        if (late_s := self._scheduler.late_s()) is not None:
            times_s.append(late_s + LATE_GRAIN_S)
        wake_s = min((time_s for time_s in times_s if time_s > now_s), default=inf)
        if wake_s < self._wake_planned_s:
            self._wake_planned_s = wake_s
            self._hub.call_later(max(0.0, wake_s - monotonic()), self._wake)

    def _wake(self) -> None:
        self._wake_planned_s = float("inf")
        self._dispatch()

    def _launch(
        self,
        device: DeviceProcess,
        batch: Batch[TaskCall],
        *,
        urgent: bool = False,
        instead_of: Sequence[int] = (),
    ) -> None:
        jobs = tuple(job for job in batch.jobs if self._may_begin(job.payload))
        task = cast(BatchTask, self._app.tasks[batch.jobs[0].key.task])
        if jobs and self._listeners.of(task).before:
            jobs = self._begin(task, jobs, device.pid)
        if not jobs:
            self._scheduler.ended(batch, run_s=0.0)
            return
        soft_limit_s, hard_limit_s = jobs[0].key.time_limits
        options = self.admission.options(task)
        dispatched_s = monotonic()
        in_slots = bool(device.setup.slots)
        work = Work(
            id=next(self._batch_ids),
            task=task.name,
            keywords=jobs[0].payload.keywords,
            jobs=[(job.id, job.payload.items, job.payload.is_multi_item) for job in jobs],
            max_batch_size=jobs[0].limits.max_batch_size,
            max_batch_tokens=options.max_batch_tokens,
            soft_time_limit_s=soft_limit_s,
            contexts=[job.payload.context for job in jobs] if options.needs_context else (),
            commit=self._eligibility.context(task, jobs, dispatched_s),
            pieces=piece_context(jobs, self._settings),
            cache=options.cache,
            urgent=urgent,
            is_timed=hard_limit_s is not None or self.is_watched,
        )
        if device.must_load(task.name):
            work = replace(work, wanted=frozenset(job.key.task for job in self._scheduler))
        sent = replace(batch, jobs=jobs)
        dispatched = DispatchedBatch(sent, dispatched_s, hard_limit_s, urgent, in_slots=in_slots)
        if in_slots:
            work = limit_in_slots(work, jobs[0], dispatched, sheds_late=self._settings.shed_late)
        if instead_of:
            device.put_aside(instead_of[0])
            self._scheduler.progress(device.batches[instead_of[0]].batch, 0.0, 0)
            work = replace(work, instead_of=instead_of)
        # Before the batch: on a busy machine a job may have killed this worker by the time that it
        # goes on.
        dispatched.note = note_begin(jobs, alone=batch.alone, in_slots=in_slots)
        self._launches.send(device, work, dispatched)
        for job in jobs:
            self._in_flight.add(job.payload, device.pid)

    def _may_begin(self, call: TaskCall) -> bool:
        """Whether a job is wanted, and no other worker has it by now."""
        if not self._in_flight.wants(call):
            return False
        lease = call.lease
        if lease is None or lease.store.holds(lease.token):
            return True
        self._settlement.fenced(call)
        return False

    def cancel(self, job_id: str) -> None:
        """Ends the batch of a job that was terminated, unless it has jobs that were not."""
        for device in self._launches.devices:
            for work_id, dispatched in device.batches.items():
                jobs = dispatched.batch.jobs
                is_its = any(job.id == job_id for job in jobs)
                if is_its and not any(self._in_flight.wants(job.payload) for job in jobs):
                    self._launches.cancel(work_id, dispatched)

    def _begin(
        self, task: BatchTask, jobs: Sequence[Job[TaskCall]], pid: int
    ) -> tuple[Job[TaskCall], ...]:
        """Calls what listens before the task; settles the jobs that `before_start` ends.

        Returns:
            The others.
        """
        began_s = monotonic()
        left = []
        with Stacks(task) as stacks:
            for job in jobs:
                call = job.payload
                self._in_flight.add(call, pid)
                self._listeners.before(task, call, stacks)
                if call.listened.error is None:
                    left.append(job)
                else:
                    self._settlement.fail(call, call.listened.error)
        took_s = monotonic() - began_s
        if took_s > MAX_HELD_UP_S and task.name not in self._told_slow:
            self._told_slow.add(task.name)
            logger.warning(
                "task %s: before_start and the receivers of task_prerun took %.1f s for %d jobs;"
                " the worker reads no messages meanwhile, so do less there",
                task.name,
                took_s,
                len(jobs),
            )
        return tuple(left)

    # Back from the devices

    def receive(self, device: DeviceProcess, reply: Reply) -> None:
        """Notes what the device says of its batches."""
        self._launches.receive(device, reply)

    def _on_done(self, dispatched: DispatchedBatch, done: Done, device: DeviceProcess) -> None:
        note_end(dispatched)
        jobs = dispatched.batch.jobs
        items = dispatched.batch.items
        run_s = None if dispatched.began_s is None else monotonic() - dispatched.began_s
        if dispatched.in_slots:
            run_s = done.forward_ms / 1e3
        self._scheduler.ended(dispatched.batch, run_s, dispatched.load_s)
        if run_s is not None:
            task = jobs[0].key.task
            self.demand.times.ran(device.name, task, items, run_s, done.prepare_ms / 1e3)
            self._check_target(task, jobs[0].limits.target_s)
        waited_ms = [(dispatched.dispatched_s - job.sent_s) * 1e3 for job in jobs]
        self._metrics.batch_done(done, dispatched, device.name, items)
        if done.reused is not None:
            self._metrics.reused(jobs[0].key.task, done.reused)
        info = batch_info(
            batch_id=done.id,
            device=device.name,
            size=items,
            prepare_ms=done.prepare_ms,
            queued_ms=done.queued_ms,
            forward_ms=done.forward_ms,
            tokens=done.tokens,
            computed_tokens=done.computed_tokens,
            version=done.version,
        )
        log_batch(jobs[0].key.task, info, tokens=done.tokens, waited_ms=max(waited_ms))
        trace_batch(dispatched, info)
        self._settlement.settle_batch(
            (job.payload, status, rest, {**info, "waited_ms": round(waited, 3)})
            for job, waited, (status, rest) in zip(jobs, waited_ms, done.jobs, strict=True)
        )
        if self._scheduler.holds_any or device.in_turn:
            # What waits may go, and the batch that begins now has a time when the next one is due.
            self._plan_dispatch()

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


def _began(device: DeviceProcess) -> tuple[int, float]:
    """Devices with less to do come first, then those whose batch began before."""
    return len(device.in_turn), min(
        (each.began_s or each.dispatched_s for each in device.in_turn), default=0.0
    )

"""What a worker wants of the queues, and could give back: how much its devices can begin."""

from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import Any

from batchery.settings import Settings
from batchery.transport.dead_letters import find_queue
from batchery_worker.batching.batch_times import BatchTimes
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.dispatch.launches import Launches
from batchery_worker.in_flight import InFlight, TaskCall
from batchery_worker.job import Job


class BatchDemand:
    """The jobs of batch tasks that a worker holds, beside what its devices could begin."""

    def __init__(
        self,
        scheduler: Scheduler[TaskCall],
        launches: Launches,
        in_flight: InFlight,
        settings: Settings,
        max_batch_size: int,
    ) -> None:
        self._scheduler = scheduler
        self._launches = launches
        self._in_flight = in_flight
        #: How long batches take.
        self.times = BatchTimes()
        self._settings = settings
        self._max_batch_size = max_batch_size
        #: Whether the worker ends, and wants nothing more.
        self.is_over = False

    @property
    def holds_part(self) -> bool:
        """Whether devices have nothing to do, and what waits for them is no full batch."""
        is_idle = not any(device.batches for device in self._launches.devices)
        return is_idle and self._scheduler.holds_part

    def free(self) -> int:
        """How many more jobs could begin at once."""
        if self.is_over:
            return 0
        free = 0
        for device in self._launches.devices:
            if self._may_begin(device):
                idle_size = self._max_batch_size if device.is_idle else 0
                free += device.free_slots if device.setup.slots else idle_size
        return max(0, free - len(self._scheduler))

    def limit(self, sizes: Mapping[str, int], level: int, others: int = 0) -> int:
        """How many more jobs to take: a batch for each device that is idle, or soon will be.

        While short batches run it is some batches more, as to ask for each one would be felt.

        Args:
            sizes: Maximum batch size of each task whose jobs count, by its name.
            level: First priority of the class.
            others: How many jobs that are not for devices may be among them.
        """
        if self.is_over:
            return 0
        now_s, name = monotonic(), self._settings.find_class(level)
        ahead = 1 + self._settings.prefetch_batches if self.times.are_short(sizes) else 1
        batches, slots = 0, dict.fromkeys(self._scheduler.slotted, 0)
        for device in self._launches.devices:
            if not self._may_begin(device):
                continue
            if device.setup.slots:
                slots[device.setup.task] += device.free_slots or self._count_turns(device, name)
            elif self._wants_batch(device, now_s) or self._wants_urgent(device, name):
                batches += ahead if device.in_turn else 1
        wanted = sum(
            slots.get(task, batches) * size - self._scheduler.count(task, name)
            for task, size in sizes.items()
        )
        return max(0, wanted + others)

    def oldest_s(self) -> float | None:
        """When the oldest job came that waits for devices, all of them busy; None if none does."""
        if self.is_over:
            return None
        oldest_s = map(self._scheduler.oldest_held_s, self._busy_kinds())
        return min((each_s for each_s in oldest_s if each_s is not None), default=None)

    def offer(self, before_s: float, give: Callable[[Sequence[Any]], Collection[Any]]) -> int:
        """Offers the jobs that came before a time; returns how many went.

        Args:
            before_s: The time, on the clock of `oldest_s`.
            give: Gives jobs to other workers, by their requests; returns those that went.
        """
        old: list[Job[TaskCall]] = []
        now_s = monotonic()
        for task in self._busy_kinds():
            held = sorted(self._scheduler.held(task), key=lambda job: job.arrived_s)
            # Devices that are almost done have their next batch here.
            devices = sum(
                self._wants_batch(device, now_s)
                for device in self._launches.devices
                if not task and not device.setup.task
            )
            kept = devices * max((job.limits.max_batch_size for job in held), default=0)
            old += [
                job
                for job in held[kept:]
                if job.arrived_s <= before_s and job.payload.lease is not None
            ]
        return self._give(old, give)

    def _give(
        self,
        jobs: Sequence[Job[TaskCall]],
        give: Callable[[Sequence[Any]], Collection[Any]],
    ) -> int:
        given = give([job.payload for job in jobs]) if jobs else ()
        gone = [job for job in jobs if job.payload in given]
        self._scheduler.remove(gone)
        for job in gone:
            # A suspect had begun. If it comes back, it must begin anew.
            self._in_flight.remove(job.payload)
        return len(given)

    def _wants_batch(self, device: DeviceProcess, now_s: float) -> bool:
        """Whether a device has nothing to do, or will soon need a batch that is not there yet."""
        if not (in_turn := device.in_turn):
            return device.is_idle
        batch, began_s = in_turn[0].batch, in_turn[0].began_s or in_turn[0].dispatched_s
        task = batch.jobs[0].key.task
        if len(in_turn) > 1 and not self.times.are_short([task]):
            return False
        return self.times.ends_soon(device.name, task, batch.items, began_s, now_s)

    def _wants_urgent(self, device: DeviceProcess, priority_class: str) -> bool:
        """Whether jobs of a class could run between the passes of what a device runs."""
        return device.takes_urgent and self._scheduler.goes_before(
            priority_class, [dispatched.batch for dispatched in device.in_turn]
        )

    def _count_turns(self, device: DeviceProcess, priority_class: str) -> int:
        """How many jobs of a class may have their turn while all slots are taken.

        Those of lower classes would make room. Beside higher ones a job must be here before a slot
        is free: otherwise the slot goes to those that are here, whoever's turn it is.
        """
        if not device.is_full:
            return 0
        rank = self._scheduler.rank
        own, running = rank(priority_class), [each for each in device.in_turn if not each.is_aside]
        ranks = [rank(each.batch.jobs[0].lane.priority_class) for each in running]
        return sum(each > own for each in ranks) or int(min(ranks, default=own) < own)

    def _may_begin(self, device: DeviceProcess) -> bool:
        """Whether no suspects wait or run that keep other jobs from it."""
        if self._scheduler.has_suspects and self._scheduler.tests(device.setup.task):
            return False
        return not self._launches.is_reserved

    def _busy_kinds(self) -> list[str]:
        """The kinds of devices, see `Scheduler.next_batch`, of which none can begin a job now."""
        devices = self._launches.devices
        free = {
            device.setup.task
            for device in devices
            if (device.free_slots or device.is_idle) and self._may_begin(device)
        }
        return list({device.setup.task for device in devices} - free)

    def waiting_by_queue(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Counts the jobs of each queue that wait for a device, and says how old the oldest is.

        Args:
            now_s: The time, on the clock of their arrival.

        Returns:
            `jobs` and `oldest_s` by queue; an age counts as `Job.sent_s` says.
        """
        found: dict[str, dict[str, Any]] = {}
        for job in self._scheduler:
            age_s = now_s - job.sent_s
            queue = found.setdefault(_find_queue(job.payload), {"jobs": 0, "oldest_s": 0.0})
            queue["jobs"] += 1
            queue["oldest_s"] = max(queue["oldest_s"], round(age_s, 3))
        return found


def _find_queue(call: TaskCall) -> str:
    lease = call.lease
    key = lease.store.get_key(lease.token) if lease is not None else None
    if lease is not None and key is not None:
        return find_queue(key, lease.store.keys.prefix)
    # Another transport: the name of the queue, if nobody has given it another key.
    return str((call.message.get("delivery_info") or {}).get("routing_key") or "")

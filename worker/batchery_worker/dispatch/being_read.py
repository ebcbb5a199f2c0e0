"""Jobs whose items are read beside the device, before the scheduler knows them.

Only so many items are read ahead; the jobs behind them wait here.
Whoever calls this holds the lock of the feed.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any, Protocol

from celery import Celery
from kombu.utils.imports import symbol_by_name

from batchery.task import BatchTask
from batchery_worker.in_flight import TaskCall
from batchery_worker.ipc.messages import Setup
from batchery_worker.job import Job


class Readers(Protocol):
    """Fetches and reads items on threads and in processes of its own; a task names its class."""

    @classmethod
    def open(cls, app: Celery, tasks: Collection[Any]) -> "Readers":
        """Gets ready to read items of these tasks."""

    def submit(self, task: str, item: Any) -> "Future[Any]":
        """Takes an item; its result is what the model's `preprocess` gets, or `Failed`."""

    def close(self) -> None:
        """Ends the processes; what is being read is dropped."""


class JobsBeingRead:
    """Has jobs read in their order, and gives back each as soon as all its items are."""

    def __init__(
        self,
        app: Celery,
        setup: Setup,
        call_soon: Callable[[Callable[[], None]], None],
        admit: Callable[[Job[TaskCall]], None],
    ) -> None:
        """Starts the processes, if a task of the device needs them.

        Args:
            app: The app of the tasks.
            setup: Of the device.
            call_soon: Calls a function where the lock is held; from any thread.
            admit: Takes in a job that was read.
        """
        self._call_soon = call_soon
        self._admit = admit
        tasks: list[Any] = [
            task
            for task in app.tasks.values()
            if isinstance(task, BatchTask) and task.Readers and setup.serves(task.name)
        ]
        self._tasks = frozenset(task.name for task in tasks)
        self._readers: Readers | None = None
        if tasks:
            self._readers = symbol_by_name(tasks[0].Readers).open(app, tasks)
        self._waiting: deque[Job[TaskCall]] = deque()
        #: What is read, by its job: as many items as that has; and how many are left.
        self._items: dict[Job[TaskCall], list[Future[Any]]] = {}
        self._left: dict[Job[TaskCall], int] = {}

    def __len__(self) -> int:
        """How many jobs are here."""
        return len(self._waiting) + len(self._items)

    def __iter__(self) -> Iterator[Job[TaskCall]]:
        yield from self._items
        yield from self._waiting

    def reads(self, task: str) -> bool:
        """Whether items of a task are read here."""
        return task in self._tasks

    def count_items(self, task: str, priority_class: str) -> int:
        """How many items of a task and class are here."""
        return sum(
            job.items
            for job in self
            if job.key.task == task and job.lane.priority_class == priority_class
        )

    def add(self, job: Job[TaskCall]) -> None:
        """Takes a job in, which waits for its turn."""
        self._waiting.append(job)

    def begin(self, held_items: int, max_items: int) -> None:
        """Begins to read the next jobs.

        Args:
            held_items: How many items were read, and wait for the device.
            max_items: How many may wait and be read; the last job may have more.
        """
        held_items += sum(map(len, self._items.values()))
        while self._waiting and held_items < max_items:
            job = self._waiting.popleft()
            held_items += job.items
            self._read(job)

    def _read(self, job: Job[TaskCall]) -> None:
        assert self._readers is not None
        self._left[job] = job.items
        self._items[job] = futures = [
            self._readers.submit(job.key.task, item) for item in job.payload.items
        ]
        for future in futures:
            future.add_done_callback(lambda _: self._call_soon(partial(self._note_read, job)))

    def _note_read(self, job: Job[TaskCall]) -> None:
        """Notes that an item of a job was read, or was dropped."""
        if job not in self._items:
            return
        self._left[job] -= 1
        if not self._left[job]:
            job.payload.items = [future.result() for future in self._items[job]]
            self.remove([job])
            self._admit(job)

    def late_s(self) -> float:
        """When the next job here misses its deadline; infinity for never."""
        return min((job.deadline_s for job in self), default=inf)

    def take_late(self, now_s: float) -> list[Job[TaskCall]]:
        """Takes out the jobs that have missed their deadline."""
        late = [job for job in self if job.deadline_s < now_s]
        self.remove(late)
        return late

    def remove(self, jobs: Collection[Job[TaskCall]]) -> None:
        """Forgets jobs; of those that are being read nobody hears any more."""
        for job in jobs:
            for future in self._items.pop(job, ()):
                future.cancel()
            self._left.pop(job, None)
        gone = set(jobs)
        if not gone.isdisjoint(self._waiting):
            self._waiting = deque(job for job in self._waiting if job not in gone)

    def clear(self) -> None:
        """Forgets all jobs."""
        self.remove(list(self))

    def close(self) -> None:
        """Ends the processes."""
        if self._readers is not None:
            self._readers.close()

"""Late binding across workers: what a worker only holds goes back when another one waits for work.

A job that this worker has not begun, although it has been here for a while, begins sooner on a
worker that has nothing to do. So that worker says in Redis that it waits. Its entry is a key that
Redis tracks for those that hold such jobs; nobody asks again and again.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol

from celery.worker import state as worker_state

from batchery.transport.workload import Capacity, HeldJob
from batchery_worker.event_loop import begin_next_turn
from batchery_worker.request import get_lease

logger = logging.getLogger("batchery.worker")

#: How long a job is held before it may go to another worker, in seconds: batches that are shorter
#: are never worth the way.
HELD_S = 0.1

#: Pause between two looks if Redis may have said in between that somebody waits, in seconds.
PAUSE_S = 0.05

#: How long a worker has nothing to do before it says that it waits, in seconds: callers that send
#: one job after the other shall not pay for it.
IDLE_S = 0.02

#: Gives jobs to other workers, by their requests; returns the requests of those that went.
Give = Callable[[Sequence[Any]], Collection[Any]]


class Backlog(Protocol):
    """The jobs of one kind that wait in this worker."""

    def free(self) -> int:
        """How many more jobs could begin at once."""

    def oldest_s(self) -> float | None:
        """When the oldest job came that waits; None if there is none, or it is about to begin."""

    def offer(self, before_s: float, give: Give) -> int:
        """Offers the jobs that came before a time; returns how many may be offered later."""


class BatchBacklog(Backlog, Protocol):
    """The jobs of batch tasks that wait in this worker."""

    def gather(self, take_in: Callable[[], None]) -> None:
        """Calls what admits jobs; they go to devices when it has returned."""

    def limit(self, sizes: Mapping[str, int], level: int) -> int | None:
        """How many more jobs of a priority class and of tasks with these batch sizes to take.

        Returns:
            None for no limit.
        """


class QueueKinds(NamedTuple):
    """Which jobs come by a queue."""

    #: Maximum batch size of each batch task, by its name.
    batch: Mapping[str, int]
    ordinary: bool


class ProcessBacklog:
    """Ordinary jobs that wait for a process of a prefork pool."""

    def __init__(self, worker: Any) -> None:
        """Notes from now on when the jobs of a `WorkController` come."""
        self._worker = worker
        process_task = worker.process_task

        def observe_and_process(request: Any) -> None:
            request.held_since_s = monotonic()
            process_task(request)

        worker.process_task = observe_and_process

    def free(self) -> int:
        """How many processes are free."""
        return int(self._worker.semaphore.value)

    def oldest_s(self) -> float | None:
        """When the first of those that wait came."""
        waiting = self._worker.semaphore._waiting
        return _held_since_s(waiting[0]) if waiting else None

    def offer(self, before_s: float, give: Give) -> int:
        """Offers the jobs that came before a time; returns how many may be offered later."""
        waiting = self._worker.semaphore._waiting
        old = [entry for entry in waiting if _held_since_s(entry) <= before_s]
        given = give([_request(entry) for entry in old])
        for entry in old:
            if _request(entry) in given:
                waiting.remove(entry)
        return len(waiting) - len(old) + len(given)


def _request(entry: tuple[Any, ...]) -> Any:
    """The request that a semaphore's entry will process."""
    _, arguments, _ = entry
    return arguments[0]


def _held_since_s(entry: tuple[Any, ...]) -> float:
    return float(_request(entry).held_since_s)


class LateBinding:
    """Tells the channel of this worker's jobs, and gives some of them back.

    It is the channel's `Workload`. Everything runs on the event loop's thread.
    """

    def __init__(
        self,
        backlogs: Callable[[], tuple[BatchBacklog | None, Backlog | None]],
        leaves_rest: Callable[[], bool],
        kinds: Mapping[str, QueueKinds],
    ) -> None:
        """Does nothing until it is bound to a channel.

        Args:
            backlogs: Returns the backlogs of batch jobs and of ordinary ones; None where there is
                none, such as after the pool has stopped.
            leaves_rest: Says whether jobs are worth the way to another worker.
            kinds: Which jobs come by a queue, by its name; any may come by one that is not named.
        """
        self._backlogs = backlogs
        self._leaves_rest = leaves_rest
        self._kinds = kinds
        self._channel: Any = None
        self._hub: Any = None
        self._look_planned = self._look_due = self._correction_planned = False
        #: Whether Redis tells of the next worker that begins to wait.
        self._watching = False

    def bind(self, channel: Any, hub: Any) -> None:
        """Begins with a channel that is about to consume, on a loop that is about to run."""
        self._channel, self._hub = channel, hub
        self._look_planned = self._look_due = self._correction_planned = False
        self._watching = False
        channel.workload = self

    # What the channel asks

    @property
    def leaves_rest(self) -> bool:
        """Whether other workers that wait may have what this one could not begin at once."""
        return self._leaves_rest()

    def capacity(self) -> Capacity:
        """How many jobs could begin at once, of the kinds that come by any of the queues."""
        kinds = [self._find_kinds(queue) for queue in self._channel.active_queues]
        return self._free(any(batch for batch, _ in kinds), any(ordinary for _, ordinary in kinds))

    def limit_for(self, queue: str, level: int) -> int | None:
        """How many more jobs of a queue and of the class that begins at a priority to take.

        Returns:
            None for no other limit than the prefetch.
        """
        kinds, (batch, _) = self._kinds.get(queue), self._backlogs()
        if kinds is None or kinds.ordinary or batch is None:
            return None
        return batch.limit(kinds.batch, level)

    def capacity_for(self, queue: str) -> Capacity:
        """The same for one queue."""
        return self._free(*self._find_kinds(queue))

    def on_turn(self) -> None:
        """Plans what must be done later; called in each turn of the loop."""
        if self._look_due:
            self._look()
        elif not self._watching and not self._look_planned:
            oldest_s = min(self._waiting_since_s().values(), default=None)
            if oldest_s is not None:
                self._plan_look(max(oldest_s + HELD_S, monotonic() + PAUSE_S))
        if not self._correction_planned and self._channel.is_capacity_stale:
            self._correction_planned = True
            self._call_later(IDLE_S, self._correct_capacity)

    def on_answer(self) -> None:
        """Looks again soon: a push may have come in front of an answer, and nobody has seen it."""
        self._watching = False

    def gather(self, take_in: Callable[[], None]) -> None:
        """Hands messages over, and then begins batches: nothing else is about to come."""
        if (batch := self._backlogs()[0]) is None:
            take_in()
        else:
            batch.gather(take_in)

    def on_waiting(self) -> None:
        """Gives jobs back if another worker has begun to wait."""
        self._watching = False
        self._look()

    def _call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self._hub.call_later(seconds, function)
        # This turn of the loop has looked at its timers already.
        begin_next_turn(self._hub)

    # Giving back

    def _plan_look(self, at_s: float) -> None:
        if not self._look_planned:
            self._look_planned = True
            self._call_later(max(0.0, at_s - monotonic()), self._planned_look)

    def _planned_look(self) -> None:
        self._look_planned = False
        self._look()

    def _look(self) -> None:
        """Offers jobs to workers that wait; if none wait, Redis will tell when one does."""
        self._look_due = False
        since_s = self._waiting_since_s()
        if not since_s:
            return
        before_s = monotonic() - HELD_S
        if min(since_s.values()) > before_s:
            self._plan_look(min(since_s.values()) + HELD_S)
            return
        others_wait = self._channel.others_wait()
        if others_wait is None:
            self._look_due = True
            return
        if others_wait:
            later = sum(self._offer(is_batch, before_s) for is_batch in since_s)
            if later:
                self._plan_look(before_s + 2 * HELD_S)
            # What is left may be for the next one: Redis must tell once more.
            others_wait = self._channel.others_wait()
        self._watching = others_wait is not None

    def _offer(self, is_batch: bool, before_s: float) -> int:
        backlog = self._backlogs()[0 if is_batch else 1]
        assert backlog is not None
        return backlog.offer(before_s, partial(self._give, is_batch))

    def _give(self, is_batch: bool, requests: Sequence[Any]) -> Collection[Any]:
        by_token = {}
        for request in requests:
            lease = get_lease(request.message)
            if lease is None or lease.store is not self._channel.lease_store:
                continue
            # A suspect may have been begun elsewhere, and must be looked at by one worker.
            if lease.store.deaths(lease.token) is None:
                by_token[lease.token] = request
        jobs = [HeldJob(token, is_batch) for token in sorted(by_token, key=int)]
        given = [by_token[token] for token in self._channel.give_to_waiting(jobs)] if jobs else []
        for request in given:
            # Celery must not settle it any more.
            request.acknowledged = True
            worker_state.task_ready(request)
        if given:
            logger.info("%d jobs go back to their queue: another worker waits", len(given))
        return given

    def _waiting_since_s(self) -> dict[bool, float]:
        """When the oldest job that waits came, for batch jobs (True) and ordinary ones (False)."""
        found = {}
        for is_batch, backlog in zip((True, False), self._backlogs(), strict=True):
            if backlog is not None and (since_s := backlog.oldest_s()) is not None:
                found[is_batch] = since_s
        return found

    # Waiting

    def _correct_capacity(self) -> None:
        self._correction_planned = False
        if self._channel.is_capacity_stale:
            # A fetch that finds nothing tells Redis.
            self._channel.ask_again()

    def _free(self, batch: bool, ordinary: bool) -> Capacity:
        batches, others = self._backlogs()
        return Capacity(
            batches.free() if batch and batches is not None else 0,
            others.free() if ordinary and others is not None else 0,
        )

    def _find_kinds(self, queue: str) -> tuple[bool, bool]:
        kinds = self._kinds.get(queue)
        return (True, True) if kinds is None else (bool(kinds.batch), kinds.ordinary)

"""Late binding across workers: what a worker only holds goes back when another one waits for work.

A worker takes what its idle devices can begin, and a little before a batch ends the next one. What
it holds nevertheless, such as jobs behind a batch that takes longer than it used to, begins sooner
on a worker that has nothing to do. That one has entered itself in Redis as waiting.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol

from celery.worker import state as worker_state

from batchery.transport.inbox import Capacity
from batchery.transport.leases import HeldJob
from batchery_worker.dispatch.demand import BatchDemand
from batchery_worker.request import get_lease

logger = logging.getLogger("batchery.worker")

#: How long a job is held before it may go to another worker, in seconds: batches that are shorter
#: are never worth the way.
HELD_S = 0.1

#: Longest pause between two looks whether others wait, in seconds, while jobs are held.
MAX_GIVING_PAUSE_S = 1.0

#: Gives jobs to other workers, by their requests; returns the requests of those that went.
Give = Callable[[Sequence[Any]], Collection[Any]]


class Backlog(Protocol):
    """The jobs of one kind that wait in this worker."""

    def free(self) -> int:
        """How many more jobs could begin at once."""

    def oldest_s(self) -> float | None:
        """When the oldest job came that waits; None if there is none, or it is about to begin."""

    def offer(self, before_s: float, give: Give) -> int:
        """Offers the jobs that came before a time; returns how many went."""


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
        """Offers the jobs that came before a time; returns how many went."""
        waiting = self._worker.semaphore._waiting
        old = [entry for entry in waiting if _held_since_s(entry) <= before_s]
        given = give([_request(entry) for entry in old])
        for entry in old:
            if _request(entry) in given:
                waiting.remove(entry)
        return len(given)


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
        find_batches: Callable[[], BatchDemand | None],
        ordinary: Backlog | None,
        kinds: Mapping[str, QueueKinds],
        ordinary_prefetch: int,
    ) -> None:
        """Does nothing until it is bound to a channel.

        Args:
            find_batches: Returns the jobs of batch tasks, once the pool has started; None without.
            ordinary: The ordinary jobs; None where the pool does not say which of them wait.
            kinds: Which jobs come by a queue, by its name; any may come by one that is not named.
            ordinary_prefetch: How many ordinary jobs Celery itself would hold; 0 for no limit.
        """
        self._find_batches = find_batches
        self._batches: BatchDemand | None = None
        self._ordinary = ordinary
        self._kinds = kinds
        #: Those of a queue that is not named.
        self._all_kinds = QueueKinds(
            {name: size for each in kinds.values() for name, size in each.batch.items()},
            any(each.ordinary for each in kinds.values()),
        )
        self._ordinary_prefetch = ordinary_prefetch
        #: Whether that is no longer what queues of ordinary tasks have in the transport's options.
        self._grown = False
        #: Answers of `find_jobs`, which is asked with each fetch.
        self._jobs = {queue: self._name_jobs(each) for queue, each in kinds.items()}
        self._all_jobs = self._name_jobs(self._all_kinds)
        self._channel: Any = None
        self._hub: Any = None
        #: Entry of a timer: the next look.
        self._planned: Any = None
        self._pause_s = HELD_S

    def bind(self, channel: Any, hub: Any) -> None:
        """Begins with a channel that is about to consume, on a loop that is about to run."""
        self._channel, self._hub = channel, hub
        self._batches = self._find_batches()
        if self._batches is not None:
            self._batches.ask_for_more = partial(self._ask_for_more, self._batches)
        if self._planned is not None:
            # The loop of the connection before may go on.
            self._planned.cancel()
            self._planned = None
        channel.workload = self
        if self._grown:
            self.grow(0)
        # Jobs of the connection before may be held here.
        self.plan_look()

    def _ask_for_more(self, batches: BatchDemand) -> None:
        self._channel.make_room()
        if batches.has_suspects:
            # They came from a device and not with messages, so nobody has planned a look.
            self.plan_look()

    # What the channel asks

    def capacity(self) -> Capacity:
        """How many jobs could begin at once."""
        return Capacity(
            0 if self._batches is None else self._batches.free(),
            0 if self._ordinary is None else self._ordinary.free(),
        )

    def find_kinds(self, queue: str) -> int:
        """Which jobs come by a queue: 1 for batch jobs, 2 for ordinary ones, 3 for both."""
        kinds = self._kinds.get(queue)
        return 3 if kinds is None else bool(kinds.batch) + 2 * kinds.ordinary

    def find_jobs(self, queue: str) -> tuple[frozenset[str], bool] | None:
        """The batch tasks whose jobs come by a queue, and whether ordinary jobs come, too.

        Returns:
            None where no limit but the prefetch is for them.
        """
        return self._jobs.get(queue, self._all_jobs)

    def _name_jobs(self, kinds: QueueKinds) -> tuple[frozenset[str], bool] | None:
        is_limited = kinds.batch and (self._ordinary_prefetch or not kinds.ordinary)
        return (frozenset(kinds.batch), kinds.ordinary) if is_limited else None

    def limit_for(self, queue: str, level: int) -> int | None:
        """How many more jobs of a queue and of the class that begins at a priority to take.

        Returns:
            None for no other limit than the prefetch.
        """
        if self._batches is None or self.find_jobs(queue) is None:
            return None
        kinds = self._kinds.get(queue, self._all_kinds)
        if not kinds.ordinary:
            return self._batches.limit(kinds.batch, level)
        # As Celery counts: a job that is acknowledged when it begins makes room then.
        state: Any = worker_state
        qos = self._channel.qos
        unsettled = len(qos._delivered) - len(qos._dirty) - len(state.scheduled_requests)
        others = self._ordinary_prefetch - max(0, unsettled - self._batches.held)
        return self._batches.limit(kinds.batch, level, others)

    def grow(self, jobs: int) -> None:
        """Takes so many ordinary jobs more, or fewer, as their pool has grown or shrunk."""
        self._grown = True
        self._ordinary_prefetch = self._ordinary_prefetch and max(1, self._ordinary_prefetch + jobs)
        if self._channel is not None:
            parts = dict.fromkeys(self._channel.ordinary_queues, self._ordinary_prefetch)
            self._channel.queue_prefetch = {**self._channel.queue_prefetch, **parts}

    def hand_over(self, take_in: Callable[[], None]) -> None:
        """Hands messages over, and then begins batches: nothing else is about to come."""
        if self._batches is None:
            take_in()
        else:
            self._batches.gather(take_in)
        self.plan_look()

    # Giving back

    def plan_look(self) -> None:
        """Looks soon whether jobs must go back."""
        if self._hub is not None and self._planned is None:
            self._planned = self._hub.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        """Gives jobs back that were held for long, if others wait for work; looks again later."""
        self._planned = None
        before_s = monotonic() - HELD_S
        held = [
            (is_batch, backlog, oldest_s)
            for is_batch, backlog in ((True, self._batches), (False, self._ordinary))
            if backlog is not None and (oldest_s := backlog.oldest_s()) is not None
        ]
        old = [(is_batch, backlog) for is_batch, backlog, since_s in held if since_s <= before_s]
        gave = 0
        if old and self._channel.others_wait():
            gave = sum(
                backlog.offer(
                    before_s, partial(self._give_calls if is_batch else self._give, is_batch)
                )
                for is_batch, backlog in old
            )
        self._pause_s = HELD_S if gave or not held else min(2 * self._pause_s, MAX_GIVING_PAUSE_S)
        if held or (self._batches is not None and self._batches.has_suspects):
            self.plan_look()

    def _give_calls(self, is_batch: bool, calls: Sequence[Any]) -> Collection[Any]:
        given = self._give(is_batch, [call.request for call in calls])
        return [call for call in calls if call.request in given]

    def _give(self, is_batch: bool, requests: Sequence[Any]) -> Collection[Any]:
        by_token, store = {}, self._channel.lease_store
        for request in requests:
            lease = get_lease(request.message)
            if lease is None or lease.store is not store or not store.holds(lease.token):
                continue
            # A suspect may have been begun elsewhere, and must be looked at by one worker.
            if store.deaths(lease.token) is None:
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

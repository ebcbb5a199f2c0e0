"""Which items run next, and how a batch of them is run: everything but the thread."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any

from batchery.errors import DeadlineExceeded, ItemFailed
from batchery.execution.bisect_failures import (
    as_exception,
    as_failed,
    is_out_of_memory,
    isolate,
)
from batchery.outcomes import Failed, Partial, Replace, RetryAfter, collect_outcomes
from batchery_worker.batching.cost_model import CostModel, Costs
from batchery_worker.batching.planner import PASS_TOKENS, plan
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.inprocess.calls import Call, Gate, settle
from batchery_worker.inprocess.options import BatcherOptions
from batchery_worker.inprocess.tensors import Collator, own_row
from batchery_worker.job import Batch, BatchKey, Job, Limits

#: An item: its call, and its place there.
Item = tuple[Call, int]

#: Without `max_batch_tokens`, calls of the function are only cut where that saves padding.
ANY_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class BatcherStats:
    """What the batches of a batcher looked like so far.

    Attributes:
        items: Items that were answered by the function, failures included.
        batches: Batches; where there is a `length`, one may be several calls of the function.
        calls_of_function: How often the function was called, halves after an exception included.
        failed: Items whose outcome was a failure.
        dropped: Items that nobody waited for any more when their turn came, or too late.
        waiting: Items that wait now.
        mean_batch_size: Items per batch; 0 before the first.
        mean_wait_ms: How long an item waited for its batch, on average.
        mean_run_ms: How long a batch ran, on average.
        padding_waste: Share of all computed tokens that were padding; 0 without `length`.
    """

    items: int
    batches: int
    calls_of_function: int
    failed: int
    dropped: int
    waiting: int
    mean_batch_size: float
    mean_wait_ms: float
    mean_run_ms: float
    padding_waste: float


class BatchLoop:
    """Takes calls in, forms their batches and runs them; used by one thread at a time."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: BatcherOptions,
        collator: Collator | None = None,
    ) -> None:
        """Has no calls.

        Args:
            function: Takes the list of items, after the owner if there is one, and the keywords;
                returns one outcome per item. Plain or `async def`.
            name: Its name in errors.
            options: How batches are formed.
            collator: Makes arrays of items, and items of the arrays that the function returns.
        """
        #: The batch function; of a method, it takes the owner first.
        self.function = function
        self.name = name
        self.options = options
        self.collator = collator
        self._max_tokens = options.max_batch_tokens or ANY_TOKENS
        self._is_sorted = options.length is not None or collator is not None
        target_ms = options.target_latency_ms
        self._limits = Limits(
            options.max_batch_size,
            options.max_wait_ms / 1e3,
            None if target_ms is None else target_ms / 1e3,
        )
        self._scheduler: Scheduler[Item] = Scheduler(options.classes, sheds_late=options.shed_late)
        device_type = "cpu" if collator is None else collator.device_type
        self._pass_tokens = PASS_TOKENS.get(device_type, PASS_TOKENS["cpu"])
        self._cost_model = CostModel(Costs(token_ms=1.0, item_ms=0.0, pass_ms=self._pass_tokens))
        self._runner: asyncio.Runner | None = None
        #: Sums of what `BatcherStats` tells.
        self._sums: Counter[str] = Counter()
        self._wait_s = self._run_s = 0.0
        #: The batch that runs next, if its items were asked for already.
        self._ahead: Batch[Item] | None = None
        #: The jobs of the batch that runs.
        self._running: Sequence[Job[Item]] = ()
        #: Whether the function runs, so that a call of its own would wait for itself.
        self.is_computing = False
        #: Number of threads that the last turn has answered.
        self.answered_threads = 0
        #: Called with a number of items that no longer wait, so that there is space for others.
        self.on_taken: Callable[[int], object] = lambda _: None

    def admit(self, call: Call) -> None:
        """Takes a call in; its items wait for their turn."""
        arrived_s, deadline_s = call.sent_s, call.sent_s + call.deadline_s
        made: dict[str | None, BatchKey] = {}
        for index in range(len(call.items)):
            # Items may have keys of their own; those without a key were refused.
            own = "" if call.keys is None else call.keys[index]
            if own is None:
                continue
            key = made.get(own)
            if key is None:
                text = f"{call.key} {own}" if own else call.key
                key = made[own] = BatchKey(self.name, text, (None, None))
            self._scheduler.admit(
                Job("", key, self._limits, 1, arrived_s, (call, index), call.lane, deadline_s)
            )

    @property
    def waiting(self) -> int:
        """How many items wait here."""
        return len(self._scheduler) + (len(self._ahead.jobs) if self._ahead else 0)

    def wake_s(self) -> float | None:
        """When `turn` has something to do if no call comes before; None for never."""
        if self._ahead is not None:
            return monotonic()
        times = [self._scheduler.wake_s(), self._scheduler.late_s()]
        return min((each for each in times if each is not None), default=None)

    def turn(self, *, draining: bool = False) -> None:
        """Runs the next batch, if one is due.

        Args:
            draining: Whether no more calls come, so that no batch waits for them.
        """
        now_s = monotonic()
        self.answered_threads = 0
        self._give_up_late(now_s)
        ahead_s = self._limits.max_wait_s if draining else 0.0
        next_batch = partial(self._scheduler.next_batch, 0, False, now_s + ahead_s, left_s=-ahead_s)
        batch, self._ahead = self._ahead or next_batch(), None
        # Those too that the batch would answer too late: nothing else may come by which they hear.
        self._give_up_late(now_s)
        if batch is None:
            return
        self.on_taken(len(batch.jobs))
        jobs: Sequence[Job[Item]] = batch.jobs
        calls = {job.payload[0] for job in jobs}
        if gone := {call for call in calls if call.future.cancelled()}:
            self._drop([job for job in jobs if job.payload[0] in gone], None)
            jobs = [job for job in jobs if job.payload[0] not in gone]
        self._running = jobs
        if jobs:
            self._run(batch, jobs, now_s)
        else:
            self._scheduler.ended(batch, None)
        self._running = ()
        self._give_up_late(monotonic())  # `look_ahead` may have found some.

    def expected_run_s(self, items: int) -> float:
        """How long a batch would run, in seconds; 0 if that is not known."""
        costs = self._scheduler.costs
        return costs.expected_s(self.name, items) if costs.knows(self.name) else 0.0

    def look_ahead(self) -> tuple[list[Any], Mapping[str, Any]] | None:
        """The batch that runs next, so that it can be prepared meanwhile: its items and keywords.

        For the function, while it runs. As in a worker, a batch leaves early only if it is full:
        until then it keeps growing. Items whose callers give up before its turn will not come.
        """
        if self._ahead is None:
            self._ahead = self._scheduler.next_batch(1, False, monotonic())
        if self._ahead is None:
            return None
        calls = [job.payload for job in self._ahead.jobs]
        return [call.items[index] for call, index in calls], calls[0][0].keywords

    def add_tokens(self, tokens: int, computed_tokens: int) -> None:
        """Counts tokens of a function that plans its own passes, and those with padding."""
        self._sums["tokens"] += tokens
        self._sums["computed_tokens"] += computed_tokens

    def fail_all(self, error: BaseException) -> None:
        """Fails every call that waits, or that the batch under way has not answered."""
        running, self._running = self._running, ()
        jobs = self._scheduler.held()
        self._scheduler.remove(jobs)
        if self._ahead is not None:
            self._scheduler.ended(self._ahead, None)
            jobs, self._ahead = [*self._ahead.jobs, *jobs], None
        self.on_taken(len(jobs))
        for call in dict.fromkeys(job.payload[0] for job in (*running, *jobs)):
            if call.left:
                call.fail(error)

    def close(self) -> None:
        """Ends the event loop of an `async def` function."""
        if self._runner is not None:
            self._runner.close()

    def stats(self, waiting: int) -> BatcherStats:
        """The figures so far."""
        sums = self._sums
        batches, items = max(1, sums["batches"]), max(1, sums["items"])
        computed = sums["computed_tokens"]
        return BatcherStats(
            sums["items"],
            sums["batches"],
            sums["calls"],
            sums["failed"],
            sums["dropped"],
            waiting,
            sums["items"] / batches,
            self._wait_s / items * 1e3,
            self._run_s / batches * 1e3,
            1 - sums["tokens"] / computed if computed else 0.0,
        )

    def _give_up_late(self, now_s: float) -> None:
        if late := self._scheduler.take_late(now_s):
            self.on_taken(len(late))
            error = DeadlineExceeded(f"{self.name}: it could not make its deadline any more")
            self._drop(late, Failed(error))

    def _drop(self, jobs: Sequence[Job[Item]], outcome: Failed | None) -> None:
        """Answers jobs that do not run; None where their callers have given up."""
        self._sums["dropped"] += len(jobs)
        self._answer(jobs, [outcome] * len(jobs))

    def _run(self, batch: Batch[Item], jobs: Sequence[Job[Item]], now_s: float) -> None:
        """Runs a batch; the callers of each part are answered as soon as it has run."""
        self._sums["batches"] += 1
        self._wait_s += sum([now_s - job.arrived_s for job in jobs])
        run_s = 0.0
        # The shortest first: then callers wait least on average.
        for part in reversed(self._parts(jobs)):
            chosen = [jobs[place] for place in part]
            began_s = monotonic()
            try:
                outcomes = self._run_in_halves(chosen)
            except BaseException as error:  # noqa: BLE001 - callers wait, whatever happened
                outcomes = [Failed(as_exception(error, self.name)) for _ in chosen]
            part_s = monotonic() - began_s
            run_s += part_s
            self._run_s += part_s
            self._sums["items"] += len(chosen)
            # Threads of earlier parts may have called again by now.
            self.answered_threads = 0
            self._answer(chosen, outcomes)
        # Only now, while those who were answered wake up.
        self._scheduler.ended(batch, run_s)

    def _parts(self, jobs: Sequence[Job[Item]]) -> list[list[int]]:
        """Cuts a batch into calls of the function: places of jobs, by length."""
        if not self._is_sorted or len(jobs) == 1:
            return [list(range(len(jobs)))]
        costs = self._cost_model.costs
        pass_tokens = self._pass_tokens
        if costs is not None and costs.token_ms > 0:
            pass_tokens = max(1, min(ANY_TOKENS, round(costs.pass_ms / costs.token_ms)))
        return plan(
            [_length(job) for job in jobs], self._max_tokens, len(jobs), pass_tokens=pass_tokens
        )

    def _run_in_halves(self, jobs: Sequence[Job[Item]]) -> list[Any]:
        """Calls the function, in halves after an exception until the culprit is alone."""
        raised: dict[int, TracebackType | None] = {}
        failures = 0

        def run(part: Sequence[int]) -> Any:
            nonlocal failures
            try:
                return self._call([jobs[place] for place in part])
            except Exception as error:
                failures += 1
                if len(part) == 1 and not is_out_of_memory(error):
                    raised[part[0]] = error.__traceback__
                raise

        began_s = monotonic()
        outcomes = isolate(run, range(len(jobs)), name=self.name, convert=self._outcome)
        if self._is_sorted:
            lengths = [_length(job) for job in jobs]
            computed = max(lengths) * len(jobs)
            self._sums["tokens"] += sum(lengths)
            self._sums["computed_tokens"] += computed
            if not failures:
                self._cost_model.ran(computed, len(jobs), 1, (monotonic() - began_s) * 1e3)
        # Nothing crosses a process here, so callers see where it was raised.
        for place, trace in raised.items():
            if isinstance(outcomes[place], Failed):
                outcomes[place].exception.with_traceback(trace)
        raised.clear()  # The traces lead to it.
        return outcomes

    def _call(self, jobs: Sequence[Job[Item]]) -> Any:
        """Calls the function with the items of these jobs."""
        self._sums["calls"] += 1
        first = jobs[0].payload[0]
        given: Any = [call.items[index] for call, index in (job.payload for job in jobs)]
        lengths: list[int] = []
        if self.collator is not None:
            lengths = [each.length for each in given]
            given = self.collator.stack(given)
        owner = () if first.owner is None else (first.owner,)
        self.is_computing = True
        try:
            answer = self.function(*owner, given, **first.keywords)
            if inspect.iscoroutine(answer):
                answer = self._resolve(answer)
            elif isinstance(answer, Iterator):
                # The body of a generator runs here, not at its call. Nobody reads its pieces.
                answer = collect_outcomes(answer, lambda each: isinstance(each, Partial))
        finally:
            self.is_computing = False
        if self.collator is not None:
            return self.collator.rows(answer, lengths, self.name)
        return answer

    def _resolve(self, coroutine: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _outcome(self, outcome: Any) -> Any:
        """Makes failures of what only a worker can serve, and lets go of the batch's arrays."""
        outcome = as_failed(outcome)
        if isinstance(outcome, RetryAfter | Replace):
            text = f"{self.name} answered {type(outcome).__name__}, which takes a Celery worker"
            error = ItemFailed(text)
            error.__cause__ = getattr(outcome, "exception", None)
            return Failed(error)
        if isinstance(outcome, BaseException):
            return Failed(outcome)  # Celery's Ignore and Reject.
        # Rows of a collator are their own already.
        return outcome if self.collator is not None else own_row(outcome)

    def _answer(self, jobs: Sequence[Job[Item]], outcomes: Sequence[Any]) -> None:
        """Hands outcomes to their callers."""
        ended: list[Call] = []
        failed = 0
        for job, outcome in zip(jobs, outcomes, strict=True):
            call, index = job.payload
            failed += isinstance(outcome, Failed)
            if call.answer(index, outcome):
                ended.append(call)
        self._sums["failed"] += failed
        self.answered_threads += sum([isinstance(call.future, Gate) for call in ended])
        settle(ended)


def _length(job: Job[Item]) -> int:
    call, index = job.payload
    return 1 if call.lengths is None else max(1, call.lengths[index])

"""Runs batches of one function: cuts them by length, isolates failures, counts."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from batchery.errors import ItemFailed
from batchery.execution.bisect_failures import NON_VALUES, as_exception, as_failed, isolate
from batchery.outcomes import Failed, Partial, Replace, RetryAfter, collect_outcomes
from batchery.tracebacks import with_frames
from batchery_worker.batching.cost_model import CostModel, Costs
from batchery_worker.batching.planner import PASS_TOKENS, plan
from batchery_worker.inprocess.calls import Call
from batchery_worker.inprocess.options import BatcherOptions
from batchery_worker.inprocess.own_rows import own_rows

#: An item: its call, and its place there.
Item = tuple[Call, int]

#: Without `max_batch_tokens`, calls of the function are only cut where that saves padding.
ANY_TOKENS = 2**31


@dataclass(slots=True)
class BatcherStats:
    """What the batches of a batcher looked like so far.

    Attributes:
        items: Items that were answered by the function, failures included.
        batches: Batches; where there is a `length`, one may be several calls of the function.
        calls_of_function: How often the function was called, halves after an exception included.
        failed: Items whose outcome was a failure.
        dropped: Items that nobody waited for any more when their turn came, or too late.
        waiting: Items that wait now.
        wait_s: How long items waited for their batches, in seconds, all together.
        run_s: How long batches ran, in seconds, all together.
        tokens: Tokens of items; 0 without `length`.
        computed_tokens: The same with padding.
    """

    items: int = 0
    batches: int = 0
    calls_of_function: int = 0
    failed: int = 0
    dropped: int = 0
    waiting: int = 0
    wait_s: float = 0.0
    run_s: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0

    @property
    def mean_batch_size(self) -> float:
        """Items per batch; 0 before the first."""
        return self.items / max(1, self.batches)

    @property
    def mean_wait_ms(self) -> float:
        """How long an item waited for its batch, on average."""
        return self.wait_s / max(1, self.items) * 1e3

    @property
    def mean_run_ms(self) -> float:
        """How long a batch ran, on average."""
        return self.run_s / max(1, self.batches) * 1e3

    @property
    def padding_waste(self) -> float:
        """Share of all computed tokens that were padding; 0 without `length`."""
        return 1 - self.tokens / self.computed_tokens if self.computed_tokens else 0.0


class BatchRunner:
    """Calls a batch function; used by one thread."""

    def __init__(self, function: Callable[..., Any], name: str, options: BatcherOptions) -> None:
        """Runs nothing yet.

        Args:
            function: Takes the list of items, after the owner if there is one, and the keywords;
                returns one outcome per item. Plain or `async def`.
            name: Its name in errors.
            options: How batches are formed.
        """
        self._function = function
        self.name = name
        self.options = options
        self.stats = BatcherStats()
        #: Whether the function runs, so that a call of its own would wait for itself.
        self.is_computing = False
        self._is_sorted = options.length is not None
        usual = Costs(token_ms=1.0, item_ms=0.0, pass_ms=PASS_TOKENS["cpu"])
        self._cost_model = CostModel(usual)
        self._event_loop: asyncio.Runner | None = None

    def cut(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Cuts a batch into calls of the function, by length: the shortest items come first.

        Then callers wait least on average.
        """
        if not self._is_sorted or len(items) == 1:
            return [items]
        costs, pass_tokens = self._cost_model.costs, PASS_TOKENS["cpu"]
        if costs is not None and costs.token_ms > 0:
            pass_tokens = max(1, min(ANY_TOKENS, round(costs.pass_ms / costs.token_ms)))
        max_tokens = self.options.max_batch_tokens or ANY_TOKENS
        parts = plan(_lengths(items), max_tokens, len(items), pass_tokens=pass_tokens)
        return [[items[place] for place in part] for part in reversed(parts)]

    def run(self, items: Sequence[Item]) -> list[Any]:
        """One outcome per item: calls the function, in halves after an exception.

        Exceptions show where they were raised.
        """
        calls, began_s = self.stats.calls_of_function, monotonic()
        outcomes = isolate(self._call, items, name=self.name, convert=self._convert)
        if self._is_sorted:
            lengths = _lengths(items)
            computed = max(lengths) * len(items)
            self.stats.tokens += sum(lengths)
            self.stats.computed_tokens += computed
            if self.stats.calls_of_function == calls + 1:
                self._cost_model.ran(computed, len(items), 1, (monotonic() - began_s) * 1e3)
        for each in outcomes:
            if isinstance(each, Failed) and each.frames:
                with_frames(each.exception, each.frames)
        return outcomes

    def close(self) -> None:
        """Ends the event loop of an `async def` function."""
        if self._event_loop is not None:
            self._event_loop.close()

    def _call(self, items: Sequence[Item]) -> Any:
        """What the function answers for these items."""
        self.stats.calls_of_function += 1
        first = items[0][0]
        given = [call.items[index] for call, index in items]
        owner = () if first.owner is None else (first.owner,)
        self.is_computing = True
        try:
            answer = self._function(*owner, given, **first.keywords)
            if inspect.iscoroutine(answer):
                self._event_loop = self._event_loop or asyncio.Runner()
                answer = self._event_loop.run(answer)
            elif isinstance(answer, Iterator):
                # The body of a generator runs here, not at its call. Nobody reads its pieces.
                answer = collect_outcomes(answer, lambda each: isinstance(each, Partial))
        except KeyboardInterrupt as error:
            # It would go through, and no caller would hear of it.
            raise as_exception(error, self.name) from None
        finally:
            self.is_computing = False
        return answer

    def _convert(self, outcome: Any) -> Any:
        """Makes failures of what only a worker can serve, and lets go of the batch's arrays."""
        if not isinstance(outcome, NON_VALUES):
            return own_rows(outcome)
        outcome = as_failed(outcome)
        if isinstance(outcome, RetryAfter | Replace):
            text = f"{self.name} answered {type(outcome).__name__}, which takes a Celery worker"
            error = ItemFailed(text)
            error.__cause__ = getattr(outcome, "exception", None)
            return Failed(error)
        # What is left are Celery's Ignore and Reject.
        return outcome if isinstance(outcome, Failed) else Failed(outcome)


def _lengths(items: Sequence[Item]) -> list[int]:
    return [1 if call.lengths is None else max(1, call.lengths[index]) for call, index in items]

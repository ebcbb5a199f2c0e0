"""Runs batch functions and models, and keeps one bad item from failing its batch mates.

Everything here works on outcomes: one per item, in order. It is the same code on every pool; the
worker's device process adds the planner between `prepare` and `compute`.
"""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from itertools import islice
from operator import is_
from typing import Any, NamedTuple, Protocol, SupportsIndex

from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils import json
from kombu.utils.compat import detect_environment

from batchery.errors import ONE_JOB_EACH, BatchArgumentError, UnserialisableResult, counted
from batchery.execution.bisect_failures import NON_VALUES, as_failed, is_out_of_memory, isolate
from batchery.execution.item_models import ItemModels
from batchery.model import Model
from batchery.outcomes import Failed, Partial, collect_outcomes

#: Makes a context manager that is entered around each call of the user's code.
Limit = Callable[[], AbstractContextManager[Any]]

#: Cuts prepared items, given their lengths in tokens, into micro-batches of indices.
Plan = Callable[[Sequence[int]], Sequence[Sequence[int]]]

#: Makes a context manager that is entered around each call; takes the positions of its items.
Around = Callable[[Sequence[int]], AbstractContextManager[Any]]

#: Is told of each call before it begins, by the positions of its items; returns what takes the
#: partial results of that call.
Receive = Callable[[Sequence[int]], Callable[[Partial], None]]


def max_lookahead(model: Model) -> int:
    """How many forward passes may be started before the results of the current one are awaited.

    It is more than 0 only for models whose `forward` returns before the device has computed. The
    built-in models say so by `passes_ahead`.
    """
    return int(getattr(model, "passes_ahead", 0))


class StartedPass(NamedTuple):
    """A pass that the device computes."""

    items: Sequence[Any]
    keywords: Mapping[str, Any]
    outputs: Any

    def covers(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
        """Whether it is over these very items."""
        return self.keywords == keywords and are_same(self.items, items)


class Lookahead:
    """Runs the forward passes of a model, and starts as many in advance as the model allows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        #: In the order of their turns.
        self._started: deque[StartedPass] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more pass may be started."""
        return len(self._started) < max_lookahead(self._model)

    def is_idle(self, outputs: Any) -> bool:
        """Whether the device has computed these outputs, or will have in a moment.

        Models that know say so by `has_computed`.
        """
        has_computed = getattr(self._model, "has_computed", None)
        return has_computed is not None and has_computed(outputs)

    def start(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Starts a pass that is likely to come soon, unless it has started.

        Errors are left for its turn: there the pass runs again, and fails as any other pass does.

        Raises:
            SoftTimeLimitExceeded: The limit of the current batch was reached meanwhile.
        """
        if not self.has_room or any(each.covers(items, keywords) for each in self._started):
            return
        try:
            outputs = self._model.forward(items, **keywords)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - the code of any model
            return
        self._started.append(StartedPass(items, keywords, outputs))

    def forward(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """The outputs of a pass, which may have started."""
        while self._started:
            # The plan may have changed since. Outputs of passes that are no longer wanted are
            # dropped, because they take memory.
            started = self._started.popleft()
            if started.covers(items, keywords):
                return started.outputs
            del started
        return self._model.forward(items, **keywords)


def are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether these are the very same items."""
    return len(items) == len(others) and all(map(is_, items, others))


def run_function(
    function: Callable[..., Any],
    items: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    resolve: Callable[[Any], Any] | None = None,
    around: Around = lambda _: nullcontext(),
    receive: Receive = lambda _: lambda _: None,
    models: ItemModels | None = None,
) -> list[Any]:
    """Runs a batch function, plain, `async def` or a generator, over one batch.

    Args:
        function: Takes a list of items and the keywords.
        items: At least one.
        keywords: Passed once for the whole batch.
        resolve: Runs a coroutine to its end; by default on an event loop of its own.
        around: Entered around each call of the function.
        receive: Takes the partial results of a generator.
        models: Validates items before the function gets them, and dumps outcomes.

    Returns:
        One outcome per item, in order. After an exception the batch is split, until the item that
        raises is alone.
    """

    def call(part: Sequence[int]) -> Any:
        own_items = [items[position] for position in part]
        take = partial(_take, name, len(part), receive(part))
        raised: Exception | None = None
        try:
            with around(part):
                try:
                    answer = function(own_items, **keywords)
                    if inspect.isasyncgen(answer):
                        answer = _collect_async(answer, take)
                    if inspect.iscoroutine(answer):
                        answer = (resolve or _resolve)(answer)
                    # A generator runs the function's body here, so its exceptions belong here too.
                    return collect_outcomes(answer, take) if inspect.isgenerator(answer) else answer
                except Exception as error:  # noqa: BLE001 - it is raised below
                    # `contextlib` writes to what passes through it, and a frozen one refuses.
                    raised = error
            raise raised
        except AttributeError as error:
            if error.obj is own_items:
                error.args = (f"{error}; {name} gets a list of items, not one: loop over them",)
            elif isinstance(error.obj, list) and any(error.obj is item for item in own_items):
                error.args = (f"{error}; the item is a list: {ONE_JOB_EACH}",)
            raise
        finally:
            raised = None  # Its frames hold this one.

    name = getattr(function, "__name__", type(function).__name__)
    if models is None:
        return isolate(call, range(len(items)), name=name)
    items = isolate(lambda part: [*map(models.validate, part)], items, name=name, convert=as_failed)
    fit = [position for position, item in enumerate(items) if not isinstance(item, Failed)]
    found = iter(isolate(call, fit, name=name, convert=models.dump))
    return [item if isinstance(item, Failed) else next(found) for item in items]


async def _collect_async(generator: AsyncIterator[Any], take: Callable[[Any], bool]) -> list[Any]:
    """As `collect_outcomes`; such a generator cannot return anything."""
    return [each async for each in generator if not take(each)]


def _take(name: str, count: int, receive: Callable[[Partial], None], yielded: Any) -> bool:
    """Whether what a function of so many items has yielded was a partial result, and is taken."""
    if not isinstance(yielded, Partial):
        return False
    index = yielded.index
    if not isinstance(index, SupportsIndex) or not 0 <= int(index) < count:
        raise BatchArgumentError(
            f"{name} yielded a Partial for index {index!r:.80}, and was given"
            f" {counted(count, 'item')}; count them from 0"
        )
    receive(yielded)
    return True


def read_back(outcome: Any) -> Any:
    """The outcome as its caller reads it from JSON; a failure if JSON cannot write it."""
    if isinstance(outcome, NON_VALUES):
        return outcome
    try:
        return json.loads(json.dumps(outcome))
    except Exception as error:  # noqa: BLE001 - whatever the value's own code raises
        return refuse_value(outcome, error)


def refuse_value(value: Any, error: Exception) -> Failed:
    """The failure of an item whose value JSON cannot write."""
    return Failed(
        UnserialisableResult(
            f"the result is a {type(value).__name__} that JSON cannot write ({error});"
            " return plain numbers, texts, lists and dictionaries"
        )
    )


def prepare(model: Model, items: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Preprocesses a batch; returns one prepared item or `Failed` per item, in order."""
    return isolate(
        lambda part: model.preprocess(part, **keywords),
        items,
        name=f"{type(model).__name__}.preprocess",
        convert=as_failed,
    )


class PassMemory(Protocol):
    """Learns how large a forward pass may be."""

    def passed(self, tokens: int) -> None:
        """A pass of this many tokens fitted into memory."""

    def failed(self, tokens: int) -> None:
        """A pass of this many tokens did not fit; it is tried again in halves."""


def compute(
    model: Model,
    prepared: Sequence[Any],
    keywords: Mapping[str, Any],
    plan: Plan,
    *,
    limit: Limit = nullcontext,
    memory: PassMemory | None = None,
    lookahead: Lookahead | None = None,
    start_next_batch: Callable[[], None] = lambda: None,
    between_passes: Callable[[], None] = lambda: None,
) -> tuple[list[Any], int, int]:
    """Runs the forward passes of a prepared batch.

    As many passes as the model allows are started before the results of the current one are
    awaited.

    Args:
        model: A loaded model.
        prepared: The list that `prepare` returned; failed items keep their position.
        keywords: The keywords of the batch.
        plan: Cuts the batch into micro-batches. When memory ran out, it is called again for the
            rest, as it may know better by then.
        limit: Entered around each forward pass.
        memory: Learns from each forward pass.
        lookahead: Knows whether the first pass has started.
        start_next_batch: Called when one more pass may be started and none is left in this batch;
            starts the first pass of the next batch.
        between_passes: Called before each pass but the first; may run something else first.

    Returns:
        One outcome per item, in order; then the number of tokens that were needed, and the number
        that were computed, with padding.
    """
    passes = _Passes(model, prepared, keywords, limit, memory, lookahead or Lookahead(model))
    lengths = passes.lengths
    name = f"{type(model).__name__}.forward"
    computed_tokens = 0
    ahead = _cut(plan, lengths, list(lengths))
    while ahead:
        positions = ahead.popleft()
        passes.start_next = partial(
            passes.start, list(islice(ahead, max_lookahead(model))), start_next_batch
        )
        failures = passes.failures
        results = isolate(passes.run, positions, name=name)
        for position, result in zip(positions, results, strict=True):
            passes.outcomes[position] = result
        computed_tokens += _computed(model, lengths, positions)
        if ahead and passes.failures > failures:
            ahead = _cut(plan, lengths, [position for part in ahead for position in part])
        if ahead:
            between_passes()
    return passes.outcomes, sum(lengths.values()), computed_tokens


def first_passes(model: Model, prepared: Sequence[Any], plan: Plan) -> list[list[Any]]:
    """The items of the passes that may be started before the turn of this batch, in order."""
    lengths = {
        position: length
        for position, length in enumerate(_lengths(model, prepared))
        if not isinstance(length, NON_VALUES)
    }
    ahead = _cut(plan, lengths, list(lengths))
    return [
        [prepared[position] for position in positions]
        for positions in islice(ahead, max_lookahead(model))
    ]


class _Passes:
    """The forward passes of one prepared batch; items are identified by their positions."""

    def __init__(
        self,
        model: Model,
        prepared: Sequence[Any],
        keywords: Mapping[str, Any],
        limit: Limit,
        memory: PassMemory | None,
        lookahead: Lookahead,
    ) -> None:
        self._model = model
        self._lookahead = lookahead
        self._prepared = prepared
        self._keywords = keywords
        self._limit = limit
        self._memory = memory
        self.outcomes = list(prepared)
        #: Tokens of the items that are fit to run, by position.
        self.lengths: dict[int, int] = {}
        #: How often memory ran out.
        self.failures = 0
        #: Called between a pass and its results.
        self.start_next: Callable[[], None] = lambda: None
        for position, length in enumerate(_lengths(model, prepared)):
            if isinstance(length, NON_VALUES):
                self.outcomes[position] = length
            else:
                self.lengths[position] = length

    def start(self, passes: Sequence[Sequence[int]], start_next_batch: Callable[[], None]) -> None:
        """Starts the passes over the items at these positions, which are likely to come next."""
        for positions in passes:
            self._lookahead.start(self._items(positions), self._keywords)
        if self._lookahead.has_room:
            start_next_batch()

    def run(self, positions: Sequence[int]) -> Any:
        """Runs one pass, over the items at these positions."""
        tokens = _computed(self._model, self.lengths, positions)
        try:
            with self._limit():
                outputs = self._lookahead.forward(self._items(positions), self._keywords)
                if not self._lookahead.is_idle(outputs):
                    self.start_next()
                answer = self._model.postprocess(outputs, **self._keywords)
        except BaseException as error:
            if is_out_of_memory(error):
                self.failures += 1
                if self._memory is not None:
                    self._memory.failed(tokens)
            raise
        if self._memory is not None:
            self._memory.passed(tokens)
        return answer

    def _items(self, positions: Sequence[int]) -> list[Any]:
        return [self._prepared[position] for position in positions]


def _cut(plan: Plan, lengths: Mapping[int, int], positions: Sequence[int]) -> deque[Sequence[int]]:
    """Micro-batches of the items at these positions; a plan is asked only where there are some."""
    if not positions:
        return deque()
    cuts = plan([lengths[position] for position in positions])
    return deque([positions[each] for each in chosen] for chosen in cuts)


def _computed(model: Model, lengths: Mapping[int, int], positions: Sequence[int]) -> int:
    """Tokens of a pass over the items at these positions, padding counted if there is any."""
    chosen = [lengths[position] for position in positions]
    return max(chosen) * len(chosen) if model.pads else sum(chosen)


def _lengths(model: Model, prepared: Sequence[Any]) -> list[Any]:
    """Tokens of each prepared item; instead of a number, the outcome of an item that has failed."""

    def count(items: Sequence[Any]) -> list[Any]:
        return [each if isinstance(each, NON_VALUES) else int(model.tokens(each)) for each in items]

    name = f"{type(model).__name__}.tokens"
    return isolate(count, prepared, name=name, convert=lambda outcome: outcome)


def _resolve(coroutine: Any) -> Any:
    """Runs a coroutine from a plain call; on another thread if this one runs an event loop."""
    if detect_environment() != "default":
        # All green threads share one thread, which can run one event loop at a time.
        with _turn():
            return asyncio.run(coroutine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@cache
def _turn() -> Any:
    # Created on first use: by then gevent or eventlet have replaced the lock with their own.
    return threading.RLock()

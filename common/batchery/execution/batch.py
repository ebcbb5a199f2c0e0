"""Runs batch functions and models, and keeps one bad item from failing its batch mates.

Everything here works on outcomes: one per item, in order. It is the same code on every pool; the
worker's device process adds the planner between `prepare` and `compute`.
"""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
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

    def run(
        self,
        items: Sequence[Any],
        keywords: Mapping[str, Any],
        coming: Iterable[Sequence[Any]],
        start_next_batch: Callable[[], None],
    ) -> Any:
        """Runs a pass; starts others meanwhile, unless its outputs are there in a moment.

        Args:
            items: Of the pass.
            keywords: Of the batch.
            coming: The items of the next passes of the batch.
            start_next_batch: Called when there is room for passes of another batch.
        """
        outputs = self.forward(items, keywords)
        # Models that know say so.
        has_computed = getattr(self._model, "has_computed", lambda _: False)
        if not has_computed(outputs):
            for each in islice(coming, max_lookahead(self._model)):
                self.start(each, keywords)
            if self.has_room:
                start_next_batch()
        return self._model.postprocess(outputs, **keywords)

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
    passes = lookahead or Lookahead(model)
    outcomes, lengths = _measure(model, prepared)
    failures = computed_tokens = 0
    ahead = _cut(plan, lengths, list(lengths))

    def run(positions: Sequence[int]) -> Any:
        nonlocal failures
        tokens = _computed(model, lengths, positions)
        coming = (_choose(prepared, each) for each in ahead)
        try:
            with limit():
                items = _choose(prepared, positions)
                answer = passes.run(items, keywords, coming, start_next_batch)
        except BaseException as error:
            failures += _has_no_room(error, tokens, memory)
            raise
        if memory is not None:
            memory.passed(tokens)
        return answer

    while ahead:
        positions, before = ahead.popleft(), failures
        results = isolate(run, positions, name=f"{type(model).__name__}.forward")
        for position, result in zip(positions, results, strict=True):
            outcomes[position] = result
        computed_tokens += _computed(model, lengths, positions)
        if failures > before:
            ahead = _cut(plan, lengths, [position for part in ahead for position in part])
        if ahead:
            between_passes()
    return outcomes, sum(lengths.values()), computed_tokens


def first_passes(model: Model, prepared: Sequence[Any], plan: Plan) -> list[list[Any]]:
    """The items of the passes that may be started before the turn of this batch, in order."""
    _, lengths = _measure(model, prepared)
    ahead = islice(_cut(plan, lengths, list(lengths)), max_lookahead(model))
    return [_choose(prepared, positions) for positions in ahead]


def _choose(prepared: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [prepared[position] for position in positions]


def _has_no_room(error: BaseException, tokens: int, memory: PassMemory | None) -> bool:
    """Whether a pass of so many tokens had no memory; tells whoever learns from that."""
    is_short = is_out_of_memory(error)
    if is_short and memory is not None:
        memory.failed(tokens)
    return is_short


def _measure(model: Model, prepared: Sequence[Any]) -> tuple[list[Any], dict[int, int]]:
    """The prepared items, or why one is not fit to run; and tokens of the others, by position."""

    def count(items: Sequence[Any]) -> list[Any]:
        return [each if isinstance(each, NON_VALUES) else int(model.tokens(each)) for each in items]

    name = f"{type(model).__name__}.tokens"
    counted = isolate(count, prepared, name=name, convert=lambda outcome: outcome)
    outcomes, lengths = list(prepared), {}
    for position, length in enumerate(counted):
        if isinstance(length, NON_VALUES):
            outcomes[position] = length
        else:
            lengths[position] = length
    return outcomes, lengths


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

"""Runs batch functions and models, and keeps one bad item from failing its batch mates.

Everything here works on outcomes: one per item, in order. It is the same code on every pool; the
worker's device process adds the planner between `prepare` and `compute`.
"""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

from kombu.utils.compat import detect_environment

from batchery.errors import OutOfMemory, WrongLength
from batchery.model import Model
from batchery.outcome import Answered, Failed, Ignore, Reject, Replace, RetryAfter

#: Makes a context that is entered around each call of the user's code.
Limit = Callable[[], AbstractContextManager[Any]]

#: Cuts prepared items, given their lengths in tokens, into micro-batches of indices.
Plan = Callable[[Sequence[int]], Sequence[Sequence[int]]]

#: Makes a context that is entered around each call with some of the items, given their positions.
Around = Callable[[range], AbstractContextManager[Any]]

#: Outcomes that are final before a forward pass: no value will come of them.
SETTLED = (Failed, RetryAfter, Replace, Ignore, Reject)


def run_function(
    function: Callable[..., Any],
    items: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    resolve: Callable[[Any], Any] | None = None,
    around: Around = lambda _: nullcontext(),
) -> list[Any]:
    """Runs a batch function, plain or `async def`, over one batch.

    Args:
        function: Takes a list of items and the keywords.
        items: At least one.
        keywords: Passed once for the whole batch.
        resolve: Drives a coroutine to its end; by default on an event loop of its own.
        around: Entered around each call of the function.

    Returns:
        One outcome per item, in order. An exception splits the batch until it hits one item alone.
    """

    def call(part: Sequence[int]) -> Any:
        assert isinstance(part, range)
        with around(part):
            answer = function([items[position] for position in part], **keywords)
            if inspect.iscoroutine(answer):
                answer = (resolve or _resolve)(answer)
            # The body of a generator is the function's, too.
            return list(answer) if inspect.isgenerator(answer) else answer

    name = getattr(function, "__name__", type(function).__name__)
    return isolate(call, range(len(items)), name=name)


def prepare(model: Model, items: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Preprocesses a batch; returns one prepared item or `Failed` per item, in order."""
    return isolate(
        lambda part: model.preprocess(part, **keywords),
        items,
        name=f"{type(model).__name__}.preprocess",
        spell=_as_failed,
    )


def compute(
    model: Model,
    prepared: Sequence[Any],
    keywords: Mapping[str, Any],
    plan: Plan,
    *,
    limit: Limit = nullcontext,
) -> tuple[list[Any], int, int]:
    """Runs the forward passes of a prepared batch.

    Args:
        model: Loaded.
        prepared: As `prepare` returned it; failed items keep their place.
        keywords: The keywords of the batch.
        plan: Cuts it into micro-batches.
        limit: Entered around each forward pass.

    Returns:
        One outcome per item, in order; then the tokens that were needed and the tokens that were
        computed, padding included.
    """
    outcomes = list(prepared)
    fit = []
    lengths = []
    for index, each in enumerate(prepared):
        length = each if isinstance(each, SETTLED) else _length(model, each)
        if isinstance(length, SETTLED):
            outcomes[index] = length
        else:
            fit.append(index)
            lengths.append(length)
    computed_tokens = 0

    def call(part: Sequence[Any]) -> Any:
        with limit():
            return model.postprocess(model.forward(part, **keywords), **keywords)

    for chosen in plan(lengths):
        places = [fit[each] for each in chosen]
        results = isolate(
            call, [prepared[place] for place in places], name=f"{type(model).__name__}.forward"
        )
        for place, result in zip(places, results, strict=True):
            outcomes[place] = result
        computed_tokens += max(lengths[each] for each in chosen) * len(chosen)
    return outcomes, sum(lengths), computed_tokens


def _length(model: Model, prepared: Any) -> Any:
    """Tokens of one prepared item as a plain number, or `Failed`."""
    name = f"{type(model).__name__}.tokens"
    (length,) = isolate(lambda part: [int(model.tokens(part[0]))], [prepared], name=name)
    return length


def isolate(
    call: Callable[[Sequence[Any]], Any],
    items: Sequence[Any],
    *,
    name: str,
    spell: Callable[[Any], Any] | None = None,
) -> list[Any]:
    """Calls with all items; after an exception with each half, until the culprit is alone.

    Args:
        call: Returns one outcome per item; may raise.
        items: Any number.
        name: What to call it in errors.
        spell: Applied to each outcome; by default, what makes a result of it.

    Returns:
        One outcome per item, in order. Where the number of outcomes was wrong, every item of that
        call has failed: nobody can tell which outcome belongs to which item.
    """
    if not items:
        return []
    try:
        outcomes = [(spell or _plain)(each) for each in _outcomes(call(items), len(items), name)]
    except WrongLength as error:
        return [Failed(error) for _ in items]
    except BaseException as error:
        # Whatever the user's code raises: sys.exit, cancelled coroutines, panics of Rust libraries.
        if isinstance(error, KeyboardInterrupt):
            raise
        if len(items) == 1:
            return [_failed(error, name)]
    else:
        return outcomes
    # Outside the handler, where the exception and the tensors in its frames are free again.
    middle = len(items) // 2
    return [
        *isolate(call, items[:middle], name=name, spell=spell),
        *isolate(call, items[middle:], name=name, spell=spell),
    ]


def _outcomes(answer: Any, expected: int, name: str) -> list[Any]:
    """Checks that there is one outcome per item."""
    if isinstance(answer, str | bytes | Mapping | AbstractSet) or not isinstance(answer, Iterable):
        raise WrongLength(
            f"{name} returned a {type(answer).__name__} for {expected} items;"
            " return a list with one outcome per item"
        )
    outcomes = list(answer)
    if len(outcomes) != expected:
        raise WrongLength(
            f"{name} returned {len(outcomes)} outcomes for {expected} items;"
            " return one outcome per item, in order"
        )
    return outcomes


def _as_failed(outcome: Any) -> Any:
    """Takes an exception that was returned instead of raised for what was meant."""
    if isinstance(outcome, BaseException) and not isinstance(outcome, Ignore | Reject):
        outcome = Failed(outcome)
    if isinstance(outcome, Failed) and isinstance(outcome.error, BaseException):
        return replace(outcome, error=_safe(outcome.error, "the batch function"))
    return outcome


def _plain(outcome: Any) -> Any:
    """Turns rows of arrays and tensors into lists, which JSON can write."""
    outcome = _as_failed(outcome)
    if isinstance(outcome, SETTLED):
        return outcome
    to_list = getattr(outcome, "tolist", None)
    return to_list() if callable(to_list) else outcome


def _failed(error: BaseException, name: str) -> Any:
    if isinstance(error, Ignore | Reject):
        return error
    if isinstance(error, Answered):
        return error.outcome
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        error = OutOfMemory(
            f"{name}: no memory for this item, even alone ({text});"
            " use a shorter item, a smaller dtype or a larger device"
        )
        return Failed(error)
    trace = "".join(traceback.format_exception(error))
    return Failed(_safe(error, name).with_traceback(None), trace)


def _safe(error: BaseException, name: str) -> BaseException:
    """Another exception for those by which Celery's worker would feel addressed itself."""
    if isinstance(error, SystemExit):
        return RuntimeError(f"{name} called sys.exit({error.code!r})")
    if isinstance(error, MemoryError):
        return OutOfMemory(f"{name}: no memory for this item ({error})")
    if not isinstance(error, Exception):
        return RuntimeError(f"{name} raised {type(error).__name__}: {error}")
    return error


def _resolve(coroutine: Any) -> Any:
    """Drives a coroutine from a plain call; on another thread if this one runs an event loop."""
    if detect_environment() != "default":
        # All green threads share one thread, where one event loop can run at a time.
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
    # Made at its first use, when gevent or eventlet have surely put their own lock in place.
    return threading.RLock()

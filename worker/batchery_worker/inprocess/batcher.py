"""`batched`: what users see of the batcher without a broker."""

import asyncio
import functools
import math
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from threading import TIMEOUT_MAX
from typing import Any, Concatenate, Generic, Protocol, Self, TypeVar, overload

from batchery.errors import BatchArgumentError, NoResult
from batchery.outcomes import Failed
from batchery_worker.inprocess.batch_runner import BatcherStats, BatchRunner
from batchery_worker.inprocess.batcher_thread import BatcherThread
from batchery_worker.inprocess.calls import Call, settle
from batchery_worker.inprocess.options import BatcherOptions, CallOptions, check_names, encode
from batchery_worker.job import Lane

#: An item, and its result.
T = TypeVar("T")
R = TypeVar("R")

#: What the function returns: one outcome per item.
Outcomes = Iterable[R | Failed]

#: Takes items and keywords; plain or `async def`.
Function = Callable[Concatenate[list[T], ...], Outcomes[R] | Awaitable[Outcomes[R]]]

#: The same for a method, which takes its owner first.
Method = Callable[Concatenate[Any, list[T], ...], Outcomes[R] | Awaitable[Outcomes[R]]]

USUAL_CALL = CallOptions()

#: Python 3.13 gives a decorator under `@classmethod` no way to know the class.
NO_CLASS_METHODS = "no class method can be batched; use a @staticmethod above @batched"


class BatchedCall(Generic[T, R]):
    """A batch function that is called with single items, or lists of items, from anywhere.

    Calls wait together and run in batches, on one thread. Each gets its own result.
    """

    def __init__(
        self, thread: BatcherThread, owner: Any = None, call_options: CallOptions = USUAL_CALL
    ) -> None:
        self._thread = thread
        self._owner = owner
        self._call_options = call_options
        #: What the thread lives as long as.
        self._anchor: Any = owner

    @overload
    def __call__(self, item: list[T], /, *others: Any, **keywords: Any) -> list[R]: ...
    @overload
    def __call__(self, item: T, /, *others: Any, **keywords: Any) -> R: ...
    def __call__(self, item: Any, /, *others: Any, **keywords: Any) -> Any:
        """The result of one item; of a list of items, the list of results.

        Args:
            item: What the function gets in its list. A list counts as many items: an item that is
                a list goes through `submit` or `submit_many`.
            others: None: one positional argument, and the rest as keywords.
            keywords: For the function. Only calls with equal keywords share a batch.

        Raises:
            BatchArgumentError: There is more than one positional argument, or keywords are no plain
                data, or the batch function itself calls.
            NoResult: None came within `timeout_s`.
            QueueFull: `max_waiting` items wait already.
            BatcherClosed: It is closed, or belongs to the parent of this process.
            Exception: What the function raised, or answered as `Failed`, for this item.
        """
        future: Future[Any] = Future()
        self._send(future, item, isinstance(item, list), others, keywords, is_blocking=True)
        timeout_s = self._call_options.timeout_s
        try:
            return future.result(None if timeout_s is None else min(timeout_s, TIMEOUT_MAX))
        except TimeoutError:
            if future.cancel():
                raise self._no_result() from None
            return future.result()
        finally:
            # The thread may have been interrupted.
            future.cancel()

    @overload
    async def acall(self, item: list[T], /, *others: Any, **keywords: Any) -> list[R]: ...
    @overload
    async def acall(self, item: T, /, *others: Any, **keywords: Any) -> R: ...
    async def acall(self, item: Any, /, *others: Any, **keywords: Any) -> Any:
        """The same for coroutines, on any event loop. A cancelled call is dropped.

        Raises:
            NoResult: None came within `timeout_s`.
            QueueFull: `max_waiting` items wait already.
            BatcherClosed: It is closed, or belongs to the parent of this process.
            Exception: What the function raised, or answered as `Failed`, for this item.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call = self._send(future, item, isinstance(item, list), others, keywords)
        if call.left:
            timeout_s = self._call_options.timeout_s
            try:
                # An `asyncio.timeout` costs more than all else here.
                await (future if timeout_s is None else asyncio.wait_for(future, timeout_s))
            except TimeoutError:
                raise self._no_result() from None
        return call.result()

    def submit(self, item: T, /, *others: Any, **keywords: Any) -> "Future[R]":
        """The future result of one item. If it is cancelled before its batch, it never runs.

        Raises:
            QueueFull: `max_waiting` items wait already.
            BatcherClosed: It is closed, or belongs to the parent of this process.
        """
        future: Future[Any] = Future()
        self._send(future, item, False, others, keywords)
        return future

    def submit_many(self, items: Iterable[T], /, **keywords: Any) -> "Future[list[R]]":
        """The future results of many items, in their order; the items may be lists themselves.

        Raises:
            QueueFull: `max_waiting` items wait already.
            BatcherClosed: It is closed, or belongs to the parent of this process.
        """
        future: Future[Any] = Future()
        self._send(future, list(items), True, (), keywords)
        return future

    def options(self, **options: Any) -> "BatchedCall[T, R]":
        """The same function, called with other options: those of `CallOptions`.

        Raises:
            BatchArgumentError: There is no such option, or its value is impossible.
        """
        name, classes = self._thread.name, self._thread.options.classes
        check_names(name, options, CallOptions.__dataclass_fields__)
        chosen = replace(self._call_options, **options)
        if chosen.priority_class not in (None, *classes):
            raise BatchArgumentError(
                f"{name}: priority_class={chosen.priority_class!r}: there are {', '.join(classes)}"
            )
        made = BatchedCall[T, R](self._thread, self._owner, chosen)
        made._anchor = self
        return made

    @property
    def stats(self) -> BatcherStats:
        """What the batches looked like so far."""
        return self._thread.stats

    def close(self) -> None:
        """Takes no more calls, answers those that are there, and ends the thread."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _send(
        self,
        future: "Future[Any] | asyncio.Future[None]",
        item: Any,
        many: bool,
        others: tuple[Any, ...],
        keywords: Mapping[str, Any],
        *,
        is_blocking: bool = False,
    ) -> Call:
        """Makes a call, and queues it; one without items is done."""
        thread, own, options = self._thread, self._call_options, self._thread.options
        thread.check(is_blocking=is_blocking)
        if others:
            raise BatchArgumentError(
                f"{thread.name}: {NO_CLASS_METHODS}"
                if isinstance(item, type)
                else f"{thread.name} takes exactly one positional argument, the item, but got"
                f" {1 + len(others)}; pass options as keywords, and several items as a list"
            )
        items = tuple(item) if many else (item,)
        key = encode(thread.name, keywords) if keywords else ""
        call = Call(
            *(items, many, is_blocking, future, self._owner),
            *(keywords, key, thread.usual_lane, own),
        )
        if own is not USUAL_CALL or options.small_batch_threshold is not None:
            name = own.priority_class or thread.usual_lane.priority_class
            call.lane = Lane(name, is_large=len(items) > (options.small_batch_threshold or inf))
        if options.length is not None:
            call.lengths = [math.ceil(options.length(each)) for each in items]
        if call.left:
            thread.send(call)
        else:
            settle([call])
        return call

    def _no_result(self) -> NoResult:
        return NoResult(
            f"{self._thread.name}: no result within {self._call_options.timeout_s:g} s;"
            " what has not begun is dropped"
        )


class BatchedFunction(BatchedCall[T, R]):
    """A function with a batcher, or a method with one batcher per instance; made by `batched`."""

    __name__: str

    def __init__(self, function: Callable[..., Any], given_options: Mapping[str, Any]) -> None:
        if not callable(function) or isinstance(function, type | staticmethod | classmethod):
            raise BatchArgumentError(
                f"batched({function!r:.80}): decorate a function or a method; a static method with"
                f" @staticmethod above @batched. {NO_CLASS_METHODS.capitalize()}"
            )
        #: The bare function: takes a list, returns a list. It becomes a Celery task by
        #: `app.task(base=BatchTask)(embed.function)`.
        self.function = function
        self._options = given_options
        #: By the `id` of each instance, as long as it lives.
        self._threads: dict[int, BatcherThread] = {}
        super().__init__(self._make_thread(self))
        functools.update_wrapper(self, function)

    def _make_thread(self, anchor: Any) -> BatcherThread:
        """A batcher of the function, which ends with its anchor."""
        name = describe_function(self.function)
        options = choose(name, self._options)
        return make_thread(anchor, BatchRunner(self.function, name, options))

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> BatchedCall[T, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        return BatchedCall(self._threads.get(id(instance)) or self._bind(instance), instance)

    def _bind(self, instance: Any) -> BatcherThread:
        if isinstance(instance, type):
            raise BatchArgumentError(f"{self._thread.name}: {NO_CLASS_METHODS}")
        key, made = id(instance), self._make_thread(instance)
        # Another object may have the same `id` later, but not before this is called.
        weakref.finalize(instance, self._threads.pop, key, None).atexit = False
        # Of several threads that come here at once, each gets the same.
        return self._threads.setdefault(key, made)


class _Decorator(Protocol):
    """Decorates a function, or a method; plain or `async def`."""

    @overload
    def __call__(self, function: Function[T, R], /) -> BatchedFunction[T, R]: ...
    @overload
    def __call__(self, function: Method[T, R], /) -> BatchedFunction[T, R]: ...
    @overload
    def __call__(self, function: Callable[..., Any], /) -> BatchedFunction[Any, Any]: ...


@overload
def batched(function: Function[T, R], /, **options: Any) -> BatchedFunction[T, R]: ...
@overload
def batched(function: Method[T, R], /, **options: Any) -> BatchedFunction[T, R]: ...
@overload
def batched(function: Callable[..., Any], /, **options: Any) -> BatchedFunction[Any, Any]: ...
@overload
def batched(**options: Any) -> _Decorator: ...
def batched(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Makes a function over lists one that is called with single items, which run in batches.

    ```python
    @batched(max_batch_size=64)
    def embed(texts: list[str]) -> list[Vector]: ...

    embed("a")                  # one item, one result
    embed(["a", "b"])           # a list of items, a list of results
    await embed.acall("a")      # from asyncio
    embed.submit("a")           # a concurrent.futures.Future
    ```

    The same for methods: each instance has a batcher of its own, which ends with it.

    Args:
        function: Takes a list of items and keywords, and returns one outcome per item, in order: a
            value, or `Failed`. Plain or `async def`. It runs on one thread of its own. If it
            raises, the batch is split until the culprit is alone.
        options: Those of `BatcherOptions`.

    Raises:
        BatchArgumentError: What is decorated is no function; there is no such option, or its value
            is impossible.
    """
    if function is None:
        choose("batched", options)  # A wrong option is found where it was written.
        return functools.partial(BatchedFunction, given_options=options)
    return BatchedFunction(function, options)


def choose(name: str, options: Mapping[str, Any]) -> BatcherOptions:
    """The options of a batcher.

    Raises:
        BatchArgumentError: There is no such option, or its value is impossible.
    """
    check_names(name, options, BatcherOptions.__dataclass_fields__)
    return BatcherOptions(**options)


def describe_function(function: Any) -> str:
    """The name of a function in errors."""
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def make_thread(anchor: Any, runner: BatchRunner) -> BatcherThread:
    """A batcher that ends with its anchor."""
    thread = BatcherThread(runner)
    try:
        end = weakref.finalize(anchor, thread.close, wait=False)
    except TypeError:
        raise BatchArgumentError(
            f"{thread.name}: instances of {type(anchor).__name__} have no weak references;"
            ' add "__weakref__" to its __slots__'
        ) from None
    end.atexit = False  # There all of them are drained.
    return thread

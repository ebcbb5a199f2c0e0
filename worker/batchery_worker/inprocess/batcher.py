"""`batched` and `Batcher`: what users see of the batcher without a broker."""

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic
from typing import Any, Self, TypeVar

from batchery.errors import BatchArgumentError, NoResult
from batchery_worker.inprocess.batch_loop import BatcherStats, BatchLoop, deadline_of, lane_of
from batchery_worker.inprocess.batcher_thread import BatcherThread, send_and_await, send_and_wait
from batchery_worker.inprocess.calls import Call, FutureCall, LoopCall, ThreadCall
from batchery_worker.inprocess.options import BatcherOptions, CallOptions, spell
from batchery_worker.inprocess.tensors import Collator

C = TypeVar("C", bound=Call)

USUAL_CALL = CallOptions()

#: Options of `batched` that are arguments of `Collator`.
COLLATOR_OPTIONS = ("pad", "mask", "trim")

#: Instances get their batchers one by one: their first calls may come from several threads.
_binding = threading.Lock()


class BatchedCall:
    """A batch function that is called with single items, or lists of items, from anywhere.

    Calls wait together and run in batches, on one thread. Each gets its own result.
    """

    def __init__(
        self, thread: BatcherThread, owner: Any = None, call_options: CallOptions = USUAL_CALL
    ) -> None:
        self._thread = thread
        self._owner = owner
        self._call_options = call_options

    def __call__(self, item: Any, /, **keywords: Any) -> Any:
        """The result of one item; of a list of items, the list of results.

        Args:
            item: What the function gets in its list. A list counts as many items: an item that is
                a list goes through `submit`.
            keywords: For the function. Only calls with equal keywords share a batch.

        Raises:
            NoResult: None came within `timeout_s`.
            QueueFull: `max_waiting` items wait already, and callers are refused.
            BatcherClosed: It is closed, or belongs to the parent of this process.
            Exception: What the function raised, or answered as `Failed`, for this item.
        """
        call = self._make(ThreadCall, item, isinstance(item, list), keywords)
        if call is None:
            return []
        timeout_s = self._call_options.timeout_s
        if not send_and_wait(self._thread, call, timeout_s):
            raise self._no_result()
        return call.result()

    async def acall(self, item: Any, /, **keywords: Any) -> Any:
        """The same for coroutines, on any event loop. A cancelled call is dropped.

        Raises:
            NoResult: None came within `timeout_s`.
            QueueFull: `max_waiting` items wait already, and callers are refused.
            BatcherClosed: It is closed, or belongs to the parent of this process.
            Exception: What the function raised, or answered as `Failed`, for this item.
        """
        call = self._make(LoopCall, item, isinstance(item, list), keywords)
        if call is None:
            return []
        if self._call_options.timeout_s is None:
            await send_and_await(self._thread, call)
            return call.result()
        try:
            async with asyncio.timeout(self._call_options.timeout_s):
                await send_and_await(self._thread, call)
        except TimeoutError:
            raise self._no_result() from None
        return call.result()

    def submit(self, item: Any, /, **keywords: Any) -> "Future[Any]":
        """The future result of one item. If it is cancelled before its batch, it never runs.

        Raises:
            NoResult: There was no space within `timeout_s`.
            QueueFull: `max_waiting` items wait already, and callers are refused.
            BatcherClosed: It is closed, or belongs to the parent of this process.
        """
        call = self._make(FutureCall, item, False, keywords)
        assert call is not None
        thread, timeout_s = self._thread, self._call_options.timeout_s
        if not thread.has_space(1) and not thread.wait_for_space(1, timeout_s):
            raise self._no_result()
        thread.send(call)
        return call.future

    def options(self, **options: Any) -> "BatchedCall":
        """The same function, called with other options: those of `CallOptions`.

        Raises:
            BatchArgumentError: There is no such option, or its value is impossible.
        """
        try:
            chosen = replace(self._call_options, **options)
        except TypeError:
            known = ", ".join(CallOptions.__dataclass_fields__)
            raise BatchArgumentError(
                f"{self._thread.name}.options({', '.join(options)}): there are {known}"
            ) from None
        chosen.check(self._thread.options.classes)
        return BatchedCall(self._thread, self._owner, chosen)

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

    def _make(self, kind: type[C], item: Any, many: bool, keywords: Mapping[str, Any]) -> C | None:
        """A call that is ready to be sent; None if it has no items."""
        thread, wanted = self._thread, self._call_options
        thread.check()
        items = item if many else (item,)
        if not items:
            return None
        key = spell(thread.name, keywords) if keywords else ""
        call = kind(items, many, self._owner, keywords, key)
        options = thread.options
        if options.length is not None:
            call.lengths = [options.length(each) for each in items]
        if wanted is not USUAL_CALL or options.small_batch_threshold is not None:
            call.lane = lane_of(
                wanted.priority_class or thread.usual_lane.priority_class,
                wanted.tenant,
                len(items),
                options.small_batch_threshold,
            )
            call.deadline_s = deadline_of(monotonic(), wanted.deadline_s)
            call.returns_exceptions = wanted.return_exceptions
        else:
            call.lane = thread.usual_lane
        return call

    def _no_result(self) -> NoResult:
        return NoResult(
            f"{self._thread.name}: no result within {self._call_options.timeout_s:g} s;"
            " what has not begun is dropped"
        )


class BatchedFunction(BatchedCall):
    """A function with a batcher, or a method with one batcher per instance; made by `batched`."""

    def __init__(
        self, function: Callable[..., Any], options: BatcherOptions, collator: Collator | None
    ) -> None:
        #: The bare function: takes a list, returns a list. It becomes a Celery task by
        #: `app.task(base=BatchTask)(embed.function)`.
        self.function = function
        self._options = options
        self._collator = collator
        #: The name of its batcher in the instances of its class.
        self._slot = f"_batcher_of_{getattr(function, '__name__', 'function')}"
        super().__init__(_thread_of(self, function, options, collator))
        functools.update_wrapper(self, function)

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_batcher_of_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> BatchedCall:
        if instance is None:
            return self
        held = vars(instance).get(self._slot)
        # A copy of an object has all that the object has, and needs a batcher of its own.
        if held is None or held.owner() is not instance:
            held = self._bind(instance)
        return BatchedCall(held.thread, instance)

    def __set__(self, instance: Any, value: Any) -> None:
        # With this method, Python looks here first, and not into the instance.
        raise AttributeError(f"{self._thread.name} is a batched method")

    def _bind(self, instance: Any) -> "_Held":
        held: _Held | None
        with _binding:
            held = vars(instance).get(self._slot)
            if held is None or held.owner() is not instance:
                thread = _thread_of(instance, self.function, self._options, self._collator)
                held = vars(instance)[self._slot] = _Held(weakref.ref(instance), thread)
        return held


class _Held:
    """The batcher that an instance holds; it goes with the instance."""

    __slots__ = ("owner", "thread")

    def __init__(self, owner: "weakref.ref[Any]", thread: BatcherThread) -> None:
        self.owner = owner
        self.thread = thread

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled or copied deeply, an instance goes without; it gets one at its first call.
        return type(None), ()


class Batcher(BatchedCall):
    """A batcher with a state of its own: subclass it, and define `infer`.

    ```python
    class Embedder(Batcher):
        def load(self):
            self.model = SentenceTransformer("all-MiniLM-L6-v2")

        def infer(self, texts):
            return list(self.model.encode(texts))

    with Embedder(max_batch_size=32) as embed:
        embed("a text")
    ```
    """

    def __init__(self, **options: Any) -> None:
        """Loads nothing before the first call.

        Args:
            options: Those of `batched`.

        Raises:
            BatchArgumentError: There is no such option, or its value is impossible.
        """
        name = type(self).__name__
        chosen, collator = _chosen(name, options)
        thread = _thread_of(self, type(self).infer, chosen, collator, name=name)
        super().__init__(thread, self)
        # The thread must not keep the batcher alive, and there is a call whenever it loads.
        myself = weakref.ref(self)
        thread.load = lambda: _load(myself())

    def load(self) -> None:
        """Called once before the first batch, on the thread of the batches."""

    def infer(self, items: Any, /, **keywords: Any) -> Any:
        """Computes one batch; plain or `async def`. One outcome per item, in order."""
        raise NotImplementedError(f"{type(self).__name__} needs infer(self, items)")


def _load(batcher: Batcher | None) -> None:
    if batcher is not None:
        batcher.load()


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
        options: Those of `BatcherOptions`; and, for items that are dicts of arrays, `pad`, `mask`
            and `trim`, which are the arguments of `Collator`.

    Raises:
        BatchArgumentError: What is decorated is no function; there is no such option, or its value
            is impossible.
    """
    if function is None:
        _chosen("batched", options)  # A wrong option is found where it was written.
        return functools.partial(_decorate, options)
    return _decorate(options, function)


def _decorate(options: Mapping[str, Any], function: Any) -> BatchedFunction:
    if isinstance(function, staticmethod | classmethod):
        function = function.__func__
    if not callable(function) or isinstance(function, type):
        raise BatchArgumentError(f"batched({function!r:.80}): decorate a function or a method")
    chosen, collator = _chosen(_name_of(function), options)
    return BatchedFunction(function, chosen, collator)


def _chosen(name: str, options: Mapping[str, Any]) -> tuple[BatcherOptions, Collator | None]:
    """The options of a batcher, and what makes arrays of its items."""
    own = {each: options[each] for each in options if each not in COLLATOR_OPTIONS}
    arrays = {each: options[each] for each in options if each in COLLATOR_OPTIONS}
    collator = Collator(**arrays) if arrays else None
    if collator is not None:
        own.setdefault("length", collator.length)
    try:
        return BatcherOptions(**own), collator
    except TypeError:
        known = ", ".join([*BatcherOptions.__dataclass_fields__, *COLLATOR_OPTIONS])
        raise BatchArgumentError(f"{name}: options {', '.join(own)}: there are {known}") from None


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def _thread_of(
    anchor: Any,
    function: Callable[..., Any],
    options: BatcherOptions,
    collator: Collator | None,
    name: str = "",
) -> BatcherThread:
    """A batcher that ends with its anchor."""
    loop = BatchLoop(function, name or _name_of(function), options, collator)
    thread = BatcherThread(loop, options)
    try:
        end = weakref.finalize(anchor, thread.close, wait=False)
    except TypeError:
        raise BatchArgumentError(
            f"{thread.name}: instances of {type(anchor).__name__} have no weak references;"
            ' add "__weakref__" to its __slots__'
        ) from None
    end.atexit = False  # There all of them are drained.
    return thread

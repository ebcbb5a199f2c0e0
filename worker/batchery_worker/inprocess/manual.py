"""A batcher that a test turns by hand, on a clock that only the test moves."""

from collections.abc import Callable
from typing import Any

from batchery.errors import BatchArgumentError
from batchery_worker.inprocess.batch_loop import BatchLoop
from batchery_worker.inprocess.batcher import BatchedCall, Batcher, choose, describe_function
from batchery_worker.inprocess.batcher_thread import BatcherThread
from batchery_worker.inprocess.calls import Call, FutureCall


class ManualBatcher(BatchedCall[Any, Any]):
    """A batch function without a thread: its batches run when the test moves the clock.

    Jobs of `submit` wait for `advance`. Direct calls move the clock as far as they must, and so do
    calls that wait for space.

    Attributes:
        batches: The items of each call of the function so far.
        now_s: The time, in seconds; 0 at first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        takes_s: Callable[[int], float] = lambda _: 0.0,
        **options: Any,
    ) -> None:
        """Has no calls.

        Args:
            function: A batch function, or what `batched` made of one, or a `Batcher`; then its
                options count, too.
            takes_s: How long a call of the function takes on the clock, in seconds, given its
                number of items.
            options: Those of `batched`.

        Raises:
            BatchArgumentError: There is no such option, or its value is impossible.
        """
        name = describe_function(function)
        if isinstance(function, BatchedCall):
            if isinstance(function, Batcher):
                function.load()
            name, function, given = function.unwrapped()
            options = {**given, **options}
        self.batches: list[Any] = []
        self.now_s = 0.0

        def run(items: Any, **keywords: Any) -> Any:
            # Features of arrays are one dict, of as many items as each of them has.
            count = len(next(iter(items.values()))) if isinstance(items, dict) else len(items)
            self.batches.append(items if isinstance(items, dict) else list(items))
            self.now_s += takes_s(count)
            return function(items, **keywords)

        chosen, collator = choose(name, options)
        self._loop = BatchLoop(run, name, chosen, collator, lambda: self.now_s)
        super().__init__(_ManualThread(self._loop, self))

    def advance(self, seconds: float) -> None:
        """Moves the clock on, and runs each batch at its time.

        Raises:
            BatchArgumentError: The time is below 0.
        """
        if seconds < 0:
            raise BatchArgumentError(f"advance({seconds!r}): time only goes on")
        end_s = self.now_s + seconds
        while True:
            while self._loop.turn():
                pass
            wake_s = self._loop.wake_s()
            if wake_s is None or wake_s > end_s:
                break
            self.now_s = max(self.now_s, wake_s)
        self.now_s = max(self.now_s, end_s)

    def close(self) -> None:
        """Takes no more calls, and answers those that are there."""
        while self._loop.turn(draining=True):
            pass
        super().close()

    def run_next(self) -> None:
        """Moves the clock to the next batch, and runs it; there must be one."""
        while not self._loop.turn():
            wake_s = self._loop.wake_s()
            assert wake_s is not None, "nothing waits"
            self.now_s = max(self.now_s, wake_s)


class _ManualThread(BatcherThread):
    """Stands where a batcher has its thread."""

    def __init__(self, loop: BatchLoop, batcher: ManualBatcher) -> None:
        super().__init__(loop)
        self._batcher = batcher

    def send(self, call: Call) -> None:
        call.sent_s = self._batcher.now_s
        self._loop.admit(call)
        if not isinstance(call, FutureCall):
            while call.left:
                self._batcher.run_next()

    def wait_for_space(self, items: int, timeout_s: float | None) -> bool:  # noqa: ARG002
        assert self._space is not None
        # Nobody else runs what takes the space.
        while not self._space.take(items):
            self._batcher.run_next()
        return True

    async def wait_for_space_async(self, items: int) -> None:
        self.wait_for_space(items, None)

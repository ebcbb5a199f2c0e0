"""When a batch asks Redis before it begins: Redis may be away, which is no fault of the batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchery_worker.ipc.messages import Reply, ResultsWait, Work


@contextmanager
def excused(work: Work, tell: Callable[[Reply], None], *, asks: bool) -> Iterator[None]:
    """Keeps the time in which Redis is asked out of the time of a batch.

    Args:
        work: The batch.
        tell: Sends a message to the parent.
        asks: Whether Redis may be asked for this batch.
    """
    if asks and work.is_timed:
        tell(ResultsWait(work.id))
    yield
    if asks and work.is_timed:
        tell(ResultsWait(work.id, is_over=True))

"""Runs batch functions on the main thread of a device process, in the context they expect."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from celery.fixups.django import DjangoFixup

from batchery.execution.batch import Receive, run_function
from batchery.outcomes import Failed, Partial
from batchery.request import BatchContext, JobContext, bind_request, shares
from batchery.task import BatchTask
from batchery_worker.batch import DeviceBatch
from batchery_worker.device.runner import Between, RunnerContext
from batchery_worker.work import Work

#: Headers that the function does not see: it has their values already, or has no use for them.
UNSEEN = {"args", "kwargs", "argsrepr", "kwargsrepr", "properties", "lang", "task"}


@contextmanager
def soft_time_limit(seconds: float | None) -> Iterator[None]:
    """Raises `SoftTimeLimitExceeded` in the block after so many seconds; None for no limit.

    On the main thread only, because Python handles signals there.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise SoftTimeLimitExceeded(seconds)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class EventLoop:
    """Runs the coroutines of `async def` tasks on one loop, which keeps their connections open."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end.

        Raises:
            SoftTimeLimitExceeded: The limit was reached. The loop and all that ran on it is gone.
        """
        try:
            return self._runner.run(coroutine)
        except SoftTimeLimitExceeded:
            # The exception interrupted the loop, whose tasks would otherwise go on next time.
            self.close()
            self._runner = asyncio.Runner()
            raise

    def close(self) -> None:
        """Ends the loop."""
        self._runner.close()


class FunctionRunner:
    """Runs batch functions; see `Runner`."""

    def __init__(self, context: RunnerContext) -> None:
        """There is nothing to load."""
        self._context = context

    def start(self) -> None:
        """Does nothing: the app is imported."""

    def choose(self, batch: DeviceBatch) -> str:  # noqa: ARG002 - as `Runner`, like the others
        """Results depend on the items alone, and on the version that the task names."""
        return ""

    def prepare(self, batch: DeviceBatch, items: list[Any]) -> Sequence[Any]:  # noqa: ARG002
        """Leaves the items as they are."""
        return items

    def make_ready(self, batch: DeviceBatch) -> bool:  # noqa: ARG002
        """Functions are always ready."""
        return False

    def may_interrupt(self, batch: DeviceBatch) -> bool:  # noqa: ARG002
        """Any function may run between two calls of another one."""
        return True

    def run(self, batch: DeviceBatch, items: list[Any], between: Between) -> list[Any]:
        """Calls the function of the batch's task."""
        context, work = self._context, batch.work
        # Of results that are cached or shared there are no pieces.
        is_streamed = work.pieces is not None and batch.deduped is None
        receive = context.pieces.receive(work) if is_streamed else drop_pieces
        outcomes = run_batch(
            *(batch.task, work, context.device, items),
            *(between.resolve, between.run_urgent, receive),
        )
        if Failed in map(type, outcomes):
            # As for models: where the context of the device is dead, this ends the process.
            context.memory.wait()
        return outcomes

    def start_ahead(self, batch: DeviceBatch) -> None:
        """Does nothing: a function is not begun before its turn."""

    def figures(self) -> dict[str, Any]:
        """There are none."""
        return {}


def drop_pieces(part: Sequence[int]) -> Callable[[Partial], None]:  # noqa: ARG001
    """Takes the partial results of jobs that nobody streams."""
    return lambda _: None


def run_batch(
    task: BatchTask,
    work: Work,
    device: str,
    items: Sequence[Any],
    resolve: Callable[[Any], Any],
    between_calls: Callable[[], None],
    receive: Receive = drop_pieces,
) -> list[Any]:
    """Runs the function of a task over the items of a batch; see `run_function`.

    A batch of more than `max_batch_size` items takes several calls. Before each one but the first
    `between_calls` is called, which may run something else first. Positions that `receive` gets are
    those in `items`.
    """
    outcomes: list[Any] = []
    for start in range(0, len(items), work.max_batch_size):
        if start:
            between_calls()
        part = items[start : start + work.max_batch_size]
        outcomes += run_function(
            task.run,
            part,
            work.keywords,
            resolve=resolve,
            around=partial(_around, task, work, device, start),
            receive=partial(_receive, receive, start),
            models=task.item_models,
        )
    return outcomes


def _receive(receive: Receive, start: int, part: Sequence[int]) -> Callable[[Partial], None]:
    return receive([start + position for position in part])


@contextmanager
def _around(
    task: BatchTask, work: Work, device: str, start: int, part: Sequence[int]
) -> Iterator[None]:
    view = _view(task, work, device, [start + position for position in part])
    # Django keeps its connections as long as between two web requests.
    database = _find_database(task.app)
    if database is not None:
        database.close_old_connections()
    try:
        # The limit comes last: it may be raised anywhere inside, and the stacks must be popped.
        with bind_request(task, view), soft_time_limit(work.soft_time_limit_s):
            yield
    finally:
        if database is not None:
            database.close_old_connections()


def _view(task: BatchTask, work: Work, device: str, part: Sequence[int]) -> BatchContext:
    """`self.request` of the call that is given a part of the batch's items."""
    if not task.sees_request:
        return BatchContext(partial(_unseen, task.name), device=device)

    parts = list(shares([len(items) for _, items, _ in work.jobs], part))

    def jobs() -> list[JobContext]:
        return [JobContext.of(decode_message(work, index), items) for index, items in parts]

    if len(parts) > 1:
        return BatchContext(jobs, device=device)
    made = jobs()
    return BatchContext(lambda: made, vars(made[0]), device=device)


def decode_message(work: Work, index: int) -> dict[str, Any]:
    """The headers of a job's message, with `args` and `kwargs` decoded, if the work has them."""
    _, carried, is_multi_item = work.jobs[index]
    argument = carried if is_multi_item else carried[0]
    known = {"task": work.task, "args": [argument], "kwargs": work.keywords}
    seen = {
        name: value
        for name, value in work.contexts[index].items()
        if value is not None and name not in UNSEEN
    }
    return known | seen


def _unseen(name: str) -> Sequence[JobContext]:
    raise AttributeError(
        f"{name} is not told of its jobs: declare it with bind=True, or as a class"
    )


def close_connections(app: Celery) -> None:
    """Closes this thread's connections to Django's databases."""
    database = _find_database(app)
    if database is not None:
        database.connections.close_all()


@lru_cache(maxsize=1)
def _find_database(app: Celery) -> Any:
    """The module `django.db`, where the app is that of a Django project; else None."""
    # That Django is imported says nothing: other libraries import it wherever it is installed.
    fixups: Any = getattr(app, "_fixups", ())
    is_django = any(isinstance(each, DjangoFixup) for each in fixups)
    return import_module("django.db") if is_django else None

"""The client for `asyncio`: `await task(item)`, thousands at once, on one connection each way."""

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, Self

from celery import Celery

from batchery.errors import NoResult, QueueFull, counted
from batchery.protocol.headers import deadline_header, with_tenant
from batchery.retry import AWAY_S
from batchery.task import check_options
from batchery_producer.answers import Outcome, check_per_job, read_outcomes
from batchery_producer.client import check_keywords, close_app, make_app
from batchery_producer.piece_stream import AsyncPieceStream
from batchery_producer.session import Session, Terms
from batchery_producer.stream import Window

#: What `AsyncClient.task` takes, besides options of `apply_async`.
OWN_OPTIONS = ("deadline_s", "keep_s", "max_waiting", "tenant", "timeout_s", "wait_s")

#: Items in flight.
WINDOW = 1024


class AsyncClient:
    """Calls tasks by name, from coroutines of one event loop."""

    def __init__(self, app: Celery | str) -> None:
        """Connects with the first call.

        Args:
            app: A Celery app, or the URL of a Redis that is broker and result backend. The app does
                not need to have the tasks.
        """
        self._owns_app = isinstance(app, str)
        self.app = make_app(app)
        self._session = Session(self.app)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def task(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        tenant: str | None = None,
        deadline_s: float | None = None,
        keep_s: int | None = None,
        **options: Any,
    ) -> "AsyncTask":
        """A task by name. Costs nothing: make one per call where the options differ.

        Args:
            name: Name of the task; of a model, its name in the settings.
            timeout_s: How long a call of one item waits, in seconds; None for ever. Its job expires
                with it, by the clocks of both machines: a worker that begins later drops it. Of a
                stream it is how long each piece may take, so its job does not expire.
            tenant: For whom the jobs run. Tenants of one priority class have equal shares of it.
            deadline_s: In how many seconds from the call each job should be answered. In its lane
                it goes before jobs that have more time.
            keep_s: How long the results of streams and their pieces are kept, in seconds; None for
                as long as the app keeps results. Those of calls that wait `timeout_s` for one item
                are kept two minutes longer than that.
            options: Options of `apply_async` for all jobs: `queue`, `priority`, `expires`,
                `headers`. By default jobs go where the app routes them, or to a queue of the task's
                name. Also `max_waiting` and `wait_s`, as for a `Publisher`. A call does not wait
                for space in the queue unless `wait_s` says so, as it would delay all others; `map`
                and `as_completed` wait for it, and delay none.

        Raises:
            InvalidItem: The tenant is no name.
            BatchArgumentError: The deadline is no number above 0, or there is no such option.
        """
        known = self.app.tasks.get(name)
        check_options(f"{name}: AsyncClient.task", options, known, OWN_OPTIONS)
        deadline_header(deadline_s)
        options = with_tenant(options, tenant)
        # No worker may be there to be told of a cancelled call.
        expires = {} if timeout_s is None else {"expires": timeout_s}
        # After that nobody asks for the result any more.
        call_s = None if timeout_s is None else math.ceil(timeout_s + AWAY_S)
        call = Terms(name, {"wait_s": 0, **expires, **options}, deadline_s, timeout_s, call_s)
        return AsyncTask(self._session, call, Terms(name, options, deadline_s), keep_s)

    def follow(
        self, job_id: str, after: str | None = None, *, timeout_s: float | None = None
    ) -> AsyncPieceStream:
        """The partial results of a job that was sent by `stream`; see `Client.follow`.

        Raises:
            BatchArgumentError: `after` is no such id.
            SettingsError: The app's result backend is no Redis.
        """
        self._session.check()
        reader = self._session.reader
        stream = AsyncPieceStream(reader, job_id, after=after, timeout_s=timeout_s)
        reader.follow(stream)
        asyncio.get_running_loop().run_in_executor(None, reader.wake)
        return stream

    def cancel(self, job_id: str) -> None:
        """Ends a job that was sent by `stream`, whoever reads it; must be called in the event loop.

        Nothing says whether it had ended before.
        """
        self._session.abandon(job_id)

    async def close(self) -> None:
        """Revokes jobs that no worker has begun, and those streamed; closes all connections.

        It takes no longer than about a second. While Redis hangs, nothing may be revoked.
        """
        await self._session.close()
        if self._owns_app:
            close_app(self.app)


class AsyncTask:
    """A task that coroutines call."""

    def __init__(
        self, session: Session, call: Terms, stream: Terms, keep_s: int | None = None
    ) -> None:
        self._session = session
        self._keep_s = keep_s
        self.name = call.task
        #: Of a call that waits, and of the jobs of `as_completed`.
        self._call, self._stream = call, stream

    async def __call__(self, item: Any, **keywords: Any) -> Any:
        """The result of one item. Cancelling the call revokes its job.

        Raises:
            NoResult: None came within `timeout_s`; or the client is closed, or a parent's.
            GaveUp: None came within `timeout_s`, as Redis does not answer.
            QueueFull: The queue had no space for the job.
            BatchArgumentError: The keywords are given as those of many jobs.
            Exception: What the worker raised, or why the job could not be sent.
        """
        check_keywords(self.name, keywords)
        (outcome,) = await self._outcomes([item], range(1), False, keywords, self._call)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def stream(self, item: Any, **keywords: Any) -> AsyncPieceStream:
        """Sends one job, whose partial results `async for` reads; then it has the `result`.

        The task's `timeout_s` is how long to wait for each of them. Must be called in the event
        loop.

        Raises:
            SettingsError: The app's result backend is no Redis.
            BatchArgumentError: The keywords are given as those of many jobs.
        """
        check_keywords(self.name, keywords)
        # No `expires`, which would end the job in the middle of its pieces.
        options = {"wait_s": 0, **self._stream.options}
        terms = self._call._replace(options=options, keep_s=self._keep_s)
        return self._session.stream(terms, item, keywords)

    async def outcomes(
        self, items: Sequence[Any], *, per_job: int = 1, keywords: Mapping[str, Any] | None = None
    ) -> list[Outcome]:
        """How each item ended, in order. All are sent at once; cancelling revokes their jobs.

        Args:
            items: A few; for many, `as_completed` keeps to a window.
            per_job: Number of items in one message, as in `TaskClient.as_completed`.
            keywords: Keyword arguments of all jobs.

        Raises:
            NoResult: Not all of them ended within `timeout_s`.
            GaveUp: Neither did they, as Redis does not answer.
            QueueFull: The queue had no space for one of the jobs; the others are revoked.
        """
        size, known = min(check_per_job(per_job), len(items)) or 1, keywords or {}
        starts = range(0, len(items), size)
        calls = [
            self._outcomes(
                list(items[start : start + size]),
                range(start, min(start + size, len(items))),
                size > 1,
                known,
                self._call,
            )
            for start in starts
        ]
        jobs = [asyncio.ensure_future(call) for call in calls]
        try:
            some = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        return [outcome for each in some for outcome in each]

    async def map(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = True,
        **settings: Any,
    ) -> AsyncGenerator[Any, None]:
        """Yields the result of each item; the arguments are those of `as_completed`.

        Raises:
            Exception: The error of the first item that failed; the others are revoked.
        """
        stream = self.as_completed(items, ordered=ordered, **settings)
        try:
            async for outcome in stream:
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.value
        finally:
            await stream.aclose()

    async def as_completed(
        self,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = False,
        keywords: Mapping[str, Any] | None = None,
        per_job: int | None = None,
        window: int = WINDOW,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Outcome, None]:
        """Yields an `Outcome` with the index of each item. A failed item does not stop the others.

        Args:
            items: Are read as the window has space for them; meanwhile no outcome is yielded.
            ordered: Whether outcomes come in the order of the items, or as they are done.
            keywords: Keyword arguments of all jobs.
            per_job: Number of items in one message, as in `TaskClient.as_completed`.
            window: Maximum number of items in flight.
            timeout_s: Give up when no result has come for so long, in seconds; by default never.

        Raises:
            NoResult: None came for `timeout_s`.
            GaveUp: None came for `timeout_s`, as Redis does not answer.
            BatchArgumentError: A number is out of range.
        """
        size = check_per_job(per_job)
        jobs = _arguments(items, size)
        running = Window[asyncio.Task[list[Outcome]], None, list[Outcome]](
            max(window // (size or 1), 1), ordered=ordered
        )
        ended: asyncio.Queue[asyncio.Task[list[Outcome]]] = asyncio.Queue()
        exhausted, start = False, 0
        try:
            while running or not exhausted:
                for _ in range(0 if exhausted else running.to_send):
                    argument = await anext(jobs, None)
                    if exhausted := argument is None:
                        break
                    indexes = range(start, start + len(argument))
                    start = indexes.stop
                    call = self._outcomes(argument, indexes, size > 0, keywords or {}, self._stream)
                    task = asyncio.create_task(call)
                    task.add_done_callback(ended.put_nowait)
                    running.add({task: None})
                    if not ended.empty():
                        break
                if running:
                    try:
                        async with asyncio.timeout(timeout_s):
                            done = await ended.get()
                    except TimeoutError:
                        self._session.check_redis(self.name, timeout_s)
                        raise NoResult(
                            f"{self.name}: no result for {timeout_s:g} s, of"
                            f" {counted(len(running), 'job')}; {self._session.hint(self._stream)}"
                        ) from None
                    for _, _, outcomes in running.end(done, done.result()):
                        for outcome in outcomes:
                            yield outcome
        finally:
            for task in running.in_flight:
                task.cancel()

    async def _outcomes(
        self,
        argument: list[Any],
        indexes: range,
        are_many: bool,
        keywords: Mapping[str, Any],
        terms: Terms,
    ) -> list[Outcome]:
        item, count = (argument, len(argument)) if are_many else (argument[0], 0)
        # Whoever gives no `wait_s` waits here, as the thread that sends would hold up all others.
        once = terms._replace(options={"wait_s": 0, **terms.options})
        while True:
            try:
                answer = await self._session.call(once, item, count, keywords)
                break
            except QueueFull as error:
                if "wait_s" in terms.options:
                    raise
                await asyncio.sleep(error.retry_after_s)
        return read_outcomes(answer, indexes, are_many, self._session.app.backend)


async def _arguments(
    items: Iterable[Any] | AsyncIterable[Any], per_job: int
) -> AsyncIterator[list[Any]]:
    """The items of each job."""
    some: list[Any] = []
    async for item in _each(items):
        some.append(item)
        if len(some) >= per_job:
            yield some
            some = []
    if some:
        yield some


async def _each(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item

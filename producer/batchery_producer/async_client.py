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
from contextlib import suppress
from functools import partial
from typing import Any, Self

from celery import Celery, uuid

from batchery.errors import GaveUp, NoResult
from batchery.protocol.headers import deadline_header, with_tenant
from batchery.retry import AWAY_S
from batchery.tracing import trace_headers
from batchery_producer.async_session import PendingSend, Session
from batchery_producer.client import close_app, make_app
from batchery_producer.publishing.template import OutgoingJob
from batchery_producer.results.answers import (
    Answer,
    Outcome,
    build_header,
    check_per_job,
    read_outcomes,
)
from batchery_producer.stream import Window

#: Items in flight.
WINDOW = 1024

#: How long cancelled calls are gathered before one message revokes them, in seconds.
GATHER_S = 0.02


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
        # The session has threads of its own.
        self._session = Session(
            self.app, partial(self._call_soon, self._settle), partial(self._call_soon, self._fail)
        )
        self._futures: dict[str, asyncio.Future[Answer]] = {}
        self._cancelled: list[str] = []
        self._calls: list[PendingSend] = []
        self._loop: asyncio.AbstractEventLoop | None = None

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
        **options: Any,
    ) -> "AsyncTask":
        """A task by name. Costs nothing: make one per call where the options differ.

        Args:
            name: Name of the task; of a model, its name in the settings.
            timeout_s: How long a call of one item waits, in seconds; None for ever. Its job expires
                with it, by the clocks of both machines: a worker that begins later drops it.
            tenant: For whom the jobs run. Tenants of one priority class have equal shares of it.
            deadline_s: In how many seconds from the call each job should be answered. In its lane
                it goes before jobs that have more time.
            options: Options of `apply_async` for all jobs: `queue`, `priority`, `expires`,
                `headers`. By default jobs go where the app routes them, or to a queue of the task's
                name. Also `max_waiting` and `wait_s`, as for a `Publisher`. A call does not wait
                for space in the queue unless `wait_s` says so, as it would delay all others.

        Raises:
            InvalidItem: The tenant is no name.
            BatchArgumentError: The deadline is no number above 0.
        """
        deadline_header(deadline_s)
        return AsyncTask(self, name, timeout_s, deadline_s, with_tenant(options, tenant))

    async def close(self) -> None:
        """Revokes jobs that no worker has begun, and closes all connections."""
        for future in list(self._futures.values()):
            future.cancel()
        await asyncio.to_thread(self._session.close)
        if self._owns_app:
            close_app(self.app)

    async def call(
        self,
        task: str,
        item: Any,
        count: int,
        keywords: Mapping[str, Any],
        options: Mapping[str, Any],
        deadline_s: float | None = None,
        keep_s: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Sends one job and waits for its end; a cancellation revokes the job.

        The item of a multi-item job is a list of `count` items; 0 means that it is one item. The
        result expires in `keep_s` seconds if this client does not fetch it.

        Raises:
            NoResult: The job did not end within `timeout_s`.
            GaveUp: Neither did it, and Redis is away.
        """
        loop = self._loop = asyncio.get_running_loop()
        task_id = uuid()
        future: asyncio.Future[Answer] = loop.create_future()
        self._futures[task_id] = future
        # The trace of this call, as jobs are sent from elsewhere.
        headers = {
            **trace_headers(),
            **deadline_header(deadline_s),
            **build_header(count, self._session.headers, keep_s),
        }
        if not self._calls:
            # Calls of the same turn of the event loop are sent together.
            loop.call_soon(self._flush)
        self._calls.append(
            PendingSend(task, keywords, options, headers, OutgoingJob(task_id, item))
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            self._cancel(task_id)
            self.check_redis(task, timeout_s)
            is_sent = self._session.has_sent(task_id)
            problem = "no result" if is_sent else "not sent"
            raise NoResult(
                f"{task}: {problem} within {timeout_s:g} s, so its job is"
                f" {'revoked' if is_sent else 'dropped'}; see `batchery stats`"
            ) from None
        except asyncio.CancelledError:
            self._cancel(task_id)
            raise
        finally:
            self._futures.pop(task_id, None)

    def check_redis(self, task: str, waited_s: float | None) -> None:
        """Checks that Redis answers, after a caller has waited in vain.

        Raises:
            GaveUp: It does not.
        """
        if self._session.is_away:
            raise GaveUp(
                f"{task}: nothing within {waited_s:g} s, as Redis does not answer;"
                " this program's log says why"
            ) from None

    def _flush(self) -> None:
        calls, self._calls = self._calls, []
        self._session.send([call for call in calls if call.job.id in self._futures])

    def _cancel(self, task_id: str) -> None:
        if not self._cancelled:
            asyncio.get_running_loop().call_later(GATHER_S, self._revoke)
        self._cancelled.append(task_id)

    def _revoke(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        self._session.revoke(cancelled)

    def _call_soon(self, function: Any, *args: Any) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # The event loop is closed, so no call waits.
            self._loop.call_soon_threadsafe(function, *args)

    def _settle(self, answers: Sequence[tuple[str, Answer]]) -> None:
        for task_id, answer in answers:
            future = self._futures.get(task_id)
            if future is not None and not future.done():
                future.set_result(answer)

    def _fail(self, task_ids: Sequence[str], error: Exception) -> None:
        for task_id in task_ids:
            future = self._futures.get(task_id)
            if future is not None and not future.done():
                future.set_exception(error)


class AsyncTask:
    """A task that coroutines call."""

    def __init__(
        self,
        client: AsyncClient,
        name: str,
        timeout_s: float | None,
        deadline_s: float | None,
        options: Mapping[str, Any],
    ) -> None:
        self._client = client
        self.name = name
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._options = dict(options)
        # No worker may be there to be told of a cancelled call.
        expires = {} if timeout_s is None else {"expires": timeout_s}
        self._call_options = {"wait_s": 0, **expires, **options}
        # After that nobody asks for the result any more.
        self._keep_s = None if timeout_s is None else math.ceil(timeout_s + AWAY_S)

    async def __call__(self, item: Any, **keywords: Any) -> Any:
        """The result of one item. Cancelling the call revokes its job.

        Raises:
            NoResult: None came within `timeout_s`.
            GaveUp: None came within `timeout_s`, as Redis does not answer.
            QueueFull: The queue had no space for the job.
            Exception: What the worker raised, or why the job could not be sent.
        """
        answer = await self._client.call(
            self.name,
            item,
            0,
            keywords,
            self._call_options,
            self._deadline_s,
            self._keep_s,
            self._timeout_s,
        )
        (outcome,) = read_outcomes(answer, range(1), False, self._client.app.backend)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

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
                self._call_options,
                self._keep_s,
                self._timeout_s,
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
            items: Are read as the window has space for them.
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
                    call = self._outcomes(
                        argument, indexes, size > 0, keywords or {}, self._options
                    )
                    task = asyncio.create_task(call)
                    task.add_done_callback(ended.put_nowait)
                    running.add({task: None})
                if running:
                    try:
                        async with asyncio.timeout(timeout_s):
                            done = await ended.get()
                    except TimeoutError:
                        self._client.check_redis(self.name, timeout_s)
                        raise NoResult(
                            f"no result for {timeout_s:g} s; see `celery inspect batchery`"
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
        options: Mapping[str, Any],
        keep_s: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Outcome]:
        item, count = (argument, len(argument)) if are_many else (argument[0], 0)
        answer = await self._client.call(
            self.name, item, count, keywords, options, self._deadline_s, keep_s, timeout_s
        )
        return read_outcomes(answer, indexes, are_many, self._client.app.backend)


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

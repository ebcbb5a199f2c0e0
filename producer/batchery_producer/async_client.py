"""The client for `asyncio`: `await task(item)`, thousands at once, on one connection each way."""

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from celery import Celery

from batchery.protocol.headers import deadline_header, with_tenant
from batchery.retry import AWAY_S
from batchery.task import check_options
from batchery_producer.answers import Outcome, check_per_job, read_outcomes
from batchery_producer.client import check_keywords, close_app, make_app
from batchery_producer.piece_stream import AsyncPieceStream
from batchery_producer.session import Session, Terms

#: What `AsyncClient.task` takes, besides options of `apply_async`.
OWN_OPTIONS = ("deadline_s", "keep_s", "tenant", "timeout_s", "wait_s")


class AsyncClient:
    """Calls tasks by name, from coroutines of one event loop."""

    def __init__(self, app: Celery | str) -> None:
        """Connects with the first call.

        Args:
            app: A Celery app, or the URL of a Redis that is broker and result backend. The app does
                not need to have the tasks. With the URL of a cluster, batch tasks can be called;
                jobs are revoked by the broker that CELERY_BROKER_URL names, or not at all.
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
                with it, by the clocks of both machines: a worker that begins later drops it.
            tenant: For whom the jobs run. Tenants of one priority class have equal shares of it.
            deadline_s: In how many seconds from the call each job should be answered. In its lane
                it goes before jobs that have more time.
            keep_s: How long the results of streams and their pieces are kept, in seconds; None for
                as long as the app keeps results. Those of calls that wait `timeout_s` for one item
                are kept two minutes longer than that.
            options: Options of `apply_async` for all jobs: `queue`, `priority`, `expires`,
                `headers`. By default jobs go where the app routes them, or to a queue of the task's
                name. Also `wait_s`, as for a `Publisher`. A call does not wait for space in the
                queue unless `wait_s` says so, as it would delay all others.

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
        return AsyncTask(self._session, call, Terms(name, options, deadline_s, keep_s=keep_s))

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
        threading.Thread(target=reader.wake, daemon=True).start()
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

    def __init__(self, session: Session, call: Terms, stream: Terms) -> None:
        """Prepares; a call that waits has other terms than a stream of items or of pieces."""
        self._session = session
        self.name = call.task
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
        (outcome,) = await self._outcomes([item], range(1), False, keywords)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def stream(
        self, item: Any, *, timeout_s: float | None = None, **keywords: Any
    ) -> AsyncPieceStream:
        """Sends one job, whose partial results `async for` reads; then it has the `result`.

        Must be called in the event loop.

        Args:
            item: The item.
            timeout_s: How long to wait for each partial result, in seconds; None for ever.
            keywords: Keyword arguments of the job.

        Raises:
            SettingsError: The app's result backend is no Redis.
            BatchArgumentError: The keywords are given as those of many jobs.
        """
        check_keywords(self.name, keywords)
        options = {"wait_s": 0, **self._stream.options}
        terms = self._stream._replace(options=options, timeout_s=timeout_s)
        return self._session.stream(terms, item, keywords)

    async def outcomes(
        self,
        items: Sequence[Any],
        *,
        per_job: int = 1,
        keywords: Mapping[str, Any] | None = None,
        keeps_base64: bool = False,
    ) -> list[Outcome]:
        """How each item ended, in order. All are sent at once; cancelling revokes their jobs.

        Args:
            items: A few; for many, a `Client` on a thread keeps to a window.
            per_job: Number of items in one message, as in `TaskClient.as_completed`.
            keywords: Keyword arguments of all jobs.
            keeps_base64: As in `TaskClient.as_completed`.

        Raises:
            NoResult: Not all of them ended within `timeout_s`.
            GaveUp: Neither did they, as Redis does not answer.
            QueueFull: The queue had no space for one of the jobs; the others are revoked.
        """
        size, count = min(check_per_job(per_job), len(items)) or 1, len(items)
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        calls = [
            self._outcomes(items, part, size > 1, keywords or {}, keeps_base64=keeps_base64)
            for part in parts
        ]
        jobs = [asyncio.ensure_future(call) for call in calls]
        try:
            some = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        return [outcome for each in some for outcome in each]

    async def _outcomes(
        self,
        items: Sequence[Any],
        part: range,
        is_multi_item: bool,
        keywords: Mapping[str, Any],
        *,
        keeps_base64: bool = False,
    ) -> list[Outcome]:
        some = [items[index] for index in part]
        item, count = (some, len(some)) if is_multi_item else (some[0], 0)
        answer = await self._session.call(self._call, item, count, keywords)
        backend = self._session.app.backend
        return read_outcomes(answer, part, is_multi_item, backend, keeps_base64=keeps_base64)

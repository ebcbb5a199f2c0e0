"""Texts that models write: whole, or piece by piece to callers who may come back for the rest."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from fastapi.sse import format_sse_event
from starlette.requests import Request

from batchery_producer.answers import Outcome
from batchery_producer.gateway.callers import check_copies
from batchery_producer.gateway.inference import (
    check_all,
    choose_task,
    read_timeout_s,
    run_outcomes,
    wait_gone,
)
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import (
    Kind,
    Problem,
    build_problem,
    choose_error_format,
    log_failure,
)
from batchery_producer.gateway.running import get_gateway
from batchery_producer.gateway.task_records import TaskRecord
from batchery_producer.openai_generation import count_chars

#: Kinds of models that write.
KINDS = ("generation",)

#: Header of a caller who comes back: the id of the last event that he has.
LAST_EVENT_HEADER = "last-event-id"

#: Ids of events: that of the job, and that of the piece.
EVENT_ID = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/([0-9]{1,15}-0)")


def check_prompts(request: Request, items: Sequence[Mapping[str, Any]], texts: int = 1) -> None:
    """Makes sure that a request is within its caller's limits; each text counts as an item.

    Raises:
        Problem: It is not.
    """
    chars = count_chars(items)
    request.state.caller.check(len(items) * texts, chars)
    check_copies(chars, request.state.body_bytes)


async def generate(request: Request, model: ServedModel, items: Sequence[Any]) -> list[Any]:
    """The result of each item, in order.

    Raises:
        Problem: One of them failed, or there are no results.
    """
    # Each is a job of its own: they end at different times.
    outcomes = check_all(await run_outcomes(request, model, items, {}, per_job=1))
    return [outcome.value for outcome in outcomes]


class PieceFeed:
    """The pieces of a job's text, for one caller.

    A caller who hangs up may come back with the id of its last event, so the job goes on for the
    time that the setting `stream_grace_s` says.

    Attributes:
        job_id: Id of the job, once it has begun.
    """

    def __init__(self, request: Request, model: ServedModel, item: Any) -> None:
        """Prepares to read on, or a job.

        Raises:
            Problem: Redis is away, no worker is there, or a header is wrong.
        """
        self._request, self._gateway, self._model = request, get_gateway(request), model
        stream_timeout_s = self._gateway.settings.gateway.stream_timeout_s
        self._timeout_s = read_timeout_s(request, stream_timeout_s)
        self._task, self._item = choose_task(request, model, is_stream=True), item
        self._gateway.health.absence.check(model.name, model.queue)
        last = request.headers.get(LAST_EVENT_HEADER)
        self._last = EVENT_ID.fullmatch(last) if last else None
        if last and self._last is None:
            raise Problem(
                Kind.INVALID,
                f"header Last-Event-ID is {last!r:.100}: expected the id of an event, or none",
            )
        self._first: Any = None

    @property
    def is_resumed(self) -> bool:
        """Whether the caller has the beginning."""
        return self._last is not None

    async def begin(self) -> None:
        """Waits for the first piece, so that until then errors have a status of their own.

        Raises:
            Problem: There is none, or the stream is not the caller's.
        """
        name = f"{self._request.url.path} {self._model.name}"
        caller, records = self._request.state.caller.name, self._gateway.stream_records
        if self._last is not None:
            await records.find(self._last[1], caller, name)
            self._stream = self._gateway.client.follow(self._last[1], after=self._last[2])
        else:
            self._stream = self._task.stream(self._item)
        self.job_id = self._stream.id
        self._gone = asyncio.ensure_future(wait_gone(self._request))
        self._gone.add_done_callback(self._give_up)
        try:
            async with self._gateway.health.absence.refusing(self._model.name, self._model.queue):
                self._first = await self._next(read_timeout_s(self._request))
            if self._first is None:
                # A job that has failed has an error in place of pieces.
                _ = self._stream.result
            if not self.is_resumed:
                # Before anybody learns the id.
                await records.add(TaskRecord(self.job_id, name, caller))
        except BaseException as error:
            # Nobody knows its id, so nobody can come back.
            self._stream.close()
            if not self._gone.cancel() and not self.is_resumed:
                # The stream has ended with that its caller has hung up, and its job has not.
                self._gateway.client.cancel(self.job_id)
            if isinstance(error, Exception):
                raise build_problem(error) from error
            raise

    async def pieces(self) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Each piece with the id of its event.

        Raises:
            Problem: There is no more, though the text has not ended.
        """
        while self._first is not None:
            piece, id_ = self._first, f"{self.job_id}/{self._stream.last_id}"
            yield id_, piece
            self._first = await self._next(self._timeout_s)

    def result(self) -> Any:
        """The result, after the last piece.

        Raises:
            Exception: Why there is none.
        """
        try:
            value = self._stream.result
        except Exception as error:
            self._gateway.measurements.results(self._model.name, [Outcome(0, error=error)])
            raise
        self._gateway.measurements.results(self._model.name, [Outcome(0, value)])
        return value

    def leave(self) -> None:
        """Reads no more; a job that has not ended has some time left."""
        self._gone.cancel()
        self._stream.leave()

    async def _next(self, timeout_s: float) -> Any:
        """The next piece; None if there are no more."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self._stream, None)
        except Exception as error:
            if self._stream.has_ended:
                return None  # `result` raises why the job failed, and counts it.
            if isinstance(error, TimeoutError):
                text = f"nothing new of the text within {timeout_s:g} s"
                raise Problem(Kind.TIMEOUT, text) from None
            raise

    def _give_up(self, gone: "asyncio.Future[Problem]") -> None:
        """Wakes whoever waits for a piece, as nobody waits for the answer."""
        if not gone.cancelled():
            self._stream.give([gone.result()])


def write_event(content: Any, id_: str | None = None, event: str | None = None) -> bytes:
    """A server-sent event."""
    return format_sse_event(data_str=orjson.dumps(content).decode(), id=id_, event=event)


def write_error(request: Request, error: Exception) -> bytes:
    """The event of an error, in the form of the route: the head of the answer is sent."""
    problem = build_problem(error)
    log_failure(request.scope, problem)
    form = choose_error_format(request.url.path)
    return write_event(form.body(problem, form.get_status(problem.kind)), event="error")

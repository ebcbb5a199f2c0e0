"""OpenAI's routes for texts: chats and prompts, whole, or as a stream that a caller may resume."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from batchery_producer.answers import Outcome
from batchery_producer.gateway.answers import (
    EVENTS_CONTENT,
    EventStream,
    json_response,
    off_loop,
    write_event,
)
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.inference import (
    check_all,
    check_ids,
    choose_task,
    read_timeout_s,
    run_outcomes,
    unless_gone,
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
from batchery_producer.gateway.store import TaskRecord
from batchery_producer.openai_generation import (
    CHAT_URL,
    FORMS,
    TEXT_URL,
    ChatCompletion,
    ChatRequest,
    CompletionRequest,
    Form,
    GenerationRequest,
    TextCompletion,
    build_completion,
    count_chars,
    count_usage,
    list_choices,
)

router = APIRouter(tags=["openai"], route_class=JsonRoute)

#: Kinds of models that write.
KINDS = ("generation",)

#: An answer with the logarithms of more tokens is made in a thread, as that takes milliseconds.
INLINE_TOKENS = 100

#: What the schema says of answers that come in pieces.
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer, or with `stream` an event for each piece of it.",
        "content": EVENTS_CONTENT,
    }
}


@router.post(CHAT_URL, response_model=ChatCompletion, responses=EVENTS)
async def complete_chat(request: Request, body: ChatRequest) -> Response:
    """The answer of a model in a conversation."""
    model = get_gateway(request).models.find(body.model, KINDS)
    return await _complete(request, model, body, CHAT_URL)


@router.post(TEXT_URL, response_model=TextCompletion, responses=EVENTS)
async def complete_text(request: Request, body: CompletionRequest) -> Response:
    """How a text goes on, or each of several."""
    model = get_gateway(request).models.find(body.model, KINDS)
    check_ids(model, body.model, "prompt", body.prompt)
    return await _complete(request, model, body, TEXT_URL)


#: Names of answers, which have the id of their job.
COMPLETION_ID = r"(?:chatcmpl|cmpl)-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"


class CompletionDeleted(TypedDict):
    """An answer that nobody waits for any more."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: bool


@router.delete(CHAT_URL + "/{completion_id}")
async def cancel_completion(request: Request, completion_id: str) -> CompletionDeleted:
    """Ends a stream of the caller at once, by the `id` of its events."""
    found = re.fullmatch(COMPLETION_ID, completion_id)
    if found is None:
        raise Problem(Kind.NOT_FOUND, f"completion {completion_id!r:.100}: no such answer")
    gateway = get_gateway(request)
    await gateway.stream_records.find(found[1], request.state.caller.name)
    gateway.client.cancel(found[1])
    return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}


async def _complete(
    request: Request, model: ServedModel, body: GenerationRequest, url: str
) -> Response:
    items = body.items()
    chars = count_chars(items)
    request.state.caller.check(len(items) * (body.n or 1), chars, request.state.body_bytes)
    if not body.stream:
        # Each is a job of its own: they end at different times.
        outcomes = check_all(await run_outcomes(request, model, items, {}, per_job=1))
        results = [outcome.value for outcome in outcomes]
        choices = [choice for result in results for choice in list_choices(result)]
        is_long = sum(len(each.get("logprobs") or ()) for each in choices) > INLINE_TOKENS
        write = partial(build_completion, url, str(uuid.uuid4()), model.name, results)
        caller = request.state.caller
        return await off_loop(caller, lambda: json_response(write()), is_long=is_long)
    if len(items) > 1:
        raise Problem(Kind.INVALID, "prompt: a stream has one prompt; send several", param="prompt")
    feed = PieceFeed(request, model, items[0])
    await feed.begin()
    events = _list_events(request, feed, model.name, body.wants_usage, url)
    return EventStream(events, feed.leave)


# Streams


#: Header of a caller who comes back: the id of the last event that he has.
LAST_EVENT_HEADER = "last-event-id"

#: Ids of events: that of the job, and that of the piece.
EVENT_ID = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/([0-9]{1,15}-0)")


class PieceFeed:
    """The pieces of a job's text, for one caller.

    A caller who hangs up may come back with the id of its last event, so the job goes on for the
    time that the setting `stream_grace_s` says.

    Attributes:
        job_id: Id of the job, once it has begun.
    """

    def __init__(
        self,
        request: Request,
        model: ServedModel,
        item: Any,
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares to read on, or a job.

        Args:
            request: Whose it is; its header may name where to read on.
            model: Of the job.
            item: Of the job; not used to read on.
            keywords: Of the job.

        Raises:
            Problem: Redis is away, no worker is there, or a header is wrong.
        """
        self._request, self._gateway, self._model = request, get_gateway(request), model
        stream_timeout_s = self._gateway.settings.gateway.stream_timeout_s
        self._timeout_s = read_timeout_s(request, stream_timeout_s)
        self._task = choose_task(request, model, is_stream=True)
        self._item, self._keywords = item, keywords or {}
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
            self._stream = self._task.stream(self._item, **self._keywords)
        self.job_id = self._stream.id
        try:
            first = self._next(read_timeout_s(self._request))
            self._first = await unless_gone(self._request, first)
            if self._first is None:
                # A job that has failed has an error in place of pieces.
                _ = self._stream.result
            if not self.is_resumed:
                # Before anybody learns the id.
                await records.add(TaskRecord(self.job_id, name, caller))
        except BaseException as error:
            # Nobody knows its id, so nobody can come back.
            self._stream.close()
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


async def _list_events(
    request: Request, feed: PieceFeed, model: str, wants_usage: bool, url: str
) -> AsyncIterator[bytes]:
    """The events of a stream, until its end or an error."""
    form: Form = FORMS[url]()
    head: dict[str, Any] = {
        "id": form.id_prefix + feed.job_id,
        "object": form.piece_object,
        "created": int(time.time()),
        "model": model,
        **({"usage": None} if wants_usage else {}),
    }
    opened: set[int] = set()
    ended: set[int] = set()
    try:
        async for id_, piece in feed.pieces():
            index = piece.get("choice", 0)
            if not (index in opened or feed.is_resumed):
                opened.add(index)
                for first in form.opening(index):
                    yield write_event({**head, "choices": [first]})
            yield write_event({**head, "choices": [form.piece(index, piece)]}, id_)
            if piece.get("finish_reason") and index not in ended:
                ended.add(index)
                yield write_event({**head, "choices": [form.ending(index, piece)]})
        result = feed.result()
        for index, choice in enumerate(list_choices(result)):
            if index not in ended:
                yield write_event({**head, "choices": [form.ending(index, choice)]})
        if wants_usage:
            yield write_event({**head, "choices": [], "usage": count_usage([result])})
        yield b"data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
        yield write_error(request, error)


def write_error(request: Request, error: Exception) -> bytes:
    """The event of an error, in the form of the route: the head of the answer is sent."""
    problem = build_problem(error)
    log_failure(request.scope, problem)
    form = choose_error_format(request.url.path)
    return write_event(form.body(problem, form.get_status(problem.kind)), event="error")

"""OpenAI's routes for texts: chats and prompts, whole or as a stream of events."""

import re
import time
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import json_response, off_loop
from batchery_producer.gateway.batches.requests import ALIAS_IDS, has_ids
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.event_stream import EVENTS_CONTENT, EventStream
from batchery_producer.gateway.generation import (
    KINDS,
    PieceFeed,
    check_prompts,
    generate,
    write_error,
    write_event,
)
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.running import get_gateway
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
    count_usage,
    list_choices,
)

router = APIRouter(tags=["openai"], route_class=JsonRoute)

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
    if has_ids(body.prompt) and not model.is_own_name(body.model):
        raise Problem(Kind.INVALID, ALIAS_IDS.format("prompt", body.model), param="prompt")
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
    check_prompts(request, items, body.n or 1)
    if not body.stream:
        results = await generate(request, model, items)
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

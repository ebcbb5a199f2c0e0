"""Routes of Text Generation Inference (TGI): `/generate` and `/generate_stream`."""

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import JsonRoute, ModelName
from batchery_producer.gateway.event_stream import EVENTS_CONTENT, EventStream
from batchery_producer.gateway.generation import (
    KINDS,
    PieceFeed,
    check_prompts,
    generate,
    write_error,
    write_event,
)
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody, Unserved

router = APIRouter(tags=["tgi"], route_class=JsonRoute)


class GenerateParameters(RequestBody):
    """How a text is made; as with TGI, the likeliest tokens are taken unless something says not."""

    do_sample: bool | None = None
    temperature: Annotated[float | None, Field(gt=0)] = None
    top_k: Annotated[int | None, Field(gt=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    max_new_tokens: Annotated[
        int | None, Field(ge=1, description="The model's `max_new_tokens` if missing.")
    ] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    seed: Annotated[int | None, Field(ge=0, lt=2**64)] = None
    stop: Annotated[list[str] | None, Field(max_length=16)] = None
    details: bool | None = None
    return_full_text: bool | None = None
    best_of: Annotated[Literal[1] | None, Field(description="More are not served.")] = None
    adapter_id: Unserved = None
    decoder_input_details: Unserved = None
    grammar: Unserved = None
    top_n_tokens: Unserved = None
    truncate: Unserved = None
    typical_p: Unserved = None
    watermark: Unserved = None

    def options(self, *, with_tokens: bool) -> dict[str, Any]:
        """Options of the item.

        Args:
            with_tokens: Whether the logarithm of each token's probability is wanted.
        """
        names = ("max_new_tokens", "top_k", "top_p", "repetition_penalty", "seed", "stop")
        found = {name: getattr(self, name) for name in (*names, "frequency_penalty")}
        draws = self.do_sample or self.top_k or self.top_p
        found["temperature"] = self.temperature or (1.0 if draws else 0.0)
        found["logprobs"] = 0 if with_tokens else None
        return {name: value for name, value in found.items() if value not in (None, [])}


class GenerateRequest(RequestBody):
    """A text that is to go on."""

    inputs: Annotated[str, Field(min_length=1, examples=["the cat"])]
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    model: Annotated[
        str | None, Field(description="Name or alias of a model; TGI itself has only one.")
    ] = None


class GenerateResponse(TypedDict):
    """How a text goes on."""

    generated_text: str
    details: Annotated[dict[str, Any] | None, Field(description="Tokens, and why it ended.")]


@router.post("/generate", response_model=GenerateResponse)
async def generate_text(
    request: Request, body: GenerateRequest, model: ModelName = None
) -> Response:
    """How a text goes on."""
    return json_response(await _generate(request, body, model))


@router.post(
    "/generate_stream",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "An event for each piece of the text.",
            "content": EVENTS_CONTENT,
        }
    },
)
async def generate_stream(
    request: Request, body: GenerateRequest, model: ModelName = None
) -> Response:
    """How a text goes on, piece by piece."""
    served = get_gateway(request).models.find(body.model or model, KINDS)
    parameters = body.parameters or GenerateParameters()
    item = {"prompt": body.inputs, "options": parameters.options(with_tokens=True)}
    check_prompts(request, [item])
    feed = PieceFeed(request, served, item)
    await feed.begin()
    return EventStream(_list_events(request, feed, body.inputs, parameters), feed.leave)


async def generate_as_root(request: Request, body: GenerateRequest, model: str | None) -> Response:
    """As `POST /` of TGI: a stream, or a list of one text."""
    if body.stream:
        return await generate_stream(request, body, model)
    return json_response([await _generate(request, body, model)])


async def _generate(request: Request, body: GenerateRequest, model: str | None) -> GenerateResponse:
    served = get_gateway(request).models.find(body.model or model, KINDS)
    parameters = body.parameters or GenerateParameters()
    with_tokens = bool(parameters.details)
    item = {"prompt": body.inputs, "options": parameters.options(with_tokens=with_tokens)}
    check_prompts(request, [item])
    (result,) = await generate(request, served, [item])
    details = {
        **_describe_end(result, parameters),
        "prefill": [],
        "tokens": [_describe_token(each) for each in result.get("logprobs") or ()],
    }
    before = body.inputs if parameters.return_full_text else ""
    return {
        "generated_text": before + result["text"],
        "details": details if with_tokens else None,
    }


async def _list_events(
    request: Request, feed: PieceFeed, prompt: str, parameters: GenerateParameters
) -> AsyncIterator[bytes]:
    """The events of a stream, until its end or an error."""
    index = 0
    nothing = {"generated_text": None, "details": None}
    try:
        async for id_, piece in feed.pieces():
            index += 1
            yield write_event({"index": index, "token": _join_tokens(piece), **nothing}, id_)
        result = feed.result()
        before = prompt if parameters.return_full_text else ""
        last = {"id": 0, "text": "", "logprob": 0.0, "special": True}
        yield write_event(
            {
                "index": index + 1,
                "token": last,
                "generated_text": before + result["text"],
                "details": {
                    **_describe_end(result, parameters),
                    "input_length": result["tokens_in"] or 0,
                },
            }
        )
    except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
        yield write_error(request, error)


def _describe_end(result: Mapping[str, Any], parameters: GenerateParameters) -> dict[str, Any]:
    return {
        # What made it stop, an end token or a stop sequence, is not known here.
        "finish_reason": "length" if result["finish_reason"] == "length" else "eos_token",
        "generated_tokens": result["tokens_out"] or 0,
        "seed": parameters.seed,
    }


def _describe_token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": token["id"] or 0,
        "text": token["token"],
        "logprob": token["logprob"],
        "special": False,
    }


def _join_tokens(piece: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens of a piece as one: its last one's id, and the probability of all of them."""
    return {
        "id": (piece.get("tokens") or [0])[-1],
        "text": piece["text"],
        "logprob": sum(each["logprob"] for each in piece.get("logprobs") or ()),
        "special": False,
    }

"""TEI's routes for tokens: `/tokenize` and `/decode`. They need no worker."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from batchery_producer.gateway.answers import off_loop
from batchery_producer.gateway.bodies import JsonRoute
from batchery_producer.gateway.models import ModelTokenizer, ServedModel
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.fields import ModelName, TokenId, expected
from batchery_producer.gateway.routes.shared import (
    check_growth,
    count_chars,
    read_items,
    resolve_model,
)
from batchery_producer.gateway.routes.tei_requests import TeiRequest

router = APIRouter(tags=["tei"], route_class=JsonRoute)

#: Work on more characters or tokens goes to a thread: it takes longer than to get there.
INLINE_CHARS = 2_000


class TokenizeRequest(TeiRequest):
    """Texts for `/tokenize`."""

    inputs: Annotated[
        str | list[str],
        expected("a text, or a list of texts"),
        Field(examples=["the cat", ["the cat", "a dog"]]),
    ]
    add_special_tokens: bool = True
    prompt_name: Annotated[
        str | None, Field(description="Name of a prompt to put in front of each text.")
    ] = None


class SimpleToken(BaseModel):
    """One token of a text."""

    id: Annotated[int, Field(ge=0)]
    text: Annotated[str, Field(description="As it stands in the text; the name of special ones.")]
    special: bool
    start: Annotated[
        int | None, Field(ge=0, description="Its first byte in the text's UTF-8, with the prompt.")
    ] = None
    stop: Annotated[int | None, Field(ge=0, description="The byte behind its last one.")] = None


class DecodeRequest(TeiRequest):
    """Token ids for `/decode`."""

    ids: Annotated[
        list[TokenId] | list[list[TokenId]],
        expected("a list of token ids, or a list of such"),
        Field(examples=[[101, 1996, 4937, 102]]),
    ]
    skip_special_tokens: bool = True


@router.post("/tokenize", response_model=list[list[SimpleToken]])
async def tokenize(request: Request, body: TokenizeRequest, model: ModelName = None) -> Response:
    """The tokens of each text, and where they stand."""
    served = resolve_model(request, body.model or model, None)
    texts = read_items(request, "inputs", body.inputs)
    chars = count_chars(texts)
    request.state.caller.check(len(texts), chars)
    _check_lengths(served, texts)
    tokenizer: ModelTokenizer = await request.app.state.gateway.tokenizers.of(served)
    prompt = tokenizer.prompt(body.prompt_name)
    chars += len(prompt) * len(texts)
    check_growth(chars)
    prompted = [prompt + text for text in texts]
    content = await off_loop(
        request.state.caller,
        lambda: tokenizer.tokens(prompted, special=body.add_special_tokens),
        is_long=chars > INLINE_CHARS,
    )
    return Response(content, media_type="application/json")


@router.post("/decode", response_model=list[str])
async def decode(request: Request, body: DecodeRequest, model: ModelName = None) -> Response:
    """The text of each list of token ids."""
    served = resolve_model(request, body.model or model, None)
    ids = read_items(request, "ids", body.ids)
    count = count_chars(ids)
    request.state.caller.check(len(ids), count)
    _check_lengths(served, ids)
    check_growth(count)
    tokenizer: ModelTokenizer = await request.app.state.gateway.tokenizers.of(served)
    content = await off_loop(
        request.state.caller,
        lambda: tokenizer.texts(ids, skip_special=body.skip_special_tokens),
        is_long=count > INLINE_CHARS,
    )
    return Response(content, media_type="application/json")


def _check_lengths(model: ServedModel, items: list[str] | list[list[int]]) -> None:
    """Holds texts to the model's limit, as its workers do.

    Raises:
        Problem: One is too long.
    """
    limit = model.settings.max_chars
    for index, item in enumerate(items):
        if len(item) > limit:
            raise Problem(
                Kind.INVALID, f"item {index}: its length {len(item)} is above max_chars = {limit}"
            )

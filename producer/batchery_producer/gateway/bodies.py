"""Bodies of JSON and forms: bounded before they are parsed; the first error ends one."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic_core import from_json
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.responses import Response

from batchery_producer.gateway.inference import read_timeout_s
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.request_fields import CONTAINER_VALUES, MAX_VALUES, count_values, expected

#: Bytes whose values are counted at a time, within a millisecond.
PIECE_BYTES = 1 << 16

#: Maximum fields of a body; no route has a tenth of them.
MAX_FIELDS = 100

#: How much longer than its results a request may take in all, in seconds.
SPARE_S = 2.0


class JsonRoute(APIRoute):
    """A route that takes JSON, in bounds, and answers in time."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What handles its requests."""
        handle = super().get_route_handler()

        async def handle_in_time(request: Request) -> Response:
            if self.body_field is not None:
                _check_type(request)
            timeout_s = read_timeout_s(request)
            try:
                async with asyncio.timeout(timeout_s + SPARE_S):
                    return await handle(_JsonRequest(request.scope, request.receive))
            except TimeoutError as error:
                raise Problem(Kind.TIMEOUT, f"no answer within {timeout_s:g} s") from error
            except HTTPException as error:
                # FastAPI hides whatever reading a body raises.
                if isinstance(error.__cause__, Problem):
                    raise error.__cause__ from None
                raise

        return handle_in_time


def _check_type(request: Request) -> None:
    """Makes sure that a body is JSON.

    Raises:
        Problem: Its header says that it is something else.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if not (kind == "application/json" or kind.endswith("+json")):
        raise Problem(
            Kind.NOT_JSON,
            f"the body's Content-Type is {given or 'missing'!r:.100}; send JSON, and the header"
            " 'Content-Type: application/json'",
        )


class _JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        self.state.body_bytes = len(body)
        found = await parse(body)
        model = self.query_params.get("model")
        # Bodies of OpenAI's API always name a model, if only as "dummy".
        if model and isinstance(found, dict) and self.url.path.startswith("/v1/"):
            found["model"] = model
        return found


async def parse(body: bytes) -> Any:
    """What a body of JSON says.

    Raises:
        Problem: It is no JSON, or has too much in it.
    """
    pieces = [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]
    for count in count_values(pieces):
        if count > MAX_VALUES:
            raise Problem(
                Kind.TOO_LARGE,
                f"the body has more than {MAX_VALUES} values, of which a list or an object counts"
                f" as {CONTAINER_VALUES}; send several requests",
            )
        if pieces[1:]:  # Others have their turn meanwhile.
            await asyncio.sleep(0)
    try:
        # It nests up to 200 deep, so whatever writes JSON later can write this.
        found = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(Kind.INVALID, f"the body is no JSON: {error}") from error
    if isinstance(found, dict) and len(found) > MAX_FIELDS:
        raise Problem(
            Kind.INVALID, f"the body has {len(found)} fields, more than any route: {MAX_FIELDS}"
        )
    return found


# Forms


#: Fields of a form, more than any route has; bytes of each but the file; and of all but the file.
MAX_FORM_FIELDS, FIELD_BYTES, FORM_BYTES = 50, 16_384, 1 << 20


@asynccontextmanager
async def open_form(request: Request) -> AsyncIterator[FormData]:
    """The fields of a form, one of which may be a file; it is gone at the end of the block.

    Not by FastAPI, which would hide why the guard refuses the rest of a body.

    Raises:
        Problem: It comes from a page of another origin, or has another charset.
        HTTPException: It is no form, or larger.
    """
    origin, about = request.headers.get("origin"), request.headers.get("content-type", "").lower()
    # A browser does not ask us first, as for JSON.
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise Problem(Kind.FORBIDDEN, f"pages of {origin!r:.100} may not send files")
    # Some charsets take the square of a length to decode, while the event loop stands still.
    if "charset" in about.partition(";")[2] and "utf-8" not in about:
        raise Problem(Kind.INVALID, "the form's charset must be utf-8; leave it out")
    limits = {"max_files": 1, "max_fields": MAX_FORM_FIELDS, "max_part_size": FIELD_BYTES}
    async with request.form(**limits) as form:
        yield form


# Fields that several APIs have


#: Maximum token id: that of every tokenizer is a signed number of 32 bits.
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

#: Name of a model in the query, for clients whose bodies have no place for it.
ModelName = Annotated[
    str | None,
    Query(description="Name or alias of a model; the first one that fits if missing."),
]


#: A text, a picture or a sound, as Jina has them.
MediaObject = Annotated[
    dict[Literal["text", "image", "audio"], str], Field(min_length=1, max_length=1)
]

#: The same as `Inputs`, or objects in the list.
MediaInputs = Annotated[
    str | list[TokenId] | list[str | list[TokenId] | MediaObject],
    expected("a text, a list of token ids, or a list of texts, token ids or media"),
    Field(examples=["the cat", ["the cat", "a dog"], [{"image": "https://shop.example/cat.jpg"}]]),
]

#: A text, token ids of the model's own tokenizer, or a list of either.
Inputs = Annotated[
    str | list[TokenId] | list[str | list[TokenId]],
    expected("a text, a list of token ids, or a list of either"),
    Field(
        description="A text, token ids of the model's own tokenizer, or a list of either.",
        examples=["the cat", ["the cat", "a dog"], [[101, 1996, 4937, 102], "a dog"]],
    ),
]

"""A web service in front of a model: requests that come together share a forward pass.

README.md says how to start it.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from batchery import AsyncClient, GaveUp, InvalidItem, NoResult, QueueFull
from batchery.app import app as queue


class Question(BaseModel):
    """What a caller sends."""

    text: str
    timeout_s: float = Field(30.0, gt=0, le=60)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Opens and closes the client: a few connections, however many requests there are."""
    async with AsyncClient(queue) as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/embed")
async def embed(question: Question, request: Request) -> Any:
    """Embeds one text: one job, which nobody computes if nobody waits for it any more."""
    # Where the settings limit its class, and that is full, callers are sent away at once, and told
    # when to come again.
    task = app.state.client.task("embed", timeout_s=question.timeout_s)
    try:
        return await unless_gone(request, task(question.text))
    except NoResult:
        raise HTTPException(504, f"no answer within {question.timeout_s:g} s") from None
    except GaveUp:
        raise HTTPException(503, "the queue is out of reach", {"Retry-After": "1"}) from None
    except QueueFull as error:
        after = {"Retry-After": str(math.ceil(error.retry_after_s))}
        raise HTTPException(503, "too many are waiting", after) from None
    except InvalidItem as error:
        raise HTTPException(422, str(error)) from None
    except Exception as error:  # noqa: BLE001 - whatever the worker has raised
        raise HTTPException(502, f"{type(error).__name__}: {error}") from None


async def unless_gone(request: Request, call: Awaitable[Any]) -> Any:
    """Awaits a call, and cancels it when its caller hangs up."""
    answer = asyncio.ensure_future(call)
    # The request was read to its end, so the next message says that the caller is gone.
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads the None of a caller who is gone.
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()

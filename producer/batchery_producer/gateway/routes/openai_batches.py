"""OpenAI's `/v1/batches`: the requests of a file, run when there is time."""

import re
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field, field_validator
from starlette.concurrency import run_in_threadpool

from batchery_producer.gateway.batches.files import ExpiresAfter, get_owner
from batchery_producer.gateway.batches.requests import ENDPOINTS
from batchery_producer.gateway.batches.store import (
    BATCH_ID,
    BatchObject,
    BatchRecord,
    Metadata,
    ObjectPage,
)
from batchery_producer.gateway.bodies import JsonRoute, RequestBody

router = APIRouter(tags=["openai"], route_class=JsonRoute)

#: Seconds of each unit of a completion window.
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

#: Maximum completion window, in seconds.
MAX_WINDOW_S = 30 * 86_400


class CreateBatchRequest(RequestBody):
    """What OpenAI's clients send; other fields are ignored, as there."""

    input_file_id: str
    endpoint: Annotated[str, Field(description=f"One of {', '.join(ENDPOINTS)}.")]
    completion_window: Annotated[
        str, Field(description="How much time the batch has: 24h, or another time as 90s, 5m, 7d.")
    ]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("endpoint")
    @classmethod
    def _is_served(cls, endpoint: str) -> str:
        if endpoint not in ENDPOINTS:
            raise ValueError(f"{endpoint!r:.100} is not served; use {', '.join(ENDPOINTS)}")
        return endpoint

    @field_validator("completion_window")
    @classmethod
    def _is_time(cls, window: str) -> str:
        if not re.fullmatch(r"[1-9][0-9]{0,6}[smhd]", window) or _seconds(window) > MAX_WINDOW_S:
            raise ValueError(f"{window!r:.40}: must be 24h, or another time up to 30d")
        return window

    @property
    def window_s(self) -> int:
        """How much time the batch has, in seconds."""
        return _seconds(self.completion_window)


@router.post("/v1/batches")
async def create_batch(request: Request, body: CreateBatchRequest) -> BatchObject:
    """Begins a batch: its file is read, then its requests run."""
    gateway, keep = request.app.state.gateway, body.output_expires_after
    create = partial(
        gateway.batches.create,
        request.state.caller,
        body.input_file_id,
        body.window_s,
        keep.seconds if keep else None,
        # A batch has time.
        max(each.level for each in gateway.settings.classes.values()),
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )
    made: BatchObject = await run_in_threadpool(create)
    return made


@router.get("/v1/batches")
async def list_batches(
    request: Request,
    after: Annotated[str | None, Query(pattern=f"^{BATCH_ID}$")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ObjectPage[BatchObject]:
    """The caller's batches, the newest first."""
    batches = request.app.state.gateway.batches
    found, has_more = await run_in_threadpool(
        batches.page, get_owner(request.state.caller), after, limit
    )
    return ObjectPage[BatchObject].of(found, has_more=has_more)


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> BatchObject:
    """A batch, as it is now."""
    batches, owner = request.app.state.gateway.batches, get_owner(request.state.caller)
    record: BatchRecord = await run_in_threadpool(batches.get, owner, batch_id)
    return record.batch


@router.post("/v1/batches/{batch_id}/cancel", responses={409: {"description": "It is too late."}})
async def cancel_batch(request: Request, batch_id: str) -> BatchObject:
    """Ends a batch; what is done by then is kept."""
    batches, owner = request.app.state.gateway.batches, get_owner(request.state.caller)
    found: BatchObject = await run_in_threadpool(batches.cancel, owner, batch_id)
    return found


def _seconds(window: str) -> int:
    return int(window[:-1]) * UNITS_S[window[-1]]

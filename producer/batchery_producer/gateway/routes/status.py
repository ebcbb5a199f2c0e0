"""`/status`: what workers and queues do now, as JSON; the page shows it."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from batchery_producer.gateway.monitoring.overview import ModelStatus, StatusResponse, overview

router = APIRouter(tags=["operations"])


@router.get("/status", response_model=StatusResponse)
async def status(request: Request) -> Response:
    """Figures of the last seconds; `problem` says why there are none."""
    gateway = request.app.state.gateway
    look = await gateway.monitor.latest()
    models = [
        ModelStatus(name=each.name, kind=each.kind, queue=each.queue, aliases=each.settings.aliases)
        for each in gateway.models
    ]
    found = overview(look.now, look.before, models, look.problem, look.age_s)
    return Response(
        found.model_dump_json(),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )

"""`/health`: for probes."""

from fastapi import APIRouter, Request
from starlette.responses import Response

router = APIRouter()


@router.get("/health", tags=["operations"], response_class=Response)
async def health(request: Request) -> Response:
    """Answers 200 while jobs can be sent, 503 while Redis is away."""
    request.app.state.gateway.health.check()
    return Response()

"""The application around the routes."""

import asyncio

import httpx2
from celery import Celery

from batchery.settings import Settings
from batchery_producer.gateway.app import make_app


def test_failure_of_the_gateway_itself_has_a_name_and_tells_nothing() -> None:
    # It has not started, so it has nothing that its routes need.
    web = make_app(Celery("none", set_as_current=False), Settings())

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(web, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/health", headers={"x-request-id": "order-7"})

    answer = asyncio.run(ask())
    # As TEI says it.
    assert answer.json()["error"] == "the gateway failed; its log says why"
    assert answer.status_code == 424
    assert answer.headers.get_list("x-request-id") == ["order-7"]

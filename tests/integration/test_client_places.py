"""The clients for many jobs, with a worker: Redis is behind TLS, a Sentinel, or two servers."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from batchery_producer import AsyncClient, Client
from batchery_producer.client import close_app
from support.bulk_runs import QUEUE
from support.harness import Worker
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S
from support.redis_places import MASTER, behind_sentinel, behind_tls, make_certificate

TASK = "apps.elsewhere.shout"
TEXTS = [f"text {number}" for number in range(300)]
SHOUTED = [text.upper() for text in TEXTS]


@pytest.fixture(scope="module", params=["tls", "sentinel", "two servers"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Celery]:
    """An app whose Redis is there, and a worker beside it."""
    folder = tmp_path_factory.mktemp("place")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(OwnRedis(folder / "redis", appendonly="no"))
        options: dict[str, str] = {}
        results = ""
        if request.param == "tls":
            url = stack.enter_context(behind_tls(server.port, make_certificate(folder)))
        elif request.param == "two servers":
            url = server.url
            results = stack.enter_context(OwnRedis(folder / "results", appendonly="no")).url
        else:
            url = stack.enter_context(behind_sentinel(folder / "sentinel", server.port))
            options = {"master_name": MASTER}
        results = results or url
        environment = {
            "MASTER": options.get("master_name", ""),
            "CELERY_RESULT_BACKEND": results,
        }
        worker = Worker(folder, url, "apps.elsewhere", env=environment)
        stack.callback(worker.kill)
        app = Celery("client", broker=url, backend=results, set_as_current=False)
        app.conf.update(broker_transport_options=options, result_backend_transport_options=options)
        stack.callback(close_app, app)
        worker.wait_ready()
        yield app


@pytest.mark.parametrize("per_job", [None, 64], ids=["single", "multi-item"])
def test_items_are_mapped(place: Celery, per_job: int | None) -> None:
    shout = Client(place).task(TASK, queue=QUEUE)
    assert list(shout.map(TEXTS, per_job=per_job, timeout_s=TIMEOUT_S)) == SHOUTED


def test_calls_are_awaited(place: Celery) -> None:
    async def scene() -> Any:
        async with AsyncClient(place) as client:
            shout = client.task(TASK, queue=QUEUE)
            return await asyncio.wait_for(asyncio.gather(*map(shout, TEXTS)), TIMEOUT_S)

    assert asyncio.run(scene()) == SHOUTED

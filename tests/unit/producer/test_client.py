"""What a client puts into a message, and what it refuses; the broker is in this process."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from batchery import BatchArgumentError
from batchery.protocol.headers import SENT_AT
from batchery_producer import AsyncClient, Client


@pytest.fixture
def app() -> Celery:
    return Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)


def test_a_lone_job_says_when_it_was_sent(app: Celery) -> None:
    before_s = time.time()
    Client(app).task("shop.shout", queue="sent", headers={"mine": 1}).delay("hello")
    with app.connection_for_read() as connection:
        headers: Any = connection.SimpleQueue("sent").get_nowait().headers
    assert before_s - 1 <= headers[SENT_AT] <= time.time() + 1
    assert headers["mine"] == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda app, **keywords: Client(app).task("shop.shout").delay("x", **keywords),
        lambda app, **keywords: Client(app).task("shop.shout").stream("x", **keywords),
        lambda app, **keywords: AsyncClient(app).task("shop.shout").stream("x", **keywords),
        lambda app, **keywords: asyncio.run(AsyncClient(app).task("shop.shout")("x", **keywords)),
    ],
    ids=["delay", "stream", "async stream", "async call"],
)
def test_keywords_of_many_jobs_are_refused_for_one(app: Celery, call: Callable[..., Any]) -> None:
    with pytest.raises(BatchArgumentError, match=r"shop.shout: .*as they are: mark='!'"):
        call(app, keywords={"mark": "!"})


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_uses_the_redis_it_was_given_whatever_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, kind: type[Client] | type[AsyncClient]
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://elsewhere:1/0")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://elsewhere:1/0")
    app = kind("redis://localhost:2/3").app
    brokers = [app.connection_for_read(), app.connection_for_write()]
    assert [(each.hostname, each.port) for each in brokers] == [("localhost", 2)] * 2
    assert app.backend.as_uri() == "redis://localhost:2/3"


def test_plain_keywords_are_refused_for_many(app: Celery) -> None:
    with pytest.raises(TypeError, match="mark"):
        list(Client(app).task("shop.shout").map(["x"], mark="!"))  # type: ignore[call-arg]

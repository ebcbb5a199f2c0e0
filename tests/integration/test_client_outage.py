"""Clients while Redis is away or hangs: their timeout bounds everything, and the error says it."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from celery import Celery
from kombu.exceptions import EncodeError
from redis.exceptions import ConnectionError as RedisConnectionError

from batchery import AsyncClient, BatchTask, Client, GaveUp, NoResult, install
from batchery.retry import AWAY_S
from support.harness import Worker, queue_length
from support.own_redis import OwnRedis
from support.patience import patient

TIMEOUT_S = 2.0

#: Far more than the timeout, and far less than the two minutes of a client without one.
SOON_S = min(patient(30.0), AWAY_S / 2)


@pytest.fixture
def hung_redis(own_redis: OwnRedis) -> Iterator[OwnRedis]:
    """A server that accepts connections and answers nothing."""
    with own_redis.hanging():
        yield own_redis


@pytest.mark.parametrize("how", ["down", "hung"])
def test_a_timeout_bounds_a_map_while_redis_is_away(
    how: str, own_redis: OwnRedis, request: pytest.FixtureRequest
) -> None:
    if how == "down":
        own_redis.kill()
    else:
        request.getfixturevalue("hung_redis")
    began_s = time.monotonic()
    with Client(own_redis.url) as client, pytest.raises(GaveUp):
        list(client.task("nobody").map(["a", "b"], timeout_s=TIMEOUT_S))
    assert time.monotonic() - began_s < SOON_S


def test_a_timeout_bounds_the_start_of_a_stream_while_redis_is_away(own_redis: OwnRedis) -> None:
    own_redis.kill()
    began_s = time.monotonic()
    with Client(own_redis.url) as client, pytest.raises(GaveUp):
        client.task("nobody").stream("a", timeout_s=TIMEOUT_S)
    assert time.monotonic() - began_s < SOON_S


def test_jobs_that_were_not_sent_are_not_revoked(
    redis_url: str, worker: Worker, client: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "batchery_producer.stream.uuids", lambda count: [f"unsent-{n}" for n in range(count)]
    )
    with Client(redis_url) as shop, pytest.raises(EncodeError):
        list(shop.task("nobody").map([object(), object()], timeout_s=60))
    # What the worker is asked for later comes after the revocation.
    assert not [each for each in worker.inspect(client, "revoked") if each.startswith("unsent-")]


@pytest.mark.parametrize("call", ["one", "outcomes"])
def test_an_async_call_says_that_redis_is_away(own_redis: OwnRedis, call: str) -> None:
    async def scene() -> None:
        async with AsyncClient(own_redis.url) as client:
            task = client.task("nobody", timeout_s=TIMEOUT_S)
            if call == "one":
                await task("item")
            else:
                await task.outcomes(["a", "b"])

    own_redis.kill()
    with pytest.raises(
        GaveUp, match=r"nobody: nothing within 2 s, as Redis does not|retried for 1 s"
    ):
        asyncio.run(asyncio.wait_for(scene(), SOON_S))


@pytest.mark.parametrize(
    ("timeout_s", "error", "text"),
    [
        (TIMEOUT_S, GaveUp, "nobody: nothing within 2 s, as Redis does not answer"),
        # A Redis that is busy for so long is not taken for one that is away.
        (0.3, NoResult, "nobody: not sent within 0.3 s, so its job is dropped: "),
    ],
)
def test_an_async_call_says_that_redis_hangs(
    hung_redis: OwnRedis,
    timeout_s: float,
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if timeout_s < TIMEOUT_S:
        # So that this process may stand still for longer than the one second that Redis has.
        monkeypatch.setattr("batchery.retry.MIN_COMMAND_S", patient(30))

    async def scene() -> None:
        async with AsyncClient(hung_redis.url) as client:
            await client.task("nobody", timeout_s=timeout_s)("item")

    with pytest.raises(error, match=text):
        asyncio.run(asyncio.wait_for(scene(), patient(90)))


def test_a_stream_says_within_its_timeout_that_redis_hangs(own_redis: OwnRedis) -> None:
    client = Client(own_redis.url)
    pieces = client.task("nobody").stream("item", timeout_s=TIMEOUT_S)
    with own_redis.hanging():
        began_s = time.monotonic()
        with client, pieces, pytest.raises(GaveUp, match="within 2 s, as Redis does not answer"):
            next(pieces)
        assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("how", ["call", "stream"])
def test_an_async_client_closes_soon_while_redis_hangs(own_redis: OwnRedis, how: str) -> None:
    async def scene() -> None:
        async with AsyncClient(own_redis.url) as client:
            task = client.task("nobody")
            waits = task.stream("item") if how == "stream" else asyncio.create_task(task("item"))
            while not await asyncio.to_thread(queue_length, own_redis.url, "nobody"):
                await asyncio.sleep(0.02)
            with own_redis.hanging():
                await client.close()
            del waits

    asyncio.run(asyncio.wait_for(scene(), SOON_S))


def test_joining_many_jobs_keeps_to_its_timeout_while_redis_is_away(
    own_redis: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery_producer.submit_many.SEND_AWAY_S", AWAY_S)
    app = install(Celery("away", broker=own_redis.url, backend=own_redis.url, set_as_current=False))

    @app.task(base=BatchTask, shared=False)
    def late(texts: list[str]) -> list[str]:
        return texts

    jobs = late.submit_many(["text"] * 100, queue="nobody")
    own_redis.kill()
    began_s = time.monotonic()
    with pytest.raises(RedisConnectionError):
        jobs.join(timeout=TIMEOUT_S)
    assert time.monotonic() - began_s < SOON_S

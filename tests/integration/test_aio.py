"""The client for asyncio: thousands of calls, few connections, cancellations that arrive."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from celery import Celery
from kombu.exceptions import EncodeError

from batchery import BrokerRefused, NoResult
from batchery_producer import AsyncClient
from support.harness import Worker, wait_for
from support.patience import patient

APP = "apps.shop"
QUEUE = "celery"


Scene = Callable[[Callable[[AsyncClient], Awaitable[Any]]], Any]


@pytest.fixture
def play(redis_url: str, worker: Worker) -> Scene:
    """Runs a scene with a client, on an event loop of its own."""

    def run(scene: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            async with AsyncClient(redis_url) as client:
                return await scene(client)

        return asyncio.run(asyncio.wait_for(whole(), patient(90)))

    return run


def test_thousands_at_once_take_few_connections_and_no_subscription(
    redis_url: str, worker: Worker, store: Any
) -> None:
    app = Celery("many", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.update(
        broker_transport_options={"client_name": "thousands"}, redis_client_name="thousands"
    )

    def connections() -> list[Any]:
        return [each for each in store.client_list() if each["name"] == "thousands"]

    async def scene() -> Any:
        async with AsyncClient(app) as client:
            shout = client.task(f"{APP}.shout", queue=QUEUE)
            found = await asyncio.gather(*(shout(f"text {number}") for number in range(3000)))
            held = connections()
            assert 0 < len(held) <= 6
            assert not any(int(each["sub"]) for each in held)
        return found

    assert asyncio.run(scene()) == [f"TEXT {number}" for number in range(3000)]
    wait_for(lambda: not connections(), "all connections are closed")
    app.close()


def test_cancelled_calls_are_revoked_and_at_the_end_all_others(
    play: Scene, worker: Worker, client: Celery, store: Any
) -> None:
    def revoked() -> set[str]:
        return set(worker.inspect(client, "revoked"))

    async def scene(client: AsyncClient) -> Any:
        nobody = client.task("nobody")
        calls = [asyncio.create_task(nobody(number)) for number in range(40)]
        while store.llen("nobody") < 40:
            await asyncio.sleep(0.01)
        waiting = [json.loads(raw)["headers"] for raw in store.lrange("nobody", 0, -1)]
        ids = {each["argsrepr"]: each["id"] for each in waiting}
        half = {ids[f"({number},)"] for number in range(0, 40, 2)}
        for call in calls[::2]:
            call.cancel()
        await asyncio.wait(calls[::2])
        await asyncio.to_thread(wait_for, lambda: half <= revoked(), "half of them are revoked")
        others = set(ids.values()) - half
        assert not others & revoked()
        return others

    others = play(scene)
    wait_for(lambda: others <= revoked(), "all are revoked in the end")
    store.delete("nobody")


def test_calls_are_revoked_though_the_event_loop_of_an_earlier_one_has_ended(
    redis_url: str, worker: Worker, client: Celery, store: Any
) -> None:
    aio = AsyncClient(redis_url)

    async def cancel_one() -> None:
        before = store.llen("nobody")
        call = asyncio.create_task(aio.task("nobody")("item"))
        while store.llen("nobody") == before:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])

    async def last_scene() -> None:
        await cancel_one()
        ids = {json.loads(raw)["headers"]["id"] for raw in store.lrange("nobody", 0, -1)}
        await asyncio.to_thread(
            wait_for, lambda: ids <= set(worker.inspect(client, "revoked")), "both are revoked"
        )
        await aio.close()

    asyncio.run(cancel_one())
    asyncio.run(last_scene())
    store.delete("nobody")


def test_a_closed_client_takes_no_calls(play: Scene) -> None:
    async def scene(client: AsyncClient) -> None:
        shout = client.task(f"{APP}.shout", queue=QUEUE)
        assert await shout("a") == "A"
        client.follow("nobody's").leave()
        await client.close()
        with pytest.raises(NoResult, match="closed"):
            await shout("b")
        with pytest.raises(NoResult, match="closed"):
            shout.stream("c")
        with pytest.raises(NoResult, match="closed"):
            client.follow("nobody's")

    play(scene)


def test_a_forked_process_is_told_that_it_has_no_threads(redis_url: str, worker: Worker) -> None:
    client = AsyncClient(redis_url)
    shout = client.task(f"{APP}.shout", queue=QUEUE)
    assert asyncio.run(shout("a")) == "A"
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            asyncio.run(asyncio.wait_for(shout("b"), patient(60)))
        except NoResult as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        assert said.read().endswith("used before a fork; make another one")
    asyncio.run(client.close())


def test_items_and_keywords_that_are_no_json_fail_alone(play: Scene) -> None:
    """Those whose keys cannot be sorted are JSON; nobody needs them sorted."""
    ring: list[Any] = []
    ring.append(ring)

    async def scene(client: AsyncClient) -> Any:
        shout = client.task(f"{APP}.shout", queue=QUEUE, timeout_s=patient(60))
        read_batch = client.task(f"{APP}.read_batch", queue=QUEUE, timeout_s=patient(60))
        odd = [shout("b", mark={(1, 2): 3}), shout("c", mark=ring), shout(object())]
        mixed = read_batch("d", tag={1: "e", "f": 2})
        found = await asyncio.gather(shout("a"), *odd, mixed, return_exceptions=True)
        return *found, await shout("later")

    first, *odd, mixed, later = play(scene)
    assert (first, later) == ("A", "LATER")
    assert [type(each) for each in odd] == [EncodeError] * 3
    assert mixed["tag"] == {"1": "e", "f": 2}


def test_a_queue_that_is_none_holds_up_no_other_call(play: Scene, store: Any) -> None:
    store.set("odd", "no list")

    async def scene(client: AsyncClient) -> Any:
        odd = asyncio.create_task(client.task("odd", timeout_s=patient(60))("item"))
        await asyncio.wait([odd], timeout=0.5)
        return await client.task(f"{APP}.shout", queue=QUEUE, timeout_s=patient(60))("a"), await odd

    with pytest.raises(BrokerRefused, match="not a queue"):
        play(scene)
    store.delete("odd")

"""Classes that can be full: jobs are refused where they are sent."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group, uuid
from kombu.exceptions import OperationalError

from batchery import AsyncClient, BatchTask, BrokerRefused, Client, QueueFull, install
from batchery_producer import Ending, Summary, submit_file
from support.harness import wait_for
from support.patience import patient

CLASSES = {
    "high": {"level": 0, "share": 5, "max_waiting": 3},
    "normal": {"level": 3, "share": 3, "max_waiting": 20},
    "low": {"level": 6, "share": 2},
}
NORMAL = "echo\x06\x163"


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    made = Celery("limited", broker=url, backend=url, set_as_current=False)
    install(made, classes=CLASSES)

    @made.task(shared=False, base=BatchTask, name="echo")
    def echo(items: list[Any]) -> list[Any]:
        return items

    yield made
    made.close()


@pytest.fixture
def echo(app: Celery) -> Any:
    return app.tasks["echo"]


def test_a_call_is_refused_while_its_class_is_full(echo: Any, bare: Any) -> None:
    """Of whatever tenant its jobs are."""
    echo.delay("of none")
    for tenant in ("acme", "bulk"):
        echo.apply_async(("its own",), tenant=tenant)
    with pytest.raises(QueueFull, match="class 'high' holds 3 jobs") as caught:
        echo.delay("one too many")
    assert caught.value.retry_after_s > 0
    # The other classes have room of their own.
    echo.apply_async(("other",), priority=4)
    assert (bare.llen("echo"), bare.llen(NORMAL)) == (1, 1)
    bare.rpop("echo")
    echo.delay("room again")
    assert bare.llen("echo") == 1


def test_jobs_of_workflows_have_room(app: Celery, echo: Any, bare: Any) -> None:
    for number in range(3):
        echo.delay(number)
    group(echo.s(number) for number in range(5)).apply_async()
    chain(echo.s("first"), echo.s()).apply_async()
    chord([echo.s("a"), echo.s("b")], echo.s()).apply_async()
    echo.signature(("again",)).apply_async(retries=1, parent_id=uuid())
    assert bare.llen("echo") == 3 + 5 + 1 + 2 + 1


def test_many_jobs_fill_a_class_to_the_last(echo: Any, bare: Any) -> None:
    echo.submit_many(range(1), tenant="acme")
    with pytest.raises(QueueFull, match="class 'high' holds 3 jobs") as caught:
        echo.submit_many(range(5))
    assert caught.value.sent == 2
    assert bare.llen("echo") == 2
    with pytest.raises(QueueFull) as caught:
        echo.submit_many(range(2))
    assert caught.value.sent == 0


def test_a_file_run_reads_results_while_its_jobs_wait_for_room(
    app: Celery, bare: Any, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("a\nb\nc\nd\ne\n")
    ended, stop = list[Summary](), threading.Event()

    def run() -> None:
        ended.append(submit_file(source, "echo", output, app=app, stop=stop.is_set))

    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    wait_for(lambda: bare.llen("echo") == 3, "the class is full")
    # No room is made.
    task_id = json.loads(bare.lindex("echo", -1))["headers"]["id"]
    result = {"status": "SUCCESS", "result": "A", "traceback": None, "task_id": task_id}
    bare.set(f"celery-task-meta-{task_id}", json.dumps(result))
    wait_for(lambda: output.read_text(), "the first result")
    stop.set()
    runner.join(patient(20))
    assert [(each.ending, each.succeeded) for each in ended] == [(Ending.INTERRUPTED, 1)]


def test_a_client_waits_for_room_as_long_as_it_waits_for_results(app: Celery, bare: Any) -> None:
    raised_s: list[float] = []
    limit_s = patient(4)

    def call() -> None:
        try:
            list(Client(app).task("echo").as_completed(range(5), timeout_s=limit_s))
        except QueueFull:
            raised_s.append(time.monotonic())

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    wait_for(lambda: bare.llen("echo") == 3, "the class is full")
    # The time begins anew with each item that finds room.
    time.sleep(0.4 * limit_s)
    began_s = time.monotonic()
    bare.rpop("echo")
    wait_for(lambda: bare.llen("echo") == 3, "the class is full again")
    caller.join(5 * limit_s)
    assert [each > began_s + 0.7 * limit_s for each in raised_s] == [True]


def test_a_coroutine_is_refused_at_once(app: Celery, bare: Any) -> None:
    async def scene() -> list[Any]:
        async with AsyncClient(app=app) as client:
            echo = client.task("echo")
            calls = [asyncio.create_task(echo(number)) for number in range(5)]
            return await asyncio.gather(*calls[3:], return_exceptions=True)

    refused = asyncio.run(asyncio.wait_for(scene(), patient(30)))
    assert [type(each) for each in refused] == [QueueFull, QueueFull]


def test_a_stream_that_is_refused_leaves_nothing_in_redis(
    app: Celery, echo: Any, bare: Any
) -> None:
    for number in range(3):
        echo.delay(number)
    with pytest.raises(QueueFull):
        echo.stream("one too many")
    assert not left_of_streams(bare)

    async def scene() -> None:
        async with AsyncClient(app=app) as client:
            refused = [client.task("echo").stream(number) for number in range(5)]
            for each in refused:
                with pytest.raises(QueueFull):
                    await anext(each)
            await asyncio.to_thread(wait_for, lambda: not left_of_streams(bare), "no keys are left")

    asyncio.run(asyncio.wait_for(scene(), patient(30)))


def left_of_streams(bare: Any) -> list[bytes]:
    """Keys of the jobs of streams."""
    found: list[bytes] = bare.keys("batchery-*")
    return [key for key in found if not key.startswith(b"batchery-wake:")]


def test_a_redis_that_is_away_is_told_as_soon_as_by_celery(app: Celery, echo: Any) -> None:
    # Celery's own four seconds are too short to tell.
    url = "redis://127.0.0.1:1/0"  # Nobody listens there.
    app.conf.update(broker_url=url, broker_connection_timeout=600)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            echo.apply_async(("item",), ignore_result=True)
        except OperationalError as error:
            raised.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(patient(60))
    assert len(raised) == 1


def test_a_user_who_may_not_count_is_told_so(app: Celery, echo: Any, bare: Any, url: str) -> None:
    bare.acl_setuser(
        "poor",
        enabled=True,
        nopass=True,
        keys=["*"],
        channels=["*"],
        commands=["+@all", "-evalsha"],
    )
    app.conf.update(broker_url=url.replace("redis://", "redis://poor:x@"))
    with pytest.raises(BrokerRefused, match=r"cannot be counted.*allow EVALSHA"):
        echo.delay(1)
    bare.acl_deluser("poor")

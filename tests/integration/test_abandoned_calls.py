"""Calls that were given up: no device computes for nobody, and their results do not stay."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord

from batchery import AsyncClient, NoResult
from conftest import StartWorker
from support.harness import queue_length, unsettled, wait_for
from support.patience import TIMEOUT_S, patient

TASK = "apps.tally.tally"
#: Seconds of a call in which it is surely sent.
SENT_S = int(patient(2))

#: Seconds that results are kept in these tests.
KEEP_S = 777


def test_calls_that_timed_out_without_a_worker_are_not_computed(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "computed")

    async def give_up() -> None:
        async with AsyncClient(redis_url) as client:
            tally = client.task(TASK, queue="celery", timeout_s=SENT_S)
            calls = (tally(f"late {number}", path=path) for number in range(300))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {NoResult}
            assert queue_length(redis_url) > 0

    async def ask() -> str:
        async with AsyncClient(redis_url) as client:
            answer: str = await client.task(TASK, queue="celery", timeout_s=TIMEOUT_S)(
                "in time", path=path
            )
            return answer

    asyncio.run(give_up())
    start_worker("apps.tally")
    assert asyncio.run(ask()) == "IN TIME"
    wait_for(lambda: queue_length(redis_url) + unsettled(redis_url) == 0, "all are settled")
    assert Path(path).read_text() == "in time\n"


def test_the_error_says_how_long_the_call_has_waited_and_why(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery_producer.session.EXPLAIN_S", patient(30))
    why = "1 waiting in queue 'nobody'; no worker answers"

    async def give_up() -> None:
        async with AsyncClient(redis_url) as client:
            task = client.task("nobody", timeout_s=SENT_S)
            with pytest.raises(
                NoResult, match=f"within {SENT_S} s, so its job is revoked: .*; {why}"
            ):
                await task("item")
            with pytest.raises(NoResult, match=f"nothing within {SENT_S} s: 2 waiting"):
                await anext(task.stream("item", timeout_s=SENT_S))

    asyncio.run(give_up())


def test_results_are_kept_as_long_as_their_jobs_say_whoever_stores_them(
    start_worker: StartWorker, client: Celery, store: Any
) -> None:
    headers = {"batchery": {"v": 1, "keep_s": KEEP_S}}

    def send(task: str, *args: Any, **options: Any) -> str:
        sent: str = client.send_task(
            f"apps.shop.{task}", args, **{"headers": headers, **options}
        ).id
        return sent

    def part(text: str) -> Any:
        return client.signature("apps.shop.shout", (text,), headers=headers)

    with_link = client.signature("apps.shop.shout", queue="celery")
    short = {
        "by its device": send("shout", "a"),
        "a failure, by the tracer": send("nasty", "raise"),
        "in one step with its callback": send("shout", "b", link=with_link),
        "of one that is refused": send("shout", "a", "b"),
        "of one that has expired": send("shout", "c", expires=0.01),
        "beside one that says nothing": send("shout", "d"),
    }
    plain = send("shout", "e", headers={})
    parts = chord([part("f"), part("g")], client.signature("apps.shop.total"))
    whole: Any = parts.apply_async()
    short |= {f"part {each.id} of a chord": each.id for each in whole.parent.results}
    start_worker("apps.shop")

    def left_s(task_id: str) -> int:
        client.AsyncResult(task_id).get(timeout=TIMEOUT_S, propagate=False)
        seconds: int = store.ttl(f"celery-task-meta-{task_id}")
        return seconds

    kept = {what: left_s(task_id) for what, task_id in short.items()}
    states = {what: str(client.AsyncResult(task_id).state) for what, task_id in short.items()}
    assert states["of one that has expired"] == "REVOKED"
    assert states["a failure, by the tracer"] == states["of one that is refused"] == "FAILURE"
    assert all(0 < seconds <= KEEP_S for seconds in kept.values()), kept
    assert left_s(plain) > KEEP_S


def test_only_results_of_calls_with_a_time_limit_are_of_no_use_later(
    redis_url: str, store: Any
) -> None:
    async def give_up() -> None:
        async with AsyncClient(redis_url) as client:
            with pytest.raises(NoResult):
                await client.task("nobody", queue="limited", timeout_s=SENT_S)("item")
            with pytest.raises(NoResult):
                await client.task("nobody", queue="limited", timeout_s=SENT_S).outcomes(["a", "b"])
            call = asyncio.ensure_future(client.task("nobody", queue="unlimited")("item"))
            while not store.llen("unlimited"):
                await asyncio.sleep(0.01)
            call.cancel()

    asyncio.run(give_up())
    messages = [json.loads(each)["headers"]["batchery"] for each in store.lrange("limited", 0, -1)]
    # Nobody waits for Redis longer than two minutes.
    assert [each.get("keep_s") for each in messages] == [120 + SENT_S] * 3
    assert "keep_s" not in json.loads(store.lindex("unlimited", 0))["headers"]["batchery"]


def test_result_of_a_cancelled_call_goes_when_it_comes(
    start_worker: StartWorker, client: Celery, redis_url: str, store: Any, tmp_path: Path
) -> None:
    worker = start_worker("apps.shop").wait_answers(client)
    gone, kept = tmp_path / "gone", tmp_path / "kept"

    def is_running() -> bool:
        (jobs,) = (client.control.inspect(timeout=5).active() or {"": []}).values()
        return len(jobs) == 1

    def sent() -> int:
        return queue_length(redis_url) + unsettled(redis_url)

    async def cancel_one() -> None:
        async with AsyncClient(redis_url) as calls:
            until = calls.task("apps.shop.until", queue="celery")
            first = asyncio.ensure_future(until(str(gone)))
            await asyncio.to_thread(wait_for, is_running, "the first runs")
            # Another one, so that the client still reads what is announced to it.
            second = asyncio.ensure_future(until(str(kept)))
            await asyncio.to_thread(wait_for, lambda: sent() == 2, "both")
            first.cancel()
            await asyncio.to_thread(
                wait_for, lambda: "flagged as revoked" in worker.log, "nobody awaits it"
            )
            gone.touch()
            await asyncio.to_thread(
                wait_for,
                lambda: re.search(r"until\[.*\] succeeded", worker.log),
                "its result is stored",
            )
            await asyncio.to_thread(
                wait_for, lambda: not store.keys("celery-task-meta-*"), "its result is gone"
            )
            kept.touch()
            assert await second == str(kept)

    asyncio.run(cancel_one())

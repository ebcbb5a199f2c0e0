"""Calls that were given up before a worker came: no device computes for nobody."""

import asyncio
from pathlib import Path

import pytest

from batchery import AsyncClient, NoResult
from conftest import StartWorker
from support.harness import queue_length, unsettled, wait_for

TASK = "apps.tally.tally"
TIMEOUT_S = 60


def test_calls_that_timed_out_without_a_worker_are_not_computed(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "computed")

    async def give_up() -> None:
        async with AsyncClient(redis_url) as client:
            tally = client.task(TASK, queue="celery", timeout_s=2)
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


def test_the_error_says_how_long_the_call_has_waited(redis_url: str) -> None:
    async def give_up() -> None:
        async with AsyncClient(redis_url) as client:
            await client.task("nobody", timeout_s=0.05)("item")

    with pytest.raises(NoResult, match=r"nobody: no result within 0\.05 s, so its job is revoked"):
        asyncio.run(give_up())

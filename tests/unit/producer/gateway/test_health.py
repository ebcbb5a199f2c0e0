"""Queues without workers, by what Redis says of the workers."""

import asyncio

import pytest

from batchery_producer.gateway.health import Absence
from batchery_producer.gateway.problems import Problem

GRACE_S = 10.0


def test_who_waits_is_refused_when_nobody_consumes_any_more() -> None:
    absence = Absence({"a", "b"}, GRACE_S)

    async def wait(queue: str) -> None:
        async with absence.refusing("embed", queue):
            await asyncio.Event().wait()

    async def main() -> None:
        waiting, other = asyncio.create_task(wait("a")), asyncio.create_task(wait("b"))
        await asyncio.sleep(0)
        absence.refuse({"a"})
        with pytest.raises(Problem, match="model 'embed': no worker has consumed its queue 'a'"):
            await waiting
        # Nor does anybody wait from now on.
        with pytest.raises(Problem):
            await wait("a")
        assert not other.done()
        absence.refuse(())
        later = asyncio.create_task(wait("a"))
        await asyncio.sleep(0)
        assert not later.done()
        for each in (other, later):
            each.cancel()

    asyncio.run(main())


def test_a_timeout_of_the_work_itself_stays_one() -> None:
    absence = Absence({"a"}, GRACE_S)

    async def main() -> None:
        async with absence.refusing("embed", "a"):
            raise TimeoutError

    with pytest.raises(TimeoutError):
        asyncio.run(main())

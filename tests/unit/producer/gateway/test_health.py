"""Queues without workers, by what Redis says of the workers."""

import asyncio

import pytest

from batchery.transport.live_workers import RegisteredWorker
from batchery_producer.gateway.health import MAX_GAP_S, Absence
from batchery_producer.gateway.problems import Problem

GRACE_S = 10.0


class Looks:
    """A look a second, at workers that all live, unless they are named as silent."""

    def __init__(self, *queues: str) -> None:
        self.absence = Absence(queues, GRACE_S)
        self.now_s = 1e6
        self._silent_s = 0.0

    def look(self, seconds: float, *, silent: bool = False, **workers: set[str] | None) -> set[str]:
        found: set[str] = set()
        for _ in range(int(seconds)):
            self.now_s += 1
            self._silent_s = self._silent_s + 1 if silent else 0.0
            there = [
                RegisteredWorker(5.0, queues, silent_s=self._silent_s)
                for queues in workers.values()
            ]
            found = self.absence.without_worker(there, self.now_s)
        return found


def test_queue_is_alone_only_after_the_grace() -> None:
    looks = Looks("a", "b")
    assert looks.look(GRACE_S) == set()
    assert looks.look(2) == {"a", "b"}
    assert looks.look(1, worker={"a", "x"}) == {"b"}
    assert looks.look(GRACE_S) == {"b"}
    assert looks.look(1) == {"a", "b"}


def test_worker_that_does_not_say_what_it_consumes_may_consume_all() -> None:
    looks = Looks("a")
    assert looks.look(3 * GRACE_S, older=None) == set()
    assert looks.look(3 * GRACE_S, older=None, other={"x"}) == set()
    assert looks.look(3 * GRACE_S, other={"x"}) == {"a"}


def test_silent_worker_counts_until_it_is_dead() -> None:
    looks = Looks("a")
    looks.look(3, worker={"a"})
    assert looks.look(GRACE_S + 4, silent=True, worker={"a"}) == set()
    assert looks.look(2, silent=True, worker={"a"}) == {"a"}


def test_nothing_is_known_of_a_time_without_looks() -> None:
    looks = Looks("a")
    assert looks.look(GRACE_S + 2) == {"a"}
    looks.now_s += MAX_GAP_S + 1
    assert looks.look(GRACE_S) == set()
    assert looks.look(2) == {"a"}


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

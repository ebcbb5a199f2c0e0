"""A storm of calls on one batcher: exactly one result for each, and nothing left behind.

Threads and coroutines call at once, with one item or a few. Some items fail, some calls are
cancelled, and some callers wait too short a time.

    python -m benchmarks.inprocess.storm --calls 1000000
"""

import argparse
import asyncio
import gc
import json
import random
import sys
import threading
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

from batchery import Failed, ItemFailed, NoResult, batched
from batchery_worker.inprocess.calls import Call

THREADS = 64
COROUTINES = 1_000

#: One in so many items raises, and one in so many is answered as failed.
RAISES_EACH, FAILS_EACH = 97, 89

#: Maximum number of items of a call.
MAX_ITEMS = 4

#: How long hurried callers wait, in seconds: about as long as an answer takes.
HURRY_S = 0.002


class Unlucky(Exception):
    """An item that raises."""


@dataclass
class Report:
    """What came of all calls.

    Attributes:
        calls: Calls that ended.
        ends: How they ended, by name.
        wrong: Calls that ended in a way that is not theirs.
        seconds: How long it took.
        threads_left: Threads of the batcher after it was closed.
        tasks_left: Tasks of the event loop.
        calls_left: Calls that are still in memory.
        stats: Of the batcher.
    """

    calls: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    seconds: float = 0.0
    threads_left: int = 0
    tasks_left: int = 0
    calls_left: int = 0
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether each call had its own end, and nothing is left."""
        left = self.threads_left + self.tasks_left + self.calls_left
        return not self.wrong and not left and sum(self.ends.values()) == self.calls


def compute(items: list[int]) -> list[Any]:
    """Doubles numbers; raises or fails for some."""
    if any(item % RAISES_EACH == 0 for item in items):
        raise Unlucky
    return [Failed("unlucky") if item % FAILS_EACH == 0 else 2 * item for item in items]


def expected(items: list[int], error: BaseException | None, value: Any) -> bool:
    """Whether a call of these items may have ended so."""
    bad: set[type[Exception]] = {Unlucky for item in items if item % RAISES_EACH == 0}
    bad |= {ItemFailed for item in items if item % FAILS_EACH == 0 and item % RAISES_EACH}
    if error is not None:
        return type(error) in bad
    return not bad and value == [2 * item for item in items]


def count_calls() -> int:
    """How many calls are in memory, of all batchers."""
    gc.collect()
    # Some objects warn, or do worse, if they are asked for their `__class__`.
    return sum(issubclass(type(each), Call) for each in gc.get_objects())


class Storm:
    """Calls of one batcher, from threads and coroutines."""

    def __init__(self, calls: int, seed: int) -> None:
        self._function = batched(compute, max_batch_size=64)
        self._left = calls
        self._seed = seed
        self._lock = threading.Lock()
        self.ends: Counter[str] = Counter()

    def run(self) -> Report:
        """Makes all calls, and closes the batcher."""
        before, calls_before = {each.ident for each in threading.enumerate()}, count_calls()
        began_s = monotonic()
        threads = [
            threading.Thread(
                target=self._call_from_thread, args=(random.Random(f"{self._seed} {n}"),)
            )
            for n in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        tasks_left = asyncio.run(self._call_from_coroutines())
        for thread in threads:
            thread.join()
        self._function.close()
        stats = asdict(self._function.stats)
        seconds = monotonic() - began_s
        left = {each.ident for each in threading.enumerate()} - before
        calls_left = max(0, count_calls() - calls_before)
        ends = dict(self.ends)
        wrong = ends.get("wrong", 0)
        return Report(
            sum(ends.values()), ends, wrong, seconds, len(left), tasks_left, calls_left, stats
        )

    def _next(self, chance: random.Random) -> list[int] | None:
        with self._lock:
            if not self._left:
                return None
            self._left -= 1
        return [chance.randrange(1, 1_000_000) for _ in range(chance.randint(1, MAX_ITEMS))]

    def _note(self, items: list[int], error: BaseException | None, value: Any) -> None:
        if isinstance(error, CancelledError | asyncio.CancelledError):
            end = "cancelled"
        elif isinstance(error, NoResult):
            end = "too late"
        elif not expected(items, error, value):
            end = "wrong"
        else:
            end = "failed" if error else "answered"
        with self._lock:
            self.ends[end] += 1

    def _call_from_thread(self, chance: random.Random) -> None:
        while (items := self._next(chance)) is not None:
            value, error = None, None
            try:
                value = self._one_of_thread(items, chance.random())
            except Exception as raised:  # noqa: BLE001 - it is what is measured
                error = raised
            self._note(items, error, value)

    def _one_of_thread(self, items: list[int], dice: float) -> list[int]:
        if dice < 0.1:
            return self._function.options(timeout_s=HURRY_S)(items)
        if dice < 0.3:
            future = self._function.submit_many(items)
            if dice < 0.2:
                future.cancel()
            return future.result()
        return self._function(items)

    async def _call_from_coroutines(self) -> int:
        callers = [
            asyncio.create_task(self._call_from_coroutine(random.Random(f"{self._seed} -{n}")))
            for n in range(COROUTINES)
        ]
        await asyncio.gather(*callers)
        return len(asyncio.all_tasks()) - 1

    async def _call_from_coroutine(self, chance: random.Random) -> None:
        while (items := self._next(chance)) is not None:
            value, error = None, None
            try:
                value = await self._one_of_coroutine(items, chance.random())
            except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - as above
                error = raised
            self._note(items, error, value)

    async def _one_of_coroutine(self, items: list[int], dice: float) -> list[int]:
        if dice < 0.1:
            return await self._function.options(timeout_s=HURRY_S).acall(items)
        if dice < 0.2:
            task = asyncio.ensure_future(self._function.acall(items))
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(asyncio.shield(task), HURRY_S * 10 * dice)
            task.cancel()
            return await task
        return await self._function.acall(items)


def main() -> int:
    """Runs one storm; prints its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report = Storm(given.calls, given.seed).run()
    print(json.dumps(asdict(report), indent=2))
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())

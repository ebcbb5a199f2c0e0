"""What all in-process batchers share: callers in a closed loop, and their answers checked.

Each caller sends its next item when it has its answer. Nothing but the standard library.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.inprocess_workloads import Workload, workload_of
from benchmarks.peers.text_peer import serve

THREADS, ASYNCIO = MODES = "threads", "asyncio"

#: Answers that each caller gets at least, however slow a system is.
ANSWERS = 2

#: Callers of the run that warms a system up: enough to fill a batch.
WARM_CALLERS = 64

#: An item, its answer, and how long that took, in seconds.
Call = tuple[Any, Any, float]


@dataclass(frozen=True, slots=True)
class Entrance:
    """How items get into a system; None where it has no such door."""

    call: Callable[[Any], Any] | None = None
    acall: Callable[[Any], Awaitable[Any]] | None = None


#: Starts a system, with batches of so many items, on the event loop of its coroutines.
Make = Callable[[Workload, int], Awaitable[Entrance]]


def main(systems: Mapping[str, Make]) -> None:
    """Answers runs on one of the systems of a script, by the name that the command line chooses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=list(systems), required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--model", help="folder of MiniLM")
    parser.add_argument("--texts", help="file with a JSON list of texts")
    parser.add_argument("--vectors", help="file with an array of their right vectors")
    parser.add_argument("--max-tokens", type=int)
    options = parser.parse_args()
    # Some batchers belong to the loop of their first call.
    loop = asyncio.new_event_loop()
    workload = workload_of(options.workload, options)
    entrance = loop.run_until_complete(systems[options.system](workload, options.batch_size))
    warm: set[str] = set()

    def run(mode: str, callers: int, seconds: float) -> tuple[list[Call], float]:
        items = [workload.items(number) for number in range(callers)]
        began_s = time.perf_counter()
        if mode == THREADS:
            calls = in_threads(entrance, items, began_s + seconds)
        else:
            calls = loop.run_until_complete(on_loop(entrance, items, began_s + seconds))
        return calls, time.perf_counter() - began_s

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        mode = request["mode"]
        if mode not in warm:
            warm.add(mode)
            for callers in (1, WARM_CALLERS):
                run(mode, callers, 0.0)
        calls, seconds = run(mode, request["callers"], request["seconds"])
        for item, given, _ in calls:
            if not workload.is_right(item, given):
                raise SystemExit(f"{options.system}: a wrong answer to {item!r}")
        taken_ms = sorted(taken_s * 1e3 for _, _, taken_s in calls)
        return {
            "items_per_s": len(calls) / seconds,
            "p50_ms": statistics.median(taken_ms),
            "p99_ms": taken_ms[len(taken_ms) * 99 // 100],
        }

    serve(answer)


def in_threads(entrance: Entrance, items: Sequence[Iterator[Any]], end_s: float) -> list[Call]:
    """The calls of one thread per caller, which go on until that time."""
    assert entrance.call is not None
    call = entrance.call

    def work(own: Iterator[Any]) -> list[Call]:
        calls: list[Call] = []
        for item in own:
            began_s = time.perf_counter()
            answer = call(item)
            ended_s = time.perf_counter()
            calls.append((item, answer, ended_s - began_s))
            if ended_s >= end_s and len(calls) >= ANSWERS:
                break
        return calls

    with ThreadPoolExecutor(len(items)) as threads:
        return [call for calls in threads.map(work, items) for call in calls]


async def on_loop(entrance: Entrance, items: Sequence[Iterator[Any]], end_s: float) -> list[Call]:
    """The same with one coroutine per caller, all on this event loop."""
    assert entrance.acall is not None
    acall = entrance.acall

    async def work(own: Iterator[Any]) -> list[Call]:
        calls: list[Call] = []
        for item in own:
            began_s = time.perf_counter()
            answer = await acall(item)
            ended_s = time.perf_counter()
            calls.append((item, answer, ended_s - began_s))
            if ended_s >= end_s and len(calls) >= ANSWERS:
                break
        return calls

    return [call for calls in await asyncio.gather(*map(work, items)) for call in calls]

"""What all in-process batchers share: callers in a closed loop, their answers checked, and idling.

Each caller sends its next item when it has its answer. Nothing but the standard library.
"""

import argparse
import asyncio
import os
import platform
import resource
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from benchmarks.peers.inprocess_workloads import Workload, workload_of
from benchmarks.peers.text_peer import serve

THREADS, ASYNCIO = "threads", "asyncio"

#: Longest wait for the callers' last answers, in seconds; then the system hangs.
PATIENCE_S = 120.0

#: Callers of the run that warms a system up: enough to fill a batch.
WARM_CALLERS = 64


@dataclass(frozen=True, slots=True)
class Entrance:
    """How items get into a system; None where it has no such door."""

    call: Callable[[Any], Any] | None = None
    acall: Callable[[Any], Awaitable[Any]] | None = None


#: Starts a system, with batches of so many items, on the event loop of its coroutines.
Make = Callable[[Workload, int], Awaitable[Entrance]]


@dataclass(slots=True)
class Tally:
    """The calls of one caller."""

    calls: list[tuple[Any, Any, float]] = field(default_factory=list)
    ended_s: float = 0.0
    error: str = ""


@dataclass(slots=True)
class Tallies:
    """The calls of all callers."""

    callers: Sequence[Tally]
    #: When the first could call, and the processor time of the process until then.
    began_s: float = field(default_factory=time.perf_counter)
    used_before_s: float = field(default_factory=time.process_time)
    #: Processor time until the last had its answer.
    used_s: float = 0.0

    def end(self) -> None:
        """Notes what the callers have used."""
        self.used_s = time.process_time() - self.used_before_s

    @property
    def seconds(self) -> float:
        """From the first call to the last answer."""
        return max(each.ended_s for each in self.callers) - self.began_s


@dataclass(frozen=True, slots=True)
class Plan:
    """How long callers go on: both must be reached."""

    callers: int
    seconds: float
    #: Answers of each caller.
    answers: int = 2


def main(package: str, systems: Mapping[str, Make]) -> None:
    """Serves requests on the systems of a script.

    Args:
        package: Whose version is told.
        systems: By the name that the command line chooses.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=list(systems), required=True)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--model", help="folder of MiniLM")
    parser.add_argument("--texts", help="file with a JSON list of texts")
    parser.add_argument("--vectors", help="file with an array of their right vectors")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    serve(Peer(systems[options.system], package, options).answer)


class Peer:
    """One system, with all its workloads, on one event loop."""

    def __init__(self, make: Make, package: str, options: argparse.Namespace) -> None:
        self._make = make
        self._package = package
        self._options = options
        # Some batchers belong to the loop of their first call.
        self._loop = asyncio.new_event_loop()
        self._ready: dict[str, tuple[Workload, Entrance]] = {}
        #: How long each call of a workload's function took, in seconds.
        self._inside_s: dict[str, list[float]] = {}

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answers one request: `load`, `warm_up`, `run` or `idle`."""
        try:
            answer: Mapping[str, Any] = getattr(self, request["do"])(request)
        except TimeoutError as error:
            # Threads that hang would keep the process alive.
            print(f"{self._options.system}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        return answer

    def load(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loads workloads, and starts the system for each."""
        for name in request["workloads"]:
            taken_s = self._inside_s[name] = []
            workload = timed(workload_of(name, self._options), taken_s)
            entrance = self._loop.run_until_complete(self._make(workload, self._options.batch_size))
            self._ready[name] = workload, entrance
        return self._versions()

    def warm_up(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        """Runs single items and full batches of everything that is loaded."""
        for name, (_workload, entrance) in self._ready.items():
            for mode in [THREADS] * bool(entrance.call) + [ASYNCIO] * bool(entrance.acall):
                for callers in (1, WARM_CALLERS):
                    self._callers(name, mode, Plan(callers, 0.0, 1))
        return {}

    def run(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Measures callers in a closed loop."""
        workload, _ = self._ready[request["workload"]]
        plan = Plan(request["callers"], request["seconds"], request["answers"])
        inside_s = self._inside_s[workload.name]
        inside_s.clear()
        tallies = self._callers(workload.name, request["mode"], plan)
        figures = read_figures(tallies, workload)
        calls = tallies.callers[0].calls
        if plan.callers == 1 and calls and len(calls) == len(inside_s):
            over_s = [taken - own for (_, _, taken), own in zip(calls, inside_s, strict=True)]
            figures["overhead_ms"] = statistics.median(over_s) * 1e3
        return figures

    def idle(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Measures what the system does while nobody calls; its event loop runs."""
        self._loop.run_until_complete(asyncio.sleep(request["settle_s"]))
        used_s, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
        self._loop.run_until_complete(asyncio.sleep(request["seconds"]))
        used_s = time.process_time() - used_s
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": request["seconds"],
            "cpu_ms_per_s": used_s / request["seconds"] * 1e3,
            "wakeups_per_s": (after.ru_nvcsw - before.ru_nvcsw) / request["seconds"],
        }

    async def _start(self, workload: Workload) -> Entrance:
        return await self._make(workload, self._options.batch_size)

    def _versions(self) -> dict[str, str]:
        found = {"python": platform.python_version()}
        for name in (self._package, "torch", "transformers"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue  # Not all of them compute; ours may run from its sources.
        return found

    def _callers(self, workload: str, mode: str, plan: Plan) -> Tallies:
        made, entrance = self._ready[workload]
        items = [made.items(number) for number in range(plan.callers)]
        if mode == THREADS:
            assert entrance.call is not None
            return in_threads(entrance.call, items, plan)
        assert entrance.acall is not None
        return self._loop.run_until_complete(on_loop(entrance.acall, items, plan))


def timed(workload: Workload, taken_s: list[float]) -> Workload:
    """The same workload; notes how long each call of the function takes.

    That is where the system calls it: called from another thread as well, the function would get a
    second team of OpenMP's threads, and then no team waits actively any more.
    """

    def function(items: Sequence[Any]) -> Sequence[Any]:
        began_s = time.perf_counter()
        answers = workload.function(items)
        taken_s.append(time.perf_counter() - began_s)
        return answers

    return replace(workload, function=function)


def in_threads(call: Callable[[Any], Any], items: Sequence[Iterator[Any]], plan: Plan) -> Tallies:
    """One thread per caller.

    Raises:
        TimeoutError: Some wait for their answer for ever.
    """
    tallies = [Tally() for _ in items]
    gate = threading.Event()
    stop_s = [0.0]

    def caller(own: Iterator[Any], tally: Tally) -> None:
        gate.wait()
        try:
            for item in own:
                began_s = time.perf_counter()
                answer = call(item)
                tally.ended_s = time.perf_counter()
                tally.calls.append((item, answer, tally.ended_s - began_s))
                if tally.ended_s >= stop_s[0] and len(tally.calls) >= plan.answers:
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is wrong
            tally.error = repr(error)
            tally.ended_s = time.perf_counter()

    threads = [
        threading.Thread(target=caller, args=pair, daemon=True)
        for pair in zip(items, tallies, strict=True)
    ]
    for thread in threads:
        thread.start()
    all_tallies = Tallies(tallies)
    stop_s[0] = all_tallies.began_s + plan.seconds
    gate.set()
    end_s = stop_s[0] + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.perf_counter()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"threads wait for answers, {PATIENCE_S:g} s after the end")
    all_tallies.end()
    return all_tallies


async def on_loop(
    acall: Callable[[Any], Awaitable[Any]], items: Sequence[Iterator[Any]], plan: Plan
) -> Tallies:
    """One coroutine per caller, all on this event loop.

    Raises:
        TimeoutError: Some wait for their answer for ever.
    """
    tallies = [Tally() for _ in items]
    all_tallies = Tallies(tallies)
    stop_s = all_tallies.began_s + plan.seconds

    async def caller(own: Iterator[Any], tally: Tally) -> None:
        try:
            for item in own:
                began_s = time.perf_counter()
                answer = await acall(item)
                tally.ended_s = time.perf_counter()
                tally.calls.append((item, answer, tally.ended_s - began_s))
                if tally.ended_s >= stop_s and len(tally.calls) >= plan.answers:
                    return
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is wrong
            tally.error = repr(error)
            tally.ended_s = time.perf_counter()

    running: list[Coroutine[Any, Any, None]] = [
        caller(*pair) for pair in zip(items, tallies, strict=True)
    ]
    try:
        async with asyncio.timeout(plan.seconds + PATIENCE_S):
            await asyncio.gather(*running)
    except TimeoutError:
        raise TimeoutError(f"coroutines wait for answers, {PATIENCE_S:g} s after the end") from None
    all_tallies.end()
    return all_tallies


def read_figures(tallies: Tallies, workload: Workload) -> dict[str, Any]:
    """Rates, percentiles and the number of wrong answers."""
    calls = [call for tally in tallies.callers for call in tally.calls]
    errors = [tally.error for tally in tallies.callers if tally.error]
    if not calls:
        return {"items": 0, "wrong": len(errors), "error": errors[0] if errors else ""}
    taken_ms = sorted(each * 1e3 for _, _, each in calls)
    wrong = sum(not workload.is_right(item, answer) for item, answer, _ in calls)
    return {
        "items": len(calls),
        "seconds": tallies.seconds,
        "items_per_s": len(calls) / tallies.seconds,
        # Fewer than callers: the others were not let run yet, or were done before the last.
        "mean_in_flight": sum(taken_ms) / 1e3 / tallies.seconds,
        "p50_ms": statistics.median(taken_ms),
        "p99_ms": taken_ms[len(taken_ms) * 99 // 100],
        "cpu_us_per_item": tallies.used_s / len(calls) * 1e6,
        "wrong": wrong + len(errors),
        "error": errors[0] if errors else "",
    }

"""Fake device processes: the test holds the far end of each pipe.

And an event loop whose clock stands still until the test moves it.
"""

import heapq
import itertools
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from batchery_worker.ipc.framing import Link
from batchery_worker.ipc.messages import (
    Done,
    NotReady,
    Ready,
    Reload,
    Reply,
    Setup,
    Work,
    dump_reply,
    load_message,
)
from support.patience import patient

#: Far above the ids of real processes, so that none is killed by mistake.
_pids = itertools.count(2**30)

#: Forward time that fake devices report for each batch.
FORWARD_MS = 12.5


class FakeDevice:
    """Replaces `subprocess.Popen`: sends nothing by itself, and leaves when it is told to."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        **_: Any,
    ) -> None:
        self.environment = env
        self.pid = next(_pids)
        self.code: int | None = None
        #: Whether the process ignores the order to leave.
        self.hangs = False
        #: The messages that it has got so far.
        self.setups: list[Setup] = []
        self.works: list[Work] = []
        self.reloads: list[Reload] = []
        self.told_to_leave = False
        self._answered: set[int] = set()
        self._link = Link(socket.socket(fileno=os.dup(pass_fds[0])))

    def hear(self) -> list[Work]:
        """Reads the pipe; returns all batches that the device got so far."""
        while self.code is None and not self.told_to_leave:
            try:
                messages = [load_message(frame) for frame in self._link.receive()]
            except EOFError:
                self.told_to_leave = True
                break
            if not messages:
                break
            self.setups += [each for each in messages if isinstance(each, Setup)]
            self.works += [each for each in messages if isinstance(each, Work)]
            self.reloads += [each for each in messages if isinstance(each, Reload)]
        return self.works

    def say(self, reply: Reply) -> None:
        """Sends a message to the worker."""
        if isinstance(reply, Done):
            self._answered.add(reply.id)
        self._link.send(dump_reply(reply))

    def get_ready(self) -> None:
        """Says that its models are loaded."""
        self.say(Ready(self.pid, 0.5))

    def refuse(self, error: str, text: str) -> None:
        """Says that it cannot start, and ends."""
        self.say(NotReady(error, text))
        self.die(1)

    def answer(self, *jobs: tuple[str, tuple[Any, ...]]) -> None:
        """Answers its oldest batch; the outcome of each job is its item if none is given."""
        work = self._waiting()[0]
        answers = jobs or tuple(("needs tracer", ("value", items[0])) for _, items, _ in work.jobs)
        self.say(Done(work.id, answers, FORWARD_MS, 0, 0))

    def _waiting(self) -> list[Work]:
        return [work for work in self.hear() if work.id not in self._answered]

    def work(self) -> bool:
        """Answers its oldest batch, or dies of it, or leaves; returns whether it did any of it."""
        if self.code is not None:
            return False
        waiting = self._waiting()
        if not waiting:
            return self.poll() is not None
        if any("kill" in items for _, items, _ in waiting[0].jobs):
            self.die()
        else:
            self.answer()
        return True

    def die(self, code: int = -9) -> None:
        """Ends the process; its messages can still be read."""
        if self.code is None:
            self.code = code
            self._link.close()

    # The interface of `subprocess.Popen`

    def kill(self) -> None:
        self.die(-9)

    def poll(self) -> int | None:
        self.hear()
        if self.told_to_leave and not self.hangs:
            self.die(0)
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("device", timeout or 0.0)
        return code


class FakeDevices:
    """All fake devices, in the order of their starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeDevice] = []
        #: Whether the system has room for one more process.
        self.has_room = True
        #: Whether each device gets ready at once.
        self.get_ready = True
        monkeypatch.setattr("batchery_worker.device_pool.process.subprocess.Popen", self._start)

    def _start(self, *arguments: Any, **options: Any) -> FakeDevice:
        if not self.has_room:
            raise BlockingIOError("Resource temporarily unavailable")
        device = FakeDevice(*arguments, **options)
        self.started.append(device)
        if self.get_ready:
            device.get_ready()
        return device


class Clock:
    """Stands still until a test moves it, or has each look at it take some time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        #: Time between two looks, in seconds.
        self.look_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s


class Loop:
    """As much of kombu's Hub as the worker uses."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._ready: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        #: How many calls were planned for later.
        self.planned = 0
        self._numbers = itertools.count()
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        self._lock = threading.Lock()

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        with self._lock:
            self._ready.append(lambda: callback(*args))

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        self.planned += 1
        entry = (self.clock.now_s + delay_s, next(self._numbers), lambda: callback(*args))
        heapq.heappush(self._timers, entry)

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self._readers[fd] = lambda: callback(*args)

    def add_writer(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self._writers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: int) -> None:
        self._readers.pop(fd, None)

    def remove_writer(self, fd: int) -> None:
        self._writers.pop(fd, None)

    def run_once(self) -> bool:
        """Runs everything that is due now; returns whether there was anything."""
        with self._lock:
            calls = list(self._ready)
            self._ready.clear()
        while self._timers and self._timers[0][0] <= self.clock.now_s:
            calls.append(heapq.heappop(self._timers)[2])
        for call in calls:
            call()
        readable, writable, _ = select.select(list(self._readers), list(self._writers), [], 0)
        # A callback may remove the descriptor of another one.
        found = [(self._readers, fd) for fd in readable] + [(self._writers, fd) for fd in writable]
        for callbacks, fd in found:
            if fd in callbacks:
                callbacks[fd]()
        return bool(calls or found)

    def settle(self) -> None:
        """Runs until nothing is due at this time."""
        for _ in range(1000):
            if not self.run_once():
                return
        raise AssertionError("the loop does not come to rest")

    def sleep(self, seconds: float) -> None:
        """Moves the clock, and runs everything that becomes due."""
        end_s = self.clock.now_s + seconds
        self.settle()
        while self._timers and self._timers[0][0] <= end_s:
            self.clock.now_s = max(self.clock.now_s, self._timers[0][0])
            self.settle()
        self.clock.now_s = end_s
        self.settle()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Runs until another thread makes the condition true; the clock stands still."""
        deadline_s = time.monotonic() + patient(30)
        while not condition():
            assert time.monotonic() < deadline_s, f"not in time: {what}"
            if not self.run_once():
                time.sleep(0.001)

"""The parent's view of one device process: its pipe, its batches in flight, its restarts."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from batchery_worker.link import Link
from batchery_worker.renewal import resident_kib
from batchery_worker.scheduler import DEPTH, Batch
from batchery_worker.ticket import Ticket
from batchery_worker.wire import Done, Reply, Setup, Work, dump_message, load_reply

logger = logging.getLogger("batchery.pool")

#: Pause before the first restart in a row, in seconds; doubled each time up to the other.
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 30.0

#: How many of its matrix products oneDNN keeps, which computes them for torch on a CPU, by core: a
#: few shapes for each pass that runs. It would keep 1,024, and hardly a batch has as many tokens as
#: another: memory grew for minutes, and passes took an eighth longer (docs/performance.md).
KEPT_PRODUCTS = 8

#: How long a process may take to leave after its pipe was closed, in seconds, before it is killed.
LEAVE_S = 5.0

#: The same for one that closed the pipe itself: as good as gone, and Celery's loop is waiting.
DEAD_S = 0.05


class State(Enum):
    """Where a device process is in its life."""

    STARTING = auto()
    READY = auto()
    #: It gets no more batches, and leaves when it has answered those it holds.
    RETIRING = auto()
    #: It was told to leave and holds nothing.
    LEAVING = auto()
    DEAD = auto()


@dataclass(slots=True)
class Flight:
    """A batch on a device."""

    batch: Batch[Ticket]
    dispatched_s: float
    #: Longest time that it may run; then its process is killed.
    hard_limit_s: float | None = None
    #: Whether that has happened.
    expired: bool = False
    #: When its time began to count: when it was first at the head of its device.
    began_s: float | None = None
    #: What the broker was told of it, see `blame.py`.
    note: Any = None


@dataclass(slots=True)
class DeviceProcess:
    """One device: the process that serves it may change, its name does not."""

    setup: Setup
    state: State = State.DEAD
    flights: dict[int, Flight] = field(default_factory=dict)
    #: Deaths in a row, without a finished batch between them.
    deaths: int = 0
    #: Starts in a row that never got ready.
    failed_starts: int = 0
    pid: int = 0
    load_s: float = 0.0
    #: Jobs that this process has answered.
    jobs: int = 0
    #: What it has told of its models and its memory.
    told: Mapping[str, Any] = field(default_factory=dict)
    #: Whether a fresh process shall take its place as soon as it can be spared.
    due: bool = False
    link: Link | None = None
    _process: subprocess.Popen[bytes] | None = None
    #: Killed, but not gone yet: a process that held a GPU may take its time.
    _dying: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As torch spells it: `cpu`, `cuda:0`."""
        return self.setup.device

    @property
    def alone(self) -> bool:
        """Whether a suspect is on the device, next to which nothing may run."""
        return any(flight.batch.alone for flight in self.flights.values())

    @property
    def has_room(self) -> bool:
        """Whether the device can take one more batch."""
        return self.state is State.READY and len(self.flights) < DEPTH and not self.alone

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next start, in seconds; nothing before the first."""
        if not self.deaths:
            return 0.0
        # Only so many doublings: a device that dies for days must not make it overflow.
        return min(FIRST_BACKOFF_S * 2.0 ** min(self.deaths - 1, 16), MAX_BACKOFF_S)

    def figures(self) -> dict[str, Any]:
        """What `celery inspect batchery` shows of it."""
        return {
            "state": self.state.name.lower(),
            "pid": self.pid,
            "load_s": round(self.load_s, 3),
            "batches_in_flight": len(self.flights),
            "resident_kib": resident_kib(self.pid) if self.link is not None else None,
            **self.told,
        }

    def spawn(self) -> None:
        """Starts a fresh interpreter; never a fork, which CUDA does not survive.

        Raises:
            OSError: There is no room for one more process.
        """
        self._dying = [process for process in self._dying if process.poll() is None]
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "batchery_worker.device", str(theirs.fileno())],
                    env={**_environment(), **os.environ},
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        self.pid = self._process.pid
        self.jobs = 0
        self.told = {}
        self.due = False
        self.link = Link(ours)
        self.link.send(dump_message(self.setup))
        self.state = State.STARTING

    def send(self, work: Work, flight: Flight) -> bool:
        """Hands over a batch; returns False if part of it waits for the pipe to drain."""
        assert self.link is not None
        frame = dump_message(work)
        self.flights[work.id] = flight
        return self.link.send(frame)

    def land(self, done: Done) -> Flight:
        """Takes back a batch that the process has answered.

        Raises:
            LookupError: It has no such batch.
            ValueError: These are not answers for all of its jobs.
        """
        flight = self.flights[done.id]
        if len(done.jobs) != len(flight.batch.jobs):
            raise ValueError(f"{len(done.jobs)} answers for {len(flight.batch.jobs)} jobs")
        del self.flights[done.id]
        self.deaths = 0
        self.jobs += len(done.jobs)
        return flight

    def kill(self) -> None:
        """Ends the process by kill -9; the end of the pipe tells the rest."""
        if self._process is not None:
            self._process.kill()

    def receive(self) -> list[Reply]:
        """Everything that the process has said since.

        Raises:
            EOFError: It is dead.
        """
        assert self.link is not None
        replies = [load_reply(frame) for frame in self.link.receive()]
        for reply in replies:
            self.told = getattr(reply, "figures", None) or self.told
        return replies

    def leave(self) -> None:
        """Tells the process to leave; the end of its pipe says when it has."""
        self.state = State.LEAVING
        if self.link is not None:
            self.link.finish()

    def bury(self) -> str:
        """Cleans up after a death; returns how it died, for people."""
        self.failed_starts += self.state is State.STARTING
        # One that was told to leave has not died.
        self.deaths += self.state is not State.LEAVING
        process, self._process = self._process, None
        assert process is not None
        self.dismiss()
        try:
            code = process.wait(DEAD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self._dying.append(process)
            return "closed its pipe and was killed"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def dismiss(self) -> None:
        """Closes the pipe, which tells the process to leave."""
        self.state = State.DEAD
        if self.link is not None:
            self.link.close()
            self.link = None

    def stop(self, *, kill_at_once: bool) -> None:
        """Waits for the end of the process, and hastens it where necessary."""
        self.dismiss()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(0.0 if kill_at_once else LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for each in self._dying:
            each.wait()


def _environment() -> dict[str, str]:
    """What a device process finds in its environment, where that does not say otherwise."""
    return {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_PRODUCTS * (os.cpu_count() or 1))}

"""The parent's view of one device process: its pipe, its batches in flight, its restarts."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from batchery.fork_gate import fork_gate
from batchery_worker.ipc.framing import Link
from batchery_worker.ipc.messages import Done, Reply, Setup, Work, dump_message, load_reply
from batchery_worker.job import DEVICE_DEPTH
from batchery_worker.task_call import DispatchedBatch

logger = logging.getLogger("batchery.pool")

KIB = 1024

#: Pause before the first restart in a row, in seconds; doubled each time up to the other.
FIRST_BACKOFF_S = 0.1

MAX_BACKOFF_S = 30.0

#: How many programs per core oneDNN may keep, which computes matrix products for torch on a CPU: a
#: few shapes for each pass that runs. By default it keeps 1,024, while hardly two batches have the
#: same number of tokens: memory grew for minutes, and passes took an eighth longer
#: (docs/performance.md).
ONEDNN_PROGRAMS_PER_CORE = 8

#: How long a process may take to leave after its pipe was closed, in seconds; then it is killed.
LEAVE_S = 5.0

#: The same for a process that closed the pipe itself: it is as good as gone, and the loop waits.
DEAD_S = 0.05


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """When a device process is recycled, that is replaced by a fresh one; None for no limit."""

    #: Number of jobs that it has answered, whether they succeeded or not.
    max_jobs: int | None = None
    #: Main memory that it holds, in KiB; the memory of its GPU does not count.
    max_memory_kib: int | None = None

    def reached(self, jobs: int, pid: int) -> bool:
        """Whether a process with so many answered jobs has to go."""
        if self.max_jobs and jobs >= self.max_jobs:
            return True
        if not self.max_memory_kib:
            return False
        held_kib = resident_kib(pid)
        return held_kib is not None and held_kib > self.max_memory_kib


def resident_kib(pid: int) -> int | None:
    """Main memory that a process holds now, in KiB; None where the system does not tell.

    Linux tells it in a file, which costs some microseconds. Elsewhere it would cost a process.
    """
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // KIB
    except (OSError, ValueError, IndexError):
        return None


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
class DeviceProcess:
    """One device. The process that serves it may change, its name does not."""

    setup: Setup
    state: State = State.DEAD
    batches: dict[int, DispatchedBatch] = field(default_factory=dict)
    #: Deaths in a row, without a finished batch between them.
    deaths: int = 0
    #: Starts in a row after which the process never got ready.
    failed_starts: int = 0
    pid: int = 0
    load_s: float = 0.0
    #: Jobs that this process has answered.
    jobs: int = 0
    #: What the process has told of its models and its memory.
    told: Mapping[str, Any] = field(default_factory=dict)
    #: Whether a fresh process must take its place as soon as it can be spared.
    recycle_due: bool = False
    link: Link | None = None
    _process: subprocess.Popen[bytes] | None = None
    #: Processes that were killed and are not gone yet: one that held a GPU may take its time.
    _dying: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The device as torch spells it: `cpu`, `cuda:0`."""
        return self.setup.device

    @property
    def alone(self) -> bool:
        """Whether a suspect is on the device, which must run alone."""
        return any(dispatched.batch.alone for dispatched in self.batches.values())

    @property
    def has_room(self) -> bool:
        """Whether the device can take one more batch."""
        return self.state is State.READY and len(self.batches) < DEVICE_DEPTH and not self.alone

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next start, in seconds; 0 before the first."""
        if not self.deaths:
            return 0.0
        # The exponent is bounded: a device that dies for days must not make it overflow.
        return min(FIRST_BACKOFF_S * 2.0 ** min(self.deaths - 1, 16), MAX_BACKOFF_S)

    def figures(self) -> dict[str, Any]:
        """What `celery inspect batchery` shows of the device."""
        return {
            "state": self.state.name.lower(),
            "pid": self.pid,
            "load_s": round(self.load_s, 3),
            "batches_in_flight": len(self.batches),
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
        self.recycle_due = False
        self.link = Link(ours)
        # A child that held it open would keep the device alive when this process dies.
        fork_gate.keep_private(self.link)
        self.link.send(dump_message(self.setup))
        self.state = State.STARTING

    def send(self, work: Work, dispatched: DispatchedBatch) -> bool:
        """Hands over a batch; returns False if part of it waits for the pipe to drain."""
        assert self.link is not None
        frame = dump_message(work)
        self.batches[work.id] = dispatched
        return self.link.send(frame)

    def take_reply(self, done: Done) -> DispatchedBatch:
        """Takes back a batch that the process has answered.

        Raises:
            LookupError: The process has no such batch.
            ValueError: The number of answers is not that of the batch's jobs.
        """
        dispatched = self.batches[done.id]
        if len(done.jobs) != len(dispatched.batch.jobs):
            raise ValueError(f"{len(done.jobs)} answers for {len(dispatched.batch.jobs)} jobs")
        del self.batches[done.id]
        self.deaths = 0
        self.jobs += len(done.jobs)
        return dispatched

    def kill(self) -> None:
        """Ends the process by kill -9; the end of its pipe tells when it is gone."""
        if self._process is not None:
            self._process.kill()

    def receive(self) -> list[Reply]:
        """Returns everything that the process has said since the last call.

        Raises:
            EOFError: The process is dead.
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

    def reap(self) -> str:
        """Cleans up after a death; returns how it died, for people."""
        self.failed_starts += self.state is State.STARTING
        # A process that was told to leave has not died.
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
    """What a device process finds in its environment, unless the worker's says otherwise."""
    return {
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(ONEDNN_PROGRAMS_PER_CORE * (os.cpu_count() or 1))
    }

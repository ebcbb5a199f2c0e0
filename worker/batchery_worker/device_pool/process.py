"""A device process, seen from the parent: its pipe, its batches in flight, its restarts."""

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from celery.worker import state as worker_state

from batchery.fork_gate import fork_gate
from batchery_worker.devstack.guarded_process import python_command
from batchery_worker.ipc.framing import Link
from batchery_worker.ipc.logs import follow_log
from batchery_worker.ipc.messages import (
    Reply,
    Running,
    Setup,
    Stepped,
    dump_message,
    load_reply,
)

logger = logging.getLogger("batchery.pool")

KIB = 1024

#: Pause before the first restart in a row, in seconds; it doubles with each restart.
FIRST_BACKOFF_S = 0.1

#: Maximum pause before a restart, in seconds.
MAX_BACKOFF_S = 30.0

#: Maximum number of programs per core that oneDNN keeps. It computes matrix products for torch on a
#: CPU, with one program per shape. By default it keeps 1,024 of them. But hardly two batches have
#: the same number of tokens, so memory grew for minutes, and passes took an eighth longer
#: (docs/benchmarks.md).
ONEDNN_PROGRAMS_PER_CORE = 8

#: How often a thread of torch looks whether the others are done, before it sleeps. GNU's OpenMP,
#: which torch brings on Linux, looks 300,000 times. Where a neighbour needs the core, or two of the
#: threads share one, that is time in which nobody computes. So few looks cost a lone pass a
#: twentieth where the cores are free (docs/benchmarks.md).
SPINS = 1_000

#: How long a process may take to end after its pipe was closed, in seconds; then it is killed.
LEAVE_TIMEOUT_S = 5.0

#: How long a killed process may take to end, in seconds, before its worker ends without it: the
#: driver of a card may hold a process for ever.
KILL_TIMEOUT_S = 10.0

#: How long a process that closed its pipe itself may take to end, in seconds; the event loop waits.
REAP_TIMEOUT_S = 0.05


@dataclass(frozen=True, slots=True)
class RecyclingLimits:
    """When a device process is recycled: a fresh one takes its place. None means no limit."""

    #: Number of jobs that the process has answered, whether they succeeded or not.
    max_jobs: int | None = None
    #: Main memory of the process; the memory of its GPU does not count.
    max_memory_bytes: int | None = None

    def reached(self, jobs: int, pid: int) -> bool:
        """Whether a process that has answered this many jobs must be recycled."""
        if self.max_jobs and jobs >= self.max_jobs:
            return True
        if not self.max_memory_bytes:
            return False
        held_kib = resident_kib(pid)
        return held_kib is not None and held_kib * KIB > self.max_memory_bytes


def resident_kib(pid: int) -> int | None:
    """Main memory that a process holds now, in KiB; None if the system is not Linux.

    On Linux a file has it, which takes microseconds to read. Other systems need a process for it.
    """
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // KIB
    except (OSError, ValueError, IndexError):
        return None


class Process(Protocol):
    """What a device runs in: a `subprocess.Popen`, or a thread in the place of one."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; raises `TimeoutExpired` after this time, in seconds."""

    def kill(self) -> None:
        """Ends it at once."""


#: Starts what serves a device, given its end of the pipe, which it takes over.
StartProcess = Callable[[socket.socket], Process]


@dataclass(slots=True)
class WatchedBatch:
    """A batch on a device, of which that has told."""

    told: Running
    #: Maximum time that it may run, in seconds; then its process is killed.
    hard_limit_s: float | None = None
    #: Whether it reached the hard limit.
    expired: bool = False
    #: Whether all of its jobs were terminated, so that it must end soon.
    is_unwanted: bool = False
    #: Until when its device may be silent, and its limits do not count, as its model is loaded or
    #: Redis may be away; 0 if neither is so.
    excused_until_s: float = 0.0
    #: Since when that is so.
    excused_since_s: float = 0.0
    #: When it began, less the time of urgent batches since then; its time limit counts from here.
    #: A batch begins when it is the first one of its device, an urgent one when the device says so.
    began_s: float | None = None

    def __str__(self) -> str:
        first, others = self.told.job_ids[0], len(self.told.job_ids) - 1
        return f"{self.told.task}[{first}]" + (f" and {others} of its batch" if others else "")

    def ran_s(self, now_s: float) -> float:
        """For how long it has run, in seconds; 0 if it has not begun."""
        return 0.0 if self.began_s is None else max(0.0, now_s - self.began_s)

    @property
    def due_s(self) -> float:
        """When it must have ended, or loaded its model; infinite while its time has no limit."""
        if self.excused_until_s:
            return self.excused_until_s
        if self.began_s is None or self.hard_limit_s is None:
            return inf
        return self.began_s + self.hard_limit_s

    @property
    def was_too_long(self) -> bool:
        """Whether its only job is to blame that it reached the hard limit."""
        # Behind an urgent one another has begun.
        return self.expired and len(self.told.job_ids) == 1 and not self.told.is_urgent

    def interrupts(self, other: "WatchedBatch") -> bool:
        """Whether it runs between the passes of another batch of its device."""
        return self.told.is_urgent and self is not other and self.began_s is not None


class State(Enum):
    """The state of a device process."""

    STARTING = auto()
    READY = auto()
    #: It was told to finish what it has begun, and to leave.
    LEAVING = auto()
    DEAD = auto()
    #: It failed to start too often, and has no process until an operator starts it again.
    GIVEN_UP = auto()


@dataclass(slots=True)
class DeviceProcess:
    """One device, served by one process at a time."""

    setup: Setup
    #: Called with the other end of the pipe.
    start: StartProcess
    state: State = State.DEAD
    #: The batches of which it has told.
    batches: dict[int, WatchedBatch] = field(default_factory=dict)
    #: Number of deaths in a row, without a finished batch between them. Ends by order, such as that
    #: of a time limit, do not count.
    deaths: int = 0
    #: Number of times in a row that it was killed because it hung, without a finished batch.
    hangs: int = 0
    #: Whether its process was killed because it hung, and no other one is ready yet.
    is_hung: bool = False
    #: When it last gave a sign, or got work while it had none, on the monotonic clock.
    heard_s: float = 0.0
    #: When it was asked for a sign although it has no work that is known of; infinite for never.
    asked_s: float = inf
    #: When the time limits of its batches are looked at next, on the monotonic clock.
    look_s: float = inf
    #: Number of starts in a row that failed before the process was ready.
    failed_starts: int = 0
    #: Why it was given up, for people.
    error: str = ""
    pid: int = 0
    load_s: float = 0.0
    #: When this process was started, and when it was ready, on the monotonic clock.
    spawned_s: float = 0.0
    ready_s: float = 0.0
    #: Jobs that this process has answered.
    jobs: int = 0
    #: What the process has reported of its models and its memory.
    reported: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the process must be recycled as soon as all others are ready.
    recycle_due: bool = False
    link: Link | None = None
    _process: Process | None = None
    #: Why it was killed from here, for people; empty if it was not.
    _killed_for: str = ""
    #: Processes that were killed and have not ended yet; one that held a GPU may take long.
    _dying: list[Process] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The device as torch spells it, such as `cuda:0`; `cuda:0/chat` if it serves one task."""
        return self.setup.name

    def serves(self, task: str) -> bool:
        """Whether jobs of a task, which has no slots, may come to it."""
        return task not in self.setup.elsewhere

    def silent_s(self, now_s: float) -> float:
        """How long it has given no sign although it has work, or was asked, in seconds; else 0."""
        # Of a copy, as threads look that answer probes.
        batches = [*self.batches.values()]
        excused_s = max((each.excused_until_s for each in batches), default=self.asked_s)
        return max(0.0, now_s - max(self.heard_s, excused_s))

    def oldest_batch_s(self, now_s: float) -> float:
        """For how long the batch that began first has run, in seconds; 0 if it has none."""
        return max((each.ran_s(now_s) for each in self.batches.values()), default=0.0)

    @property
    def backoff_s(self) -> float:
        """Pause before the next start, in seconds; 0 before the first one."""
        if not self.deaths:
            return 0.0
        # The exponent is bounded, so that a device that dies for days cannot make it overflow.
        return min(FIRST_BACKOFF_S * 2.0 ** min(self.deaths - 1, 16), MAX_BACKOFF_S)

    def figures(self) -> dict[str, Any]:
        """The device's figures in `celery inspect batchery`."""
        return {
            "state": self.state.name.lower().replace("_", " "),
            "error": self.error,
            "pid": self.pid,
            "load_s": round(self.load_s, 3),
            "batches_in_flight": len(self.batches),
            "oldest_batch_s": round(self.oldest_batch_s(monotonic()), 3),
            "resident_kib": resident_kib(self.pid) if self.link is not None else None,
            **self.reported,
        }

    def spawn(self) -> None:
        """Starts a fresh process.

        Raises:
            OSError: The system cannot start another process.
        """
        self._dying = [process for process in self._dying if process.poll() is None]
        ours, theirs = socket.socketpair()
        try:
            self._process = self.start(theirs)
        except OSError:
            ours.close()
            raise
        self.pid = self._process.pid
        self.spawned_s = monotonic()
        self.jobs = 0
        self.reported = {}
        self.asked_s = inf
        self.recycle_due = False
        self.link = Link(ours)
        # A child that held it open would keep the device alive when this process dies.
        fork_gate.keep_private(self.link)
        # With those that were revoked since the process before began.
        jobs = replace(self.setup.jobs, revoked=tuple(worker_state.revoked))
        self.link.send(dump_message(replace(self.setup, jobs=jobs)))
        self.state = State.STARTING

    def hold(self, batch_id: int, batch: WatchedBatch) -> None:
        """Notes that the process has a batch."""
        if not self.batches:
            self.heard_s = monotonic()
        self.batches[batch_id] = batch

    def release(self, batch_id: int) -> WatchedBatch | None:
        """Takes back a batch that has ended; None if it is not known."""
        if (batch := self.batches.pop(batch_id, None)) is not None:
            self.deaths = self.hangs = 0
        return batch

    def take_batches(self) -> list[WatchedBatch]:
        """Takes back all batches, because the process is gone."""
        batches = list(self.batches.values())
        self.batches.clear()
        return batches

    def kill(self, why: str = "") -> None:
        """Kills the process, and says why, for people; the end of its pipe says when it is gone."""
        if self._process is not None:
            self._killed_for = why
            self._process.kill()

    def receive(self) -> list[Reply]:
        """Returns all messages of the process since the last call, but for signs of life.

        Raises:
            EOFError: The process is dead.
        """
        assert self.link is not None
        came = [load_reply(frame) for frame in self.link.receive()]
        replies: list[Reply] = [reply for reply in came if not isinstance(reply, Stepped)]
        if came:
            self.heard_s = monotonic()
        for reply in replies:
            if figures := getattr(reply, "figures", None):
                self.reported = figures
        return replies

    @property
    def has_ended(self) -> bool:
        """Whether the process that was started has ended."""
        return self._process is not None and self._process.poll() is not None

    @property
    def _ends_by_order(self) -> bool:
        """Whether this worker ends the process, and so its end says nothing of the device."""
        if self.state is State.LEAVING or any(each.expired for each in self.batches.values()):
            return True
        # It stays noted until the next process is ready, which may fail by itself.
        return self.is_hung and self.state is not State.STARTING

    def reap(self) -> str:
        """Cleans up after the process ended; returns how it ended, for people."""
        self.failed_starts += self.state is State.STARTING
        self.deaths += not self._ends_by_order
        process, self._process = self._process, None
        assert process is not None
        why, self._killed_for = self._killed_for, ""
        self.dismiss()
        try:
            how = describe_ending(process.wait(REAP_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            process.kill()
            self._dying.append(process)
            how = "closed its pipe and was killed"
        return f"killed by its worker, {why}" if why else how

    def dismiss(self) -> None:
        """Closes the pipe, which tells the process to leave."""
        self.state = State.DEAD
        if self.link is not None:
            self.link.close()
            self.link = None

    def stop(self, *, kill_at_once: bool) -> str:
        """Waits for the end of the process; kills it if it takes too long.

        Returns:
            How it ended, for people; empty if there was none.
        """
        self.dismiss()
        process, self._process = self._process, None
        ending = ""
        if process is not None:
            try:
                code = process.wait(0.0 if kill_at_once else LEAVE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = _wait_killed(process)
            ending = describe_ending(code)
        for each in self._dying:
            _wait_killed(each)
        return ending


def start_process(end: socket.socket) -> Process:
    """Starts a device process, whose log goes through the handlers of this process."""
    with end:
        log, their_log = socket.socketpair()
        with their_log:
            ends = (end.fileno(), their_log.fileno())
            # First, as there may be no thread for it; if there is no process, this ends at once.
            follow_log(log)
            # Never a fork, which CUDA does not survive.
            return subprocess.Popen(
                [*python_command(), "-m", "batchery_worker.device", *map(str, ends)],
                env={**_environment(), **os.environ},
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
            )


def _wait_killed(process: Process) -> int:
    """Waits for the end of a process that was killed; returns its exit code."""
    try:
        return process.wait(KILL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.error(
            "device process %d was killed and does not end: a driver holds it, and its memory",
            process.pid,
        )
        return -signal.SIGKILL


def describe_ending(code: int) -> str:
    """How a process ended, for people."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """Environment variables of a device process; those of the worker outrank them."""
    programs = ONEDNN_PROGRAMS_PER_CORE * (os.cpu_count() or 1)
    defaults = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(programs)}
    if "OMP_WAIT_POLICY" not in os.environ:
        # The count would outrank the policy.
        defaults["GOMP_SPINCOUNT"] = str(SPINS)
    return defaults

"""A device process, seen from the parent: its pipe, its batches in flight, its restarts."""

import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from batchery.fork_gate import fork_gate
from batchery_worker.devstack.guarded_process import python_command
from batchery_worker.in_flight import DispatchedBatch
from batchery_worker.ipc.framing import Link
from batchery_worker.ipc.logs import follow_log
from batchery_worker.ipc.messages import (
    Done,
    Left,
    Reply,
    Setup,
    Stepped,
    dump_message,
    load_reply,
)
from batchery_worker.job import DEVICE_DEPTH

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
    batches: dict[int, DispatchedBatch] = field(default_factory=dict)
    #: Those of them that run one after the other; an urgent one comes in between.
    in_turn: list[DispatchedBatch] = field(default_factory=list)
    #: Those that made room for others, and wait for a slot, in the order in which they go on.
    aside: deque[DispatchedBatch] = field(default_factory=deque)
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
    #: As in `Ready`.
    resumes: bool = True
    #: Number of slots that its jobs have, or will have next.
    taken: int = 0
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

    @property
    def is_idle(self) -> bool:
        """Whether the device is ready and has nothing to do."""
        return self.state is State.READY and not self.batches

    @property
    def alone(self) -> bool:
        """Whether the device runs a suspect, which must run alone."""
        return bool(self.in_turn) and self.in_turn[0].batch.alone

    @property
    def has_room(self) -> bool:
        """Whether the device can take one more batch."""
        is_open = self.state is State.READY and not self.alone
        if self.setup.slots:
            return is_open and self.taken < self.setup.slots
        return is_open and len(self.in_turn) < DEVICE_DEPTH

    @property
    def cohort(self) -> int:
        """Maximum number of suspects that may share its slots; 0 while it runs none."""
        return min((each.batch.cohort for each in self.in_turn), default=0)

    @property
    def free_slots(self) -> int:
        """Number of slots for jobs that are no suspects."""
        is_open = self.state is State.READY and not self.cohort
        return max(0, self.setup.slots - self.taken) if is_open else 0

    @property
    def is_full(self) -> bool:
        """Whether all of its slots are taken, and none by a suspect."""
        return self.state is State.READY and not self.cohort and self.taken >= self.setup.slots

    @property
    def takes_urgent(self) -> bool:
        """Whether the device runs batches, and no urgent one waits there to begin."""
        is_open = self.state is State.READY and not self.alone and not self.setup.slots
        return is_open and bool(self.in_turn) and not self.holds_urgent

    @property
    def holds_urgent(self) -> bool:
        """Whether an urgent batch is there that has not begun."""
        return len(self.batches) > len(self.in_turn) and any(
            each.urgent and each.began_s is None for each in self.batches.values()
        )

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
        self.link.send(dump_message(self.setup))
        self.state = State.STARTING

    def hold(self, work_id: int, dispatched: DispatchedBatch) -> None:
        """Notes that the process has a batch."""
        if not self.batches:
            self.heard_s = monotonic()
        self.batches[work_id] = dispatched
        if not dispatched.urgent:
            self.in_turn.append(dispatched)
        if dispatched.in_slots:
            dispatched.items_left = dispatched.batch.items
            self.taken += dispatched.items_left

    def free_slot(self, left: Left) -> None:
        """Notes that an item has left its slot, and others of its job go on."""
        self.batches[left.id].items_left -= 1
        self.taken -= 1
        self._note_resumed()

    def put_aside(self, work_id: int) -> None:
        """Notes that a job makes room for another one."""
        self.batches[work_id].is_aside = True
        self.aside.append(self.batches[work_id])

    def _note_resumed(self) -> None:
        """Notes which jobs have slots again: the process gives them those that are free."""
        waiting = sum(each.items_left for each in self.aside)
        while self.aside:
            waiting -= self.aside[0].items_left
            if self.taken - waiting > self.setup.slots:
                return
            self.aside.popleft().is_aside = False

    def take_reply(self, done: Done) -> DispatchedBatch:
        """Takes back a batch that the process has answered.

        Raises:
            LookupError: The process has no such batch.
            ValueError: There are more or fewer answers than jobs in the batch.
        """
        dispatched = self.batches[done.id]
        if len(done.jobs) != len(dispatched.batch.jobs):
            raise ValueError(f"{len(done.jobs)} answers for {len(dispatched.batch.jobs)} jobs")
        self.jobs += len(done.jobs)
        return self.release(done.id)

    def release(self, work_id: int) -> DispatchedBatch:
        """Takes back a batch that has ended."""
        dispatched = self.batches.pop(work_id)
        if not dispatched.urgent:
            self.in_turn.remove(dispatched)
        self.taken -= dispatched.items_left
        if dispatched.is_aside:
            self.aside.remove(dispatched)
        self._note_resumed()
        self.deaths = self.hangs = 0
        return dispatched

    def take_batches(self) -> list[DispatchedBatch]:
        """Takes back all batches, because the process is gone."""
        batches = list(self.batches.values())
        self.batches.clear()
        self.in_turn.clear()
        self.aside.clear()
        self.taken = 0
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
            self.note_figures(reply)
        return replies

    def note_figures(self, reply: Reply) -> None:
        """Notes what a message says of the device's models."""
        if figures := getattr(reply, "figures", None):
            self.reported = figures

    def must_load(self, task: str) -> bool:
        """Whether a task is a model that was not loaded when its device has last said so."""
        model = self.reported.get("models", {}).get(task, {})
        return bool(model.get("reload_s"))

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

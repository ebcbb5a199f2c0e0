"""A device process, seen from its worker: its pipe, its start and its end."""

import logging
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf
from time import monotonic
from typing import Any, Protocol

from celery.worker import state as worker_state

from batchery.fork_gate import fork_gate
from batchery_worker.device_pool.watched import WatchedBatch, WatchedBatches
from batchery_worker.devstack.guarded_process import python_command
from batchery_worker.ipc.framing import Pipe
from batchery_worker.ipc.logs import follow_log
from batchery_worker.ipc.messages import (
    Ended,
    Message,
    OfBatch,
    Reply,
    Setup,
    Stop,
    dump_message,
)
from batchery_worker.memory import resident_kib

logger = logging.getLogger("batchery.pool")

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

#: How long a process that leaves may take to end after its last job, in seconds; then it is killed.
LEAVE_TIMEOUT_S = 5.0

#: How long a killed process may take to end, in seconds, before its worker ends without it: the
#: driver of a card may hold a process for ever.
KILL_TIMEOUT_S = 10.0

#: How long a process that closed its pipe itself may take to end, in seconds; then it is killed.
REAP_TIMEOUT_S = 0.05


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
    #: It failed to start too often, and has no process until its worker is started again.
    GIVEN_UP = auto()


@dataclass(slots=True, eq=False)
class DeviceProcess:
    """One device, served by one process at a time."""

    setup: Setup
    #: Called with the other end of the pipe.
    start: StartProcess
    state: State = State.DEAD
    #: The batches of which it has told.
    batches: WatchedBatches = field(default_factory=WatchedBatches)
    #: Number of deaths in a row, without a finished batch or much time between them. Ends by order,
    #: such as that of a time limit, do not count.
    deaths: int = 0
    #: Number of times in a row that it was killed because it hung, without a finished batch.
    hangs: int = 0
    #: Whether its process was killed because it hung, and no other one is ready yet.
    is_hung: bool = False
    #: When it last gave a sign, or got work while it had none, on the monotonic clock.
    heard_s: float = 0.0
    #: When it was asked for a sign although it has no work that is known of; infinite for never.
    asked_s: float = inf
    #: When its next process is started, and when a process that leaves is killed, on that clock.
    start_at_s: float = 0.0
    leave_by_s: float = inf
    #: Number of starts in a row that failed before the process was ready.
    failed_starts: int = 0
    #: Why it could not start the last time, or was given up, for people.
    error: str = ""
    pid: int = 0
    load_s: float = 0.0
    #: When this process was started, and when it was ready, on the monotonic clock.
    spawned_s: float = 0.0
    ready_s: float = 0.0
    #: What the process has reported of its models and its memory.
    reported: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the process must be recycled as soon as all others are ready.
    recycle_due: bool = False
    #: Of a feeder: what computes for it.
    card: "DeviceProcess | None" = None
    #: None while there is no process.
    pipe: Pipe | None = None
    _process: Process | None = None
    #: Why it was killed from here, for people; empty if it was not.
    _killed_for: str = ""
    #: Processes that were killed and have not ended yet; one that held a GPU may take long.
    _dying: list[Process] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The device as torch spells it, such as `cuda:0`; `cuda:0/chat` if it serves one task."""
        return self.setup.name

    @property
    def versions(self) -> dict[str, str]:
        """Those that it has reported of its models, by task; empty for a model without."""
        models = self.reported.get("models", {})
        return {task: figures.get("version", "") for task, figures in models.items()}

    @property
    def is_calm(self) -> bool:
        """Whether it has no time limit to keep: it is neither started nor ended, and no batch's."""
        return self.state is State.READY and not self.batches

    def silent_s(self, now_s: float) -> float:
        """How long it has given no sign although it has work, or was asked, in seconds; else 0."""
        # Of a copy, as threads look that answer probes.
        batches = [*self.batches.values()]
        excused_s = max((each.excused_until_s for each in batches), default=self.asked_s)
        return max(0.0, now_s - max(self.heard_s, excused_s))

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
            "error": self.error if self.state is State.GIVEN_UP else "",
            "pid": self.pid,
            "load_s": round(self.load_s, 3),
            "batches_in_flight": len(self.batches),
            "oldest_batch_s": round(self.batches.oldest_s(monotonic()), 3),
            "resident_kib": resident_kib(self.pid) if self.pipe is not None else None,
            **self.reported,
        }

    def spawn(
        self, on_frame: Callable[[Pipe, bytes], None], on_end: Callable[[Pipe], None]
    ) -> None:
        """Starts a fresh process; see `Pipe`.

        Raises:
            OSError: The system cannot start another process or thread.
        """
        self._dying = [process for process in self._dying if process.poll() is None]
        # A child of Celery's pool that were forked now would hold the other end open, too: then
        # nobody would see the end of this process.
        with fork_gate.working():
            ours, theirs = socket.socketpair()
            pipe = Pipe(ours, on_frame, on_end)
            try:
                self._process = self.start(theirs)
            except OSError:
                pipe.close()
                raise
        self.pipe, self.pid, self.state = pipe, self._process.pid, State.STARTING
        self.spawned_s = monotonic()
        self.reported = {}
        self.asked_s = self.leave_by_s = inf
        self.recycle_due = False
        # With those that were revoked since the process before began.
        jobs = replace(self.setup.jobs, revoked=tuple(worker_state.revoked))
        self.tell(replace(self.setup, jobs=jobs))

    def tell(self, message: Message) -> None:
        """Sends a message to the process, if there is one."""
        if self.pipe is not None:
            self.pipe.send(dump_message(message))

    def note(self, reply: Reply) -> None:
        """Notes what any message of the process says."""
        self.heard_s = monotonic()
        if figures := getattr(reply, "figures", None):
            self.reported = figures

    def note_batch(self, reply: OfBatch, load_timeout_s: float) -> None:
        """Notes what it says of a batch; a load may take so long, in seconds."""
        self.batches.note(reply, monotonic(), load_timeout_s)
        if isinstance(reply, Ended):
            self.deaths = self.hangs = 0

    def leave(self) -> None:
        """Has the process finish what it has begun, and end."""
        if self.state is State.STARTING:
            # It hears of it once it has started, which may take long.
            self.leave_by_s = monotonic() + LEAVE_TIMEOUT_S
        self.state = State.LEAVING
        self.tell(Stop())

    def kill(self, why: str = "") -> None:
        """Kills the process, and says why, for people; the end of its pipe says when it is gone."""
        if self._process is not None:
            self._killed_for = why
            self._process.kill()
        if self.card is not None:
            # What took too long is computed there.
            self.card.kill(why)

    @property
    def _ends_by_order(self) -> bool:
        """Whether this worker ends the process, and so its end says nothing of the device."""
        if self.state is State.LEAVING or any(each.expired for each in self.batches.values()):
            return True
        # It stays noted until the next process is ready, which may fail by itself.
        return self.is_hung and self.state is not State.STARTING

    def await_end(self) -> None:
        """Waits until a process has ended that has closed its pipe, but not for long."""
        with suppress(subprocess.TimeoutExpired):
            if (process := self._process) is not None:
                is_leaving = self.state is State.LEAVING
                process.wait(LEAVE_TIMEOUT_S if is_leaving else REAP_TIMEOUT_S)

    def bury(self) -> tuple[str, list[WatchedBatch]]:
        """Forgets a process that has ended, or was killed.

        Returns:
            How it ended, for people, and the batches of which it had told.
        """
        self.failed_starts += self.state is State.STARTING
        if self.state is not State.STARTING and monotonic() - self.ready_s > MAX_BACKOFF_S:
            self.deaths = 0
        self.deaths += not self._ends_by_order
        batches, why = [*self.batches.values()], self._killed_for
        self.batches.clear()
        code = self._dismiss()
        how = "closed its pipe and was killed" if code is None else describe_ending(code)
        return f"killed by its worker, {why}" if why else how, batches

    def _dismiss(self) -> int | None:
        """Closes the pipe, and ends the process; its exit code, None if it has not ended yet."""
        pipe, process = self.pipe, self._process
        self.pipe, self._process, self._killed_for = None, None, ""
        self.state = State.DEAD
        if pipe is not None:
            pipe.close()
        if process is None:
            return 0
        try:
            return process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self._dying.append(process)
            return None

    def stop(self) -> None:
        """Kills the process, and waits for its end."""
        self._dismiss()
        self.batches.clear()
        for process in self._dying:
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.error(
                    "device process %d was killed and does not end: a driver holds it, and its"
                    " memory",
                    process.pid,
                )


def start_process(
    end: socket.socket,
    module: str = "batchery_worker.device",
    listening: socket.socket | None = None,
) -> Process:
    """Starts a device process, whose log goes through the handlers of this process.

    Args:
        end: Of its pipe.
        module: What it runs.
        listening: Where feeders connect, if it is the process of their card.
    """
    with end:
        log, their_log = socket.socketpair()
        with their_log:
            inherited = (end, their_log, *([] if listening is None else [listening]))
            ends = tuple(each.fileno() for each in inherited)
            # First, as there may be no thread for it; if there is no process, this ends at once.
            follow_log(log)
            # Never a fork, which CUDA does not survive.
            return subprocess.Popen(
                [*python_command(), "-m", module, *map(str, ends)],
                env={**_environment(), **os.environ},
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
            )


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

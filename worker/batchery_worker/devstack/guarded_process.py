"""A process that ends with its owner, even where the owner is killed with `kill -9`.

A guard runs between the two: this file, run as a script by a bare interpreter. Owner and guard
share a socket, and its end of file means that the owner is gone. Then the guard kills the process
and the rest of its process group. So any thread may start the process, and it works the same on
Linux and macOS.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

#: Number of last lines of output that are kept for error messages.
TAIL_LINES = 1_000

#: How long to wait for the last output of a dead process, in seconds; later output is lost.
DRAIN_S = 2.0

#: Option of Linux's prctl(2): which signal a process gets when its parent dies.
PR_SET_PDEATHSIG = 1


class GuardedProcess:
    """A running process that cannot outlive its owner.

    It runs in a session of its own. So a Ctrl-C in the terminal reaches only the owner, which stops
    its processes in the right order.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        remove: Path | None = None,
        keep_open: Sequence[int] = (),
        umask: int = -1,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Starts the process.

        Args:
            command: Program and arguments; the program as an absolute path.
            environment: Its whole environment; None for the owner's.
            directory: Its working directory; None for the owner's.
            remove: A directory that is removed when the process has ended.
            keep_open: File descriptors that it inherits.
            umask: Permissions that its files do not get; -1 for the owner's.
            on_line: Called with each line of its output, from a thread of its own.

        Raises:
            OSError: The program cannot be run; the text says why.
        """
        # The guard, which runs this file, has no packages.
        from batchery.fork_gate import fork_gate

        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._lifeline, theirs = socket.socketpair()
        # A fork of the owner must not keep the process alive.
        fork_gate.keep_private(self._lifeline)
        with theirs:
            # Isolated and without site: quick to start, and no package can get in the way.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(remove or ""), *command],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment,
                pass_fds=keep_open,
                umask=umask,
                start_new_session=True,
                encoding="utf-8",
                errors="replace",
            )
        self._pump = threading.Thread(target=self._read, name="batchery-output", daemon=True)
        self._pump.start()
        pid = self._lifeline.recv(32)
        if not pid:
            self.wait()
            raise OSError(self.tail(1) or f"cannot run {command[0]}")
        #: Process id of the process itself, not of its guard.
        self.pid = int(pid)

    def poll(self) -> int | None:
        """Its exit code, 128 + n after signal n; None while it runs."""
        return self._guard.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits for its end; returns its exit code.

        Raises:
            TimeoutError: It still runs after `timeout_s` seconds.
        """
        try:
            code = self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s") from None
        self._lifeline.close()
        self._pump.join(DRAIN_S)
        if not self._pump.is_alive() and self._guard.stdout:
            self._guard.stdout.close()
        return code

    def send(self, signum: int) -> None:
        """Sends it a signal; does nothing if it has ended already."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def stop(self, timeout_s: float | None = None) -> int:
        """Asks it to end and waits; kills it after `timeout_s`. Returns its exit code."""
        self.send(signal.SIGTERM)
        try:
            return self.wait(timeout_s)
        except TimeoutError:
            return self.kill()

    def kill(self) -> int:
        """Kills it and the rest of its process group; returns its exit code."""
        self.send(signal.SIGKILL)
        return self.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its output, at most that many lines."""
        return "\n".join(list(self._tail)[-lines:])

    def _read(self) -> None:
        assert self._guard.stdout is not None
        for line in self._guard.stdout:
            self._tail.append(line.rstrip("\n"))
            if self._on_line is None:
                continue
            try:
                self._on_line(self._tail[-1])
            except Exception:  # noqa: BLE001
                # Reading must go on even if the terminal is gone, or the process would block.
                self._on_line = None


def python_command() -> list[str]:
    """This interpreter, with the working directory on its path only if it is on our own.

    With `-c` or `-m` it would come first: files there, such as `queue.py`, would hide Python's own,
    which the `celery` command finds.
    """
    with contextlib.suppress(OSError):  # The directory is gone.
        if not {"", os.getcwd()}.isdisjoint(sys.path):
            return [sys.executable]
    return [sys.executable, "-P"]


def die_with_parent() -> None:
    """Has Linux kill this process when the thread that has started it ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _guard(remove: str, command: list[str]) -> int:
    """Runs a process until it or its owner ends; returns its exit code."""
    lifeline = socket.socket(fileno=0)
    try:
        # Descriptors stay open, because those that the guard has inherited are for the process.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            close_fds=False,
            start_new_session=True,
            # If the guard is killed as well, nobody else is left to end the process.
            preexec_fn=die_with_parent,  # noqa: PLW1509 (there are no threads yet)
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)  # noqa: T201
        return 127

    def kill_group() -> None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    def watch() -> None:
        with contextlib.suppress(OSError):
            lifeline.send(str(process.pid).encode())
            lifeline.recv(1)
        kill_group()

    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    kill_group()
    if remove:
        shutil.rmtree(remove, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1], sys.argv[2:]))

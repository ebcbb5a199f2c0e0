"""A process that ends with its owner, even where the owner is killed with `kill -9`.

A shell leads the process's group, and reads from a pipe that the owner alone holds open. Its end
means that the owner is gone, or has let go: then the shell kills the group, itself included. So any
thread may start the process, and it works the same on Linux and macOS.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from batchery.fork_gate import fork_gate

#: Number of last lines of output that are kept for error messages.
TAIL_LINES = 1_000

#: How long to wait for the last output of a dead process, in seconds; later output is lost.
DRAIN_S = 2.0

#: What the shell does. What goes to all processes of a terminal is not for it.
GUARD = """trap '' HUP INT TERM; read -r _; test -z "$1" || /bin/rm -rf -- "$1"; kill -KILL 0"""


class GuardedProcess(subprocess.Popen[str]):
    """A running process that cannot outlive its owner.

    It is in a process group of its own. So a Ctrl-C in the terminal reaches only the owner, which
    stops its processes in the right order.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        remove: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        """Starts the process.

        Args:
            command: Program and arguments; the program as an absolute path.
            remove: A directory that is removed when the process has ended.
            on_line: Called with each line of its output, from a thread of its own.
            options: Of `subprocess.Popen`, such as `env` and `cwd`.

        Raises:
            OSError: The program cannot be run; the text says why.
        """
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        shell = ["/bin/sh", "-c", GUARD, "batchery-guard", str(remove or "")]
        self._guard = subprocess.Popen(shell, stdin=subprocess.PIPE, process_group=0)
        # A fork of the owner must not keep the process alive.
        fork_gate.keep_private(cast(Any, self._guard.stdin))
        try:
            super().__init__(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=self._guard.pid,
                encoding="utf-8",
                errors="replace",
                **options,
            )
        except OSError:
            self._guard.communicate()
            raise
        self._pump = threading.Thread(target=self._read, name="batchery-output", daemon=True)
        self._pump.start()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, and ends what it has started; returns its exit code, -n of signal n.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        code = super().wait(timeout)
        self._guard.communicate()
        self._pump.join(DRAIN_S)
        if self.stdout and not self._pump.is_alive():
            self.stdout.close()
        return code

    def kill(self) -> None:
        """Kills it and the rest of its process group, and waits."""
        super().kill()
        self.wait()

    def stop(self, timeout_s: float | None = None) -> int:
        """Asks it to end and waits; kills it after `timeout_s`. Returns its exit code."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(timeout_s)
        self.kill()
        return self.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its output, at most that many lines."""
        return "\n".join(list(self._tail)[-lines:])

    def _read(self) -> None:
        for line in self.stdout or ():
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

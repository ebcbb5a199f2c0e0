"""One worker process of the system under test."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil

from batchery_worker.devstack.guarded_process import GuardedProcess


class Member:
    """A `celery worker` that may be killed and stopped; it cannot outlive the harness."""

    def __init__(self, name: str, pool: str, folder: Path) -> None:
        """Starts it.

        Args:
            name: Of the node and of its log.
            pool: What runs its ordinary tasks.
            folder: Where the module `chaos_app` is, and the log goes.
        """
        self.name = name
        self.pool = pool
        #: It consumes.
        self.is_ready = False
        #: It was stopped by a signal, and not continued.
        self.is_stopped = False
        #: It was told to end, so that its end is no surprise.
        self.is_leaving = False
        self._log = (folder / f"{name}.log").open("a", encoding="utf-8")
        # These variables would outrank the app's own configuration.
        clean = ["/usr/bin/env", "-u", "CELERY_BROKER_URL", "-u", "CELERY_RESULT_BACKEND"]
        celery = [str(Path(sys.executable).with_name("celery")), "-A", "chaos_app", "worker"]
        options = ["-l", "INFO", "-P", pool, "-c", "2", "-n", f"{name}@chaos"]
        self._process = GuardedProcess(
            [*clean, *celery, *options, "--without-gossip"],
            cwd=folder,
            on_line=self._on_line,
        )

    @property
    def pid(self) -> int:
        """Process id of its main process."""
        return self._process.pid

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self._process.tail(3)

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def devices(self) -> list[int]:
        """Process ids of its devices that are alive."""
        return self._started_with("batchery_worker.device")

    def children(self) -> list[int]:
        """Process ids of its pool's processes that are alive; only prefork has any."""
        return self._started_with("chaos_app")

    def stop(self, *, with_others: bool) -> None:
        """Stops it where it is, as a machine does that has no time for it.

        Args:
            with_others: Its devices and its pool's processes, too.
        """
        self.is_stopped = True
        for pid in [self.pid, *(self._others() if with_others else ())]:
            _send(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues it, and the processes that it started."""
        self.is_stopped = False
        for pid in [*self._others(), self.pid]:
            _send(pid, signal.SIGCONT)

    def leave(self) -> None:
        """Asks it to end in an orderly way."""
        self.is_leaving = True
        self.go_on()
        _send(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kills its main process, and only that."""
        self.is_leaving = True
        _send(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills what is left of it, and closes its log."""
        self._process.kill()
        self._log.close()

    def _others(self) -> list[int]:
        return [*self.devices(), *self.children()]

    def _started_with(self, argument: str) -> list[int]:
        """The processes that it started, with this on their command line."""
        found = []
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.Error):
                    if argument in each.cmdline():
                        found.append(each.pid)
        return found

    def _on_line(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()
        self.is_ready = self.is_ready or line.endswith(" ready.")


def _send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)

"""When a device process has served long enough: Celery's `--max-tasks-per-child` and its like."""

import os
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What a device process may do before a fresh one takes its place; None for no limit."""

    #: Jobs that it has answered, whether they succeeded or not.
    max_jobs: int | None = None
    #: Main memory that it holds, in KiB; not that of its GPU.
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
    """Main memory that a process holds now, in KiB; None where the system does not say so.

    Linux tells it in a file, which costs some microseconds. Elsewhere it would cost a process.
    """
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // KIB
    except (OSError, ValueError, IndexError):
        return None

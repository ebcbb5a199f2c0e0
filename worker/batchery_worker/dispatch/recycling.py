"""When a device process has served long enough, and a fresh one takes its place."""

from dataclasses import dataclass

from batchery_worker.memory import KIB, resident_kib


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

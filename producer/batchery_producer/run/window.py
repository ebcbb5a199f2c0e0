"""The window: which jobs are in flight, and never more than a fixed number of them. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where the result of a job belongs.

    Attributes:
        line: Of the input, from 1.
        id: The caller's.
        source: Number of the input's file that the line is in, from 0.
        pack: How many items the job has; 0 if it is not packed.
    """

    line: int
    id: Any
    source: int = 0
    pack: int = 0


class Window:
    """Jobs in flight, oldest first; a job's item is not kept."""

    def __init__(self, size: int) -> None:
        """Starts empty.

        Args:
            size: Most jobs in flight, at least 1.

        Raises:
            ValueError: It is less.
        """
        if size < 1:
            raise ValueError(f"window of {size} jobs: must be 1 or more")
        self.size = size
        self._jobs: dict[str, Place] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[str]:
        """The ids of the jobs in flight, oldest first."""
        return iter(self._jobs)

    @property
    def room(self) -> int:
        """How many jobs may still be sent."""
        return self.size - len(self._jobs)

    def add(self, jobs: Mapping[str, Place]) -> None:
        """Notes jobs that are about to be sent, by task id.

        Raises:
            ValueError: There is no room for them.
        """
        if len(jobs) > self.room:
            raise ValueError(f"{len(jobs)} jobs for a window with room for {self.room}")
        self._jobs.update(jobs)

    def settle(self, task_id: str) -> Place:
        """Takes out a job that has ended.

        Raises:
            KeyError: It is not in flight.
        """
        return self._jobs.pop(task_id)

"""Progress and summary of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Ending(Enum):
    """How a run ended; the value is the exit code of `batchery submit`."""

    SUCCEEDED = 0
    SOME_FAILED = 1
    GAVE_UP = 3
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Progress of a run.

    Attributes:
        submitted: Number of jobs that were sent.
        succeeded: Number of results that were written.
        failed: Number of jobs that failed, and of lines that could not become jobs.
        in_flight: Number of jobs that were sent and have not ended.
        elapsed_s: Time since the run began, in seconds.
        rate: Results and failures per second, over the last seconds.
        total: Number of lines of the input; an estimate by bytes until it is read, None for a pipe.
        batch_size: Mean size of a job's batch, in items; 0 while unknown.
        kinds: Number of failures by kind, the most frequent first.
    """

    submitted: int
    succeeded: int
    failed: int
    in_flight: int
    elapsed_s: float
    rate: float
    total: int | None
    batch_size: float = 0.0
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Number of lines that succeeded or failed."""
        return self.succeeded + self.failed

    @property
    def left_s(self) -> float | None:
        """Estimate of the time left, in seconds."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0) / self.rate


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a run.

    Attributes:
        ending: How the run ended.
        submitted: Number of jobs that were sent.
        succeeded: Number of results that were written.
        failed: Number of jobs that failed, and of lines that could not become jobs; all are in the
            file of failures.
        in_flight: Number of jobs that were left in the queue or with a worker.
        seconds: Duration of the run.
        queue: Queue to which the jobs were sent.
        message: Why the run ended early; empty if it did not.
        before: Number of lines that an earlier process of the same run had finished.
        results: Name of the file with the results so far; empty if there is none.
        errors: Name of the file of failures; empty if there is none.
        first_failure: Where the first failure was, and why.
    """

    ending: Ending
    submitted: int
    succeeded: int
    failed: int
    in_flight: int
    seconds: float
    queue: str
    message: str = ""
    before: int = 0
    results: str = ""
    errors: str = ""
    first_failure: str = ""

    @property
    def rate(self) -> float:
        """Lines finished per second, over the whole run."""
        return (self.succeeded + self.failed) / self.seconds if self.seconds else 0.0


def duration(seconds: float) -> str:
    """A duration as `0:42`, `12:05` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

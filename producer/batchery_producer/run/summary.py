"""What is told of a run: how it is going, and how it ended."""

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
    """A run as it is now.

    Attributes:
        submitted: Jobs sent.
        succeeded: Results written.
        failed: Jobs that failed, and lines that became no job.
        in_flight: Jobs sent whose result has not come.
        elapsed_s: Since the run began, in seconds.
        rate: Results and failures per second, over the last seconds.
        total: Lines of the input; an estimate by bytes until it is read, None where it is a pipe.
        batch_size: How many items shared the batch of a job, in the mean; 0 while nobody knows.
        kinds: How many failures there are of each kind, the most frequent first.
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
        """Lines that are finished, either way."""
        return self.succeeded + self.failed

    @property
    def left_s(self) -> float | None:
        """Estimate of the time left, in seconds."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0) / self.rate


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has done.

    Attributes:
        ending: How it ended.
        submitted: Jobs sent.
        succeeded: Results written.
        failed: Jobs that failed, and lines that became no job; all in the file of failures.
        in_flight: Jobs that were left in the queue or with a worker.
        seconds: How long it took.
        queue: Where the jobs went.
        message: Why it ended early; empty if it did not.
        before: Lines that an earlier process of the same run had finished.
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

    @property
    def rate(self) -> float:
        """Lines finished per second, over the whole run."""
        return (self.succeeded + self.failed) / self.seconds if self.seconds else 0.0


def duration(seconds: float) -> str:
    """A duration as `0:42`, `12:05` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

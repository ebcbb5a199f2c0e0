"""Options, progress and summary of a run."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from batchery.protocol.headers import with_tenant

logger = logging.getLogger(__name__)

#: Jobs in flight: some batches for each of several devices, and still little memory.
WINDOW = 1024


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
        failed: Number of jobs that failed, and of rows that could not become jobs.
        in_flight: Number of jobs that were sent and have not ended.
        rate: Results and failures per second, over the whole run.
        total: Number of rows of the input; an estimate by bytes until it is read, None for a pipe.
    """

    submitted: int
    succeeded: int
    failed: int
    in_flight: int
    rate: float
    total: int | None

    @property
    def done(self) -> int:
        """Number of rows that succeeded or failed."""
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
        failed: Number of jobs that failed, and of rows that could not become jobs; all are in the
            file of failures.
        in_flight: Number of jobs that were left in the queue or with a worker.
        seconds: Duration of the run.
        queue: Queue to which the jobs were sent.
        message: Why the run ended early.
        before: Number of rows that an earlier process of the same run had finished.
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
        """Rows finished per second, over the whole run."""
        return (self.succeeded + self.failed) / self.seconds if self.seconds else 0.0


def duration(seconds: float) -> str:
    """A duration as `0:42`, `12:05` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Options of `submit_file`.

    Attributes:
        queue: By default as the app routes the task; if the app does not know it, the task's name.
        keywords: Keyword arguments of every job.
        priority: Celery's priority of the jobs; by default that of the task.
        tenant: For whom the jobs run; by default for nobody in particular.
        errors: Gets one line per failure; by default `<output>.errors.jsonl`; in the current
            directory and named after the input, if results go to standard output.
        overwrite: Replace an output that is there.
        resume: Finish an output that is there: only what is missing is submitted. Jobs of the
            earlier run that are still in flight are awaited, not sent again.
        window: Maximum number of jobs in flight.
        expires_s: Jobs that no worker has begun by then, in seconds, fail as revoked.
        timeout_s: Give up when no result has come for so long, in seconds; by default never.
        progress: Called several times a second, on the caller's thread.
        stop: Asked several times a second; True ends the run. Jobs in flight stay where they are.
        began: Gets a line that says what is read, when the first row was.
        notice: Gets lines for the user; one when nothing comes for a while.
        format: Of the input; by default as each name ends, and JSON lines for standard input.
        field: Holds the item: a key (`meta.title` looks inside `meta`) or a column. By default
            `text`, or the only field that is a string.
        id_field: Holds the caller's id; by default `id` or `custom_id` if the first row has one,
            otherwise the number of the row is the id.
        limit: Read only so many rows.
    """

    queue: str | None = None
    keywords: Mapping[str, Any] | None = None
    priority: int | None = None
    tenant: str | None = None
    errors: str | Path | None = None
    overwrite: bool = False
    resume: bool = False
    window: int = WINDOW
    expires_s: float | None = None
    timeout_s: float | None = None
    progress: Callable[[Snapshot], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False
    began: Callable[[str], None] = lambda _: None
    notice: Callable[[str], None] = logger.warning
    format: str | None = None
    field: str | None = None
    id_field: str | None = None
    limit: int | None = None

    @property
    def sending(self) -> dict[str, Any]:
        """The options of `apply_async` for all jobs, but for the queue.

        Raises:
            InvalidItem: The tenant is no name.
        """
        given = {"priority": self.priority, "expires": self.expires_s}
        known = {name: value for name, value in given.items() if value is not None}
        return with_tenant(known, self.tenant)

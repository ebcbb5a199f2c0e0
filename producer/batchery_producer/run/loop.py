"""A bulk run: submits a dataset through a window, and writes down what comes back."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from celery import uuid

from batchery.errors import BatcheryError
from batchery_producer.files.records import Broken, Record, RowKey
from batchery_producer.publishing.publisher import Publisher
from batchery_producer.results.answers import Answer, joined
from batchery_producer.results.collector import Collector
from batchery_producer.retry import GaveUp, Interrupted
from batchery_producer.run.output import Output
from batchery_producer.run.reader import Feed
from batchery_producer.run.report import Figures
from batchery_producer.run.summary import Ending, Snapshot, Summary
from batchery_producer.stream import NewJob, Stream, Window

logger = logging.getLogger(__name__)

#: What "now" means for a rate, in seconds: shorter jumps with every batch, longer hides a change.
SPAN_S = 15.0

#: Least time between two samples, in seconds; bounds how many are kept.
SAMPLE_S = 0.5

#: Error type of lines that become no job, in the file of failures.
INVALID_LINE = "InvalidLine"

#: And of jobs whose result fits no line of the output.
RESULT_TOO_LARGE = "ResultTooLarge"


class Rate:
    """How fast a count grows."""

    def __init__(self, now_s: float) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now_s, 0)])

    def per_second(self, now_s: float, count: int) -> float:
        """Notes the count, and says how much it has grown per second lately.

        Args:
            now_s: Time in seconds, from any start; never less than at the call before.
            count: What is counted, in all.
        """
        samples = self._samples
        start_s, before = samples[0]
        if now_s - samples[-1][0] >= SAMPLE_S:
            samples.append((now_s, count))
            while len(samples) > 2 and now_s - samples[1][0] >= SPAN_S:
                samples.popleft()
        return (count - before) / (now_s - start_s) if now_s > start_s else 0.0


class Stopped(BatcheryError):
    """A run was to end at the first failure."""


class Run:
    """One run; everything it uses is handed to it."""

    def __init__(
        self,
        feed: Feed[Record | Broken],
        publisher: Publisher,
        collector: Collector,
        output: Output,
        window: Window[str, RowKey, Answer],
        *,
        task_id: Callable[[Record], str] = lambda _: uuid(),
        lost: Callable[[Sequence[str]], Sequence[str]] = lambda task_ids: task_ids,
        total: Callable[[], int | None] = lambda: None,
        keep_results: bool = False,
        timeout_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        stop_at_failure: bool = False,
        progress: Callable[[Snapshot], None] = lambda _: None,
        explain: Callable[[], str] = lambda: "",
        notice: Callable[[str], None] = logger.warning,
        figures: Figures | None = None,
    ) -> None:
        """Prepares.

        Args:
            feed: The input.
            publisher: Sends jobs.
            collector: Fetches results.
            output: Is open.
            window: Is empty; bounds the jobs in flight.
            task_id: Names the job of a record.
            lost: Says which jobs must be sent; the others are on their way from an earlier run.
            total: Says how many lines the input has, as far as that is known.
            keep_results: Leave results in the backend, where they expire.
            timeout_s: Give up when no job has ended for so long, in seconds; None never does.
            stop: Asked several times a second; True ends the run.
            stop_at_failure: End the run when a job has failed, or a line become no job.
            progress: Called several times a second.
            explain: Says why nothing may be coming.
            notice: Gets a line for the user.
            figures: Of the run, for whoever wants them.
        """
        self._feed = feed
        self._publisher = publisher
        self._collector = collector
        self._output = output
        self._window = window
        self._task_id = task_id
        self._lost = lost
        self._total = total
        self._stop = stop
        self._stop_at_failure = stop_at_failure
        self._progress = progress
        self._figures = figures or Figures()
        self._submitted = self._succeeded = self._failed = 0
        self._began_s = time.monotonic()
        self._rate = Rate(self._began_s)
        self._stopped_by: tuple[RowKey, str] | None = None
        self._stream = Stream(
            collector,
            window,
            self,
            publisher,
            missing=self._not_in_flight,
            keep_results=keep_results,
            timeout_s=timeout_s,
            explain=explain,
            notice=notice,
        )

    def run(self) -> Summary:
        """Runs to the end of the input, or until it is stopped.

        Raises:
            DatasetError: The input is unusable, or the output cannot be written any more. What was
                written stays.
        """
        ending, message = Ending.SUCCEEDED, ""
        try:
            while not self._stream.is_done:
                self._step()
        except Interrupted:
            ending, message = Ending.INTERRUPTED, "interrupted"
            with suppress(GaveUp, Interrupted):
                self._note_all(self._sweep())  # What is ready now, and no more.
        except GaveUp as error:
            ending, message = Ending.GAVE_UP, str(error)
        except Stopped as error:
            ending, message = Ending.SOME_FAILED, str(error)
            with suppress(GaveUp, Interrupted):
                self._note_all(self._sweep())
        finally:
            with suppress(GaveUp, Interrupted):
                self._flush()
        self._progress(self._snapshot())
        if ending is Ending.SUCCEEDED and self._failed:
            ending = Ending.SOME_FAILED
        return Summary(
            ending,
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._window),
            self._elapsed_s(),
            self._publisher.queue,
            message,
        )

    def _step(self) -> None:
        if self._stop():
            raise Interrupted("asked to stop")
        self._note_all(self._stream.step())
        self._progress(self._snapshot())
        if self._stopped_by is not None:
            row, why = self._stopped_by
            raise Stopped(f"stopped at {self._output.place(row)}: {why}")
        if over := self._stream.stalled():
            raise GaveUp(over)

    @property
    def exhausted(self) -> bool:
        """As `JobSource.exhausted`."""
        return self._feed.exhausted

    def take(self, maximum: int, wait_s: float) -> list[NewJob[RowKey]]:
        """As `JobSource.take`; rows that become no job fail here."""
        jobs = []
        for entry in self._feed.take(maximum, wait_s):
            if isinstance(entry, Broken):
                self._fail(RowKey(entry.line, entry.id, entry.source), INVALID_LINE, entry.reason)
                continue
            self._figures.read(entry.item if entry.pack else [entry.item])
            row = RowKey(entry.line, entry.id, entry.source, entry.pack)
            jobs.append(NewJob(self._task_id(entry), entry.item, entry.pack, row))
        return jobs

    def _not_in_flight(self, task_ids: Sequence[str]) -> Sequence[str]:
        lost = self._lost(task_ids)
        self._submitted += len(lost)
        self._figures.sent(self._elapsed_s(), lost)
        return lost

    def _sweep(self) -> Iterator[tuple[str, RowKey, Answer]]:
        return self._stream.take(self._collector.sweep())

    def _note_all(self, ended: Iterable[tuple[str, RowKey, Answer]]) -> None:
        for task_id, row, answer in ended:
            if self._note(task_id, row, answer):
                self._stream.discard(task_id)
        if self._stream.flush_is_due:
            self._flush()

    def _note(self, task_id: str, row: RowKey, answer: Answer) -> bool:
        """Adds an answer to the output; says whether the backend may forget it."""
        self._figures.ended(self._elapsed_s(), task_id, answer.batch_size)
        if row.pack:
            answer = joined(answer, row.pack)
        if answer.error is not None:
            self._fail(row, *answer.error)
        elif refused := self._output.result(row, answer.value):
            where = f"the result backend keeps it under {task_id} until it expires"
            self._fail(row, RESULT_TOO_LARGE, f"{refused}; {where}")
            return False
        else:
            self._succeeded += 1
            self._figures.succeeded(self._elapsed_s())
        return True

    def _fail(self, row: RowKey, type_: str, message: str) -> None:
        self._failed += 1
        self._output.failure(row, type_, message)
        where = self._output.place(row)
        self._figures.failed(self._elapsed_s(), where, type_, message)
        if self._stop_at_failure:
            self._stopped_by = self._stopped_by or (row, f"{type_}: {message}")

    def _flush(self) -> None:
        """Writes first and forgets then: a result is always in one of the two places."""
        self._output.flush()
        self._stream.flush()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        done = self._succeeded + self._failed
        return Snapshot(
            self._submitted,
            self._succeeded,
            self._failed,
            len(self._window),
            now_s - self._began_s,
            self._rate.per_second(now_s, done),
            self._total(),
            self._figures.batch_sizes.mean,
            {kind.name: kind.count for kind in self._figures.kinds},
        )

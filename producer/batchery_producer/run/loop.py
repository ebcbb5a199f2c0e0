"""A bulk run: submits a dataset through a window, and writes down what comes back."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby

from celery import uuid

from batchery.errors import BatcheryError
from batchery_producer.diagnosis import Silence
from batchery_producer.files.records import Broken, Record
from batchery_producer.publishing.publisher import Publisher
from batchery_producer.results.answers import Answer, header_of, joined
from batchery_producer.results.collector import Collector
from batchery_producer.retry import GaveUp, Interrupted
from batchery_producer.run.output import Output
from batchery_producer.run.reader import Feed
from batchery_producer.run.report import Figures
from batchery_producer.run.summary import Ending, Snapshot, Summary
from batchery_producer.run.window import Place, Window

logger = logging.getLogger(__name__)

#: What "now" means for a rate, in seconds: shorter jumps with every batch, longer hides a change.
SPAN_S = 15.0

#: Least time between two samples, in seconds; bounds how many are kept.
SAMPLE_S = 0.5

#: Most jobs that are sent at a time; between two times results are collected.
SEND_CHUNK = 1024

#: Part of the window that must be free for jobs to be sent while others are in flight: a few jobs
#: cost as much as many.
SEND_SHARE = 1 / 8

#: Longest time that the loop sleeps, in seconds: so late is it to see that it shall stop.
LONGEST_SLEEP_S = 0.25

#: How long it waits for results while more input may come at any moment, in seconds.
SLOW_INPUT_S = 0.02

#: How often results are written through to the disk and removed from the backend, in seconds.
FLUSH_S = 0.5

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
        window: Window,
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
        self._keep_results = keep_results
        self._stop = stop
        self._stop_at_failure = stop_at_failure
        self._progress = progress
        self._silence = Silence(explain, notice, timeout_s)
        self._figures = figures or Figures()
        self._submitted = self._succeeded = self._failed = 0
        self._written: list[str] = []
        self._began_s = self._flushed_s = time.monotonic()
        self._rate = Rate(self._began_s)
        self._stopped_by: tuple[Place, str] | None = None

    def run(self) -> Summary:
        """Runs to the end of the input, or until it is stopped.

        Raises:
            DatasetError: The input is unusable, or the output cannot be written any more. What was
                written stays.
        """
        ending, message = Ending.SUCCEEDED, ""
        try:
            while not (self._feed.exhausted and not self._window):
                self._step()
        except Interrupted:
            ending, message = Ending.INTERRUPTED, "interrupted"
            with suppress(GaveUp, Interrupted):
                self._take(self._collector.sweep())  # What is ready now, and no more.
        except GaveUp as error:
            ending, message = Ending.GAVE_UP, str(error)
        except Stopped as error:
            ending, message = Ending.SOME_FAILED, str(error)
            with suppress(GaveUp, Interrupted):
                self._take(self._collector.sweep())
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
        sent = self._submit()
        self._take(self._collector.collect(0 if sent else self._patience_s()))
        self._progress(self._snapshot())
        if self._stopped_by is not None:
            place, why = self._stopped_by
            raise Stopped(f"stopped at {self._output.place(place)}: {why}")
        if self._window and (over := self._silence.check()):
            raise GaveUp(over)

    def _patience_s(self) -> float:
        """How long to wait for results."""
        if not self._window:
            return 0
        return LONGEST_SLEEP_S if self._feed.exhausted or not self._has_room else SLOW_INPUT_S

    @property
    def _has_room(self) -> bool:
        """Whether it is worth while to send jobs."""
        least = min(self._window.size * SEND_SHARE, SEND_CHUNK)
        return self._window.room > 0 and (not self._window or self._window.room >= least)

    def _submit(self) -> int:
        if not self._has_room or self._feed.exhausted:
            return 0
        # With nothing to wait for but the input, it may take its time.
        wait_s = 0 if self._window else LONGEST_SLEEP_S
        entries = self._feed.take(min(self._window.room, SEND_CHUNK), wait_s)
        for entry in entries:
            if isinstance(entry, Broken):
                self._fail(Place(entry.line, entry.id, entry.source), INVALID_LINE, entry.reason)
        self._send([entry for entry in entries if isinstance(entry, Record)])
        return len(entries)

    def _send(self, records: Sequence[Record]) -> None:
        if not records:
            return
        if not self._window:
            self._silence.heard()
        jobs = {self._task_id(record): record for record in records}
        # In flight before they are sent: an attempt that fails may have sent them all the same.
        places = {
            id_: Place(each.line, each.id, each.source, each.pack) for id_, each in jobs.items()
        }
        self._window.add(places)
        self._collector.expect(jobs)
        lost = self._lost(list(jobs))
        self._submitted += len(lost)
        for record in records:
            self._figures.read(record.item if record.pack else [record.item])
        self._figures.sent(self._elapsed_s(), lost)
        for pack, ids in groupby(lost, key=lambda id_: jobs[id_].pack):
            headers = header_of(pack, self._collector.headers) if pack else None
            self._publisher.send([(id_, jobs[id_].item) for id_ in ids], headers)

    def _take(self, ended: Iterable[tuple[str, Answer]]) -> None:
        for task_id, answer in ended:
            if self._note(task_id, self._window.settle(task_id), answer):
                self._written.append(task_id)
            self._silence.heard()
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self._flush()

    def _note(self, task_id: str, place: Place, answer: Answer) -> bool:
        """Adds an answer to the output; says whether the backend may forget it."""
        self._figures.ended(self._elapsed_s(), task_id, answer.batch_size)
        if place.pack:
            answer = joined(answer, place.pack)
        if answer.error is not None:
            self._fail(place, *answer.error)
        elif refused := self._output.result(place, answer.value):
            where = f"the result backend keeps it under {task_id} until it expires"
            self._fail(place, RESULT_TOO_LARGE, f"{refused}; {where}")
            return False
        else:
            self._succeeded += 1
            self._figures.succeeded(self._elapsed_s())
        return True

    def _fail(self, place: Place, type_: str, message: str) -> None:
        self._failed += 1
        self._output.failure(place, type_, message)
        where = self._output.place(place)
        self._figures.failed(self._elapsed_s(), where, type_, message)
        if self._stop_at_failure:
            self._stopped_by = self._stopped_by or (place, f"{type_}: {message}")

    def _flush(self) -> None:
        """Writes first and forgets then: a result is always in one of the two places."""
        self._output.flush()
        self._flushed_s = time.monotonic()
        if not self._keep_results:
            self._collector.forget(self._written)
        self._written.clear()

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

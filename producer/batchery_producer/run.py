"""A bulk run: submits a dataset through a window, and writes down what comes back."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from celery import uuid

from batchery_producer.collect import Answer, Collector, Pace
from batchery_producer.feed import Feed
from batchery_producer.output import Output
from batchery_producer.patience import GaveUp, Interrupted
from batchery_producer.publish import Publisher
from batchery_producer.rate import Rate
from batchery_producer.records import Broken, Record
from batchery_producer.summary import Ending, Snapshot, Summary
from batchery_producer.window import Place, Window

logger = logging.getLogger(__name__)

#: Most jobs that are sent at a time; between two times results are collected.
SEND_CHUNK = 256

#: Longest time that the loop sleeps, in seconds: so late is it to see that it shall stop.
LONGEST_SLEEP_S = 0.25

#: How often results are written through to the disk and removed from the backend, in seconds.
FLUSH_S = 0.5

#: Silence after which the run says once what it is waiting for, in seconds.
HINT_S = 20.0

#: Error type of lines that become no job, in the file of failures.
INVALID_LINE = "InvalidLine"


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
        total: Callable[[], int | None] = lambda: None,
        keep_results: bool = False,
        timeout_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[Snapshot], None] = lambda _: None,
        explain: Callable[[], str] = lambda: "",
        notice: Callable[[str], None] = logger.warning,
    ) -> None:
        """Prepares.

        Args:
            feed: The input.
            publisher: Sends jobs.
            collector: Fetches results.
            output: Is open.
            window: Is empty; bounds the jobs in flight.
            total: Says how many lines the input has, as far as that is known.
            keep_results: Leave results in the backend, where they expire.
            timeout_s: Give up when no job has ended for so long, in seconds; None never does.
            stop: Asked several times a second; True ends the run.
            progress: Called several times a second.
            explain: Says why nothing may be coming.
            notice: Gets a line for the user.
        """
        self._feed = feed
        self._publisher = publisher
        self._collector = collector
        self._output = output
        self._window = window
        self._total = total
        self._keep_results = keep_results
        self._timeout_s = timeout_s
        self._stop = stop
        self._progress = progress
        self._explain = explain
        self._notice = notice
        self._pace = Pace()
        self._submitted = self._succeeded = self._failed = 0
        self._written: list[str] = []
        self._began_s = self._swept_s = self._flushed_s = self._heard_s = time.monotonic()
        self._sweep_at_s = self._began_s
        self._rate = Rate(self._began_s)
        self._hinted = False

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
                self._sweep()  # What is ready now is taken; nothing is waited for.
        except GaveUp as error:
            ending, message = Ending.GAVE_UP, str(error)
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
            time.monotonic() - self._began_s,
            self._publisher.queue,
            message,
        )

    def _step(self) -> None:
        if self._stop():
            raise Interrupted("asked to stop")
        sent = self._submit(wait_s=0)
        if time.monotonic() >= self._sweep_at_s:
            self._sweep()
        self._progress(self._snapshot())
        self._check_silence()
        if not sent:
            self._rest()

    def _rest(self) -> None:
        """Waits for the next sweep; for input, if there is room for it."""
        rest_s = min(self._sweep_at_s - time.monotonic(), LONGEST_SLEEP_S)
        if not self._window:
            rest_s = LONGEST_SLEEP_S
        if rest_s <= 0:
            return
        if self._window.room and not self._feed.exhausted:
            self._submit(wait_s=rest_s)
        else:
            time.sleep(rest_s)

    def _submit(self, wait_s: float) -> int:
        room = min(self._window.room, SEND_CHUNK)
        if not room or self._feed.exhausted:
            return 0
        entries = self._feed.take(room, wait_s)
        for entry in entries:
            if isinstance(entry, Broken):
                self._failed += 1
                self._output.failure(entry.id, entry.line, INVALID_LINE, entry.reason)
        self._send([entry for entry in entries if isinstance(entry, Record)])
        return len(entries)

    def _send(self, records: Sequence[Record]) -> None:
        if not records:
            return
        if not self._window:
            self._heard_s = time.monotonic()
        jobs = {uuid(): record for record in records}
        # In flight before they are sent: an attempt that fails may have sent them all the same.
        self._window.add({id_: Place(record.line, record.id) for id_, record in jobs.items()})
        self._submitted += len(jobs)
        self._publisher.send([(id_, record.item) for id_, record in jobs.items()])

    def _sweep(self) -> None:
        began_s = time.monotonic()
        arrived = 0
        for task_id, answer in self._collector.ready(list(self._window)):
            self._note(self._window.settle(task_id), answer)
            self._written.append(task_id)
            arrived += 1
        now_s = time.monotonic()
        if arrived:
            self._heard_s, self._hinted = now_s, False
        if now_s - self._flushed_s >= FLUSH_S:
            self._flush()
        pause_s = self._pace.pause_s(
            in_flight=len(self._window),
            arrived=arrived,
            since_s=began_s - self._swept_s,
            sweep_s=now_s - began_s,
        )
        self._swept_s = began_s
        self._sweep_at_s = time.monotonic() + pause_s

    def _note(self, place: Place, answer: Answer) -> None:
        if answer.error is None:
            self._succeeded += 1
            self._output.result(place.id, place.line, answer.value)
        else:
            self._failed += 1
            self._output.failure(place.id, place.line, *answer.error)

    def _flush(self) -> None:
        """Writes first and forgets then: a result is always in one of the two places."""
        self._output.flush()
        self._flushed_s = time.monotonic()
        if not self._keep_results:
            self._collector.forget(self._written)
        self._written.clear()

    def _check_silence(self) -> None:
        if not self._window:
            return
        silent_s = time.monotonic() - self._heard_s
        if self._timeout_s is not None and silent_s > self._timeout_s:
            raise GaveUp(f"no result for {self._timeout_s:g} s: {self._explain()}")
        if silent_s > HINT_S and not self._hinted:
            self._hinted = True
            self._notice(f"no result for {silent_s:.0f} s: {self._explain()}")

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
        )

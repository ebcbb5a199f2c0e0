"""What runs a batch: a job of the gateway's queue that comes again until the batch is over.

Each time it goes on for some seconds, and then makes room for other batches. A batch's file is
read in slices of some hundred requests. The jobs of two slices are in flight at once, so that there
is always something in the queue. When all jobs of the first one have ended, its answers are written
as a part of the output file, under a name of its own, and it counts as ended: whoever takes the
batch up goes on behind it.
"""

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby
from typing import Any

from celery.utils.functional import chunks

from batchery.protocol.headers import with_tenant
from batchery.retry import RetryPolicy
from batchery_producer.answers import build_header
from batchery_producer.broker import REVOKE_CHUNK, BrokerConnection
from batchery_producer.collector import Collector
from batchery_producer.files.recovery import find_in_flight
from batchery_producer.gateway.batches.files import (
    FileIsGone,
    locate,
)
from batchery_producer.gateway.batches.requests import (
    EMBEDDINGS_URL,
    ENDPOINTS,
    Request,
    read_file,
    read_slice,
    write_line,
)
from batchery_producer.gateway.batches.shared import Shared
from batchery_producer.gateway.batches.store import (
    BatchError,
    BatchRecord,
    RequestCounts,
    SliceState,
    Status,
)
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Problem
from batchery_producer.publisher import Publisher

#: Slices in flight at once: while one is awaited, the next one is in the queue already.
AHEAD = 2

#: How long an attempt awaits results, in seconds; without any it ends sooner.
ATTEMPT_S = 3.0
IDLE_S = 0.5

#: After how long a batch of which nothing has come is looked at again, in seconds.
PAUSE_S = 2.0

#: How often an attempt looks whether its batch is still wanted, and shows that it goes on.
LOOK_S = 1.0

#: How long one look for results takes, in seconds.
COLLECT_S = 0.25

#: After so long without any result, in seconds, jobs are sent again that are in no queue and with
#: no worker: whoever sent them was killed meanwhile, or Redis has lost them.
STALL_S = 60.0

#: How much longer than the batch its jobs are worth running, in seconds, as clocks differ.
EXPIRY_GRACE_S = 60.0

#: How long sending may wait for space in a queue, in seconds; then another batch has its turn.
ROOM_WAIT_S = 1.0


class BatchRun:
    """An attempt to go on with a batch, for some seconds."""

    def __init__(self, context: Shared, record: BatchRecord) -> None:
        self._context, self._batches = context, context.batches
        self._record = record
        self._is_stalled = time.time() - record.progress_at > STALL_S
        self._looked_s = float("-inf")
        self._retries = RetryPolicy()
        self._collector = Collector(context.app, self._retries)
        #: The requests of the slices that are in flight, by number, and all of them by job.
        self._open: dict[int, list[Request]] = {}
        self._by_job: dict[str, Request] = {}

    def run(self) -> float | None:
        """Goes on with the batch.

        Returns:
            In how many seconds to go on again; None if it is over.

        Raises:
            BatcheryError: Try again.
            Problem: So is this.
        """
        with closing(self._collector):
            try:
                if self._record.status is Status.VALIDATING:
                    self._validate()
                pause_s = None if self._record.is_over else self._work()
            except FileIsGone as error:
                self._finish([BatchError(code="file_not_found", message=error.message)])
                return None
        if pause_s is None:
            self._finish()
        return pause_s

    def _validate(self) -> None:
        record, find = self._record, self._context.models.find
        kinds = ENDPOINTS[record.endpoint]
        with self._context.files.open(record.owner, record.input_file_id) as file:
            found = read_file(
                file, record.endpoint, lambda name: find(name, kinds).name, self._look
            )
        if found.errors:
            self._finish(found.errors)
            return
        counts = RequestCounts(total=found.requests)
        changes = {"model": found.model, "slices": found.slices, "request_counts": counts}

        def start(now: BatchRecord) -> BatchRecord:
            is_first = now.status is Status.VALIDATING
            return now.moved(Status.IN_PROGRESS, **changes) if is_first else now

        self._record = self._batches.change(record.id, start)

    def _work(self) -> float | None:
        """Sends and awaits requests; returns in how many seconds to go on, None after the last."""
        model = None
        with suppress(Problem):
            model = self._context.models.find(self._record.model, ENDPOINTS[self._record.endpoint])
        before, until_s = self._record.request_counts, time.monotonic() + ATTEMPT_S
        idle_s = time.monotonic() + IDLE_S
        while (number := len(self._record.ends)) < (last := self._record.last):
            for each in range(number, min(number + AHEAD, last)):
                if each not in self._open:
                    self._begin_slice(each, model)
            is_running = self._look()
            if not is_running or all(each.is_done for each in self._open[number]):
                self._end_slice(number)
            elif model is None:
                return PAUSE_S  # It may come back to the settings.
            elif time.monotonic() >= min(until_s, idle_s):
                self._show_progress(number)
                return 0 if self._record.request_counts != before else PAUSE_S
            else:
                for job_id, answer in self._collector.collect(COLLECT_S):
                    self._by_job[job_id].answers[job_id] = answer
                    idle_s = time.monotonic() + IDLE_S
        return None

    def _begin_slice(self, number: int, model: ServedModel | None) -> None:
        """Reads the requests of a slice, and sends their jobs unless somebody has."""
        record, app = self._record, self._context.app
        self._open[number] = list(read_slice(record, number, self._context.files, model))
        by_job = {job: each for each in self._open[number] for job in each.jobs}
        self._by_job |= by_job
        is_sent, may_send = number < record.sent, record.is_running and model is not None
        if is_sent or may_send:
            self._collector.expect(by_job)
        if not may_send or (is_sent and not self._is_stalled):
            return
        assert model is not None
        job_ids = list(by_job)
        if is_sent:
            pattern = re.compile(rb"%b-\d+-\d+" % record.id.encode())
            known = find_in_flight(app, model.queue, pattern, self._retries)
            job_ids = self._collector.find_missing(job_ids, known)
        # Whoever goes on if this process is killed looks which jobs are missing.
        self._change(sent=max(record.sent, number + 1), progress_at=0.0)
        self._publish(model, job_ids)
        self._change(progress_at=time.time())

    def _publish(self, model: ServedModel, job_ids: Sequence[str]) -> None:
        record = self._record
        left_s = max(record.expires_at - time.time(), 0)
        options = {"priority": record.priority, "expires": left_s + EXPIRY_GRACE_S}
        app = self._context.app
        with closing(BrokerConnection(app, self._retries, persistent=True)) as broker:
            publisher = Publisher(
                app,
                model.name,
                queue=model.queue,
                # As /v1/embeddings asks, so that its jobs share batches with these.
                keywords={"encoding": "base64"} if record.endpoint == EMBEDDINGS_URL else {},
                broker=broker,
                wait_s=ROOM_WAIT_S,
                **with_tenant(options, record.tenant),
            )
            jobs = [(each, self._by_job[each].jobs[each]) for each in job_ids]
            for count, group in groupby(jobs, key=lambda job: len(job[1])):
                publisher.send(list(group), build_header(count, self._collector.headers))

    def _show_progress(self, number: int) -> None:
        ended = [each.read_answer() for each in self._open[number] if each.is_done]
        failed = sum(each.error is not None for each in ended)
        state = SliceState(completed=len(ended) - failed, failed=failed)
        self._record = self._batches.change(
            self._record.id, lambda now: now.advanced(number, state, has_ended=False)
        )

    def _end_slice(self, number: int) -> None:
        """Writes what has become of the requests of a slice."""
        requests, storage = self._open.pop(number), self._context.files.storage
        jobs = [job for each in requests for job in each.jobs]
        if not self._record.is_running:
            self._stop(jobs)
        has_all = self._record.status is not Status.CANCELLING
        state, errors = SliceState(name=f"{number}-{secrets.token_hex(8)}"), list[bytes]()

        def write() -> Iterator[bytes]:
            for each in requests:
                if not each.is_done and not has_all:
                    continue
                line, usage = write_line(self._record, each)
                state.expired += not each.is_done
                if usage is None:
                    errors.append(line)
                    continue
                state.completed += 1
                state.input_tokens += usage["prompt_tokens"]
                state.output_tokens += usage.get("completion_tokens", 0)
                yield line

        output, error = (
            f"{locate(self._record.owner, each)}/{state.name}"
            for each in self._record.made_files.values()
        )
        state.output_bytes = storage.write(output, write())
        state.failed = len(errors)
        if errors:
            state.error_bytes = storage.write(error, errors)
        self._record = self._batches.change(
            self._record.id, lambda now: now.advanced(number, state, has_ended=True)
        )
        if state in self._record.ends:
            self._collector.forget(jobs)
        for job_id in jobs:
            del self._by_job[job_id]

    def _stop(self, jobs: Sequence[str]) -> None:
        """Takes what is there by now, and tells workers not to begin the rest."""
        for job_id, answer in self._collector.poll_all():
            self._by_job[job_id].answers[job_id] = answer
        control: Any = self._context.app.control
        awaited = iter([each for each in jobs if each in self._collector.awaited])
        for some in chunks(awaited, REVOKE_CHUNK):
            control.revoke(some)
        self._collector.drop(jobs)

    def _finish(self, errors: Sequence[BatchError] = ()) -> None:
        """Ends the batch, with the files of what was written."""
        self._record = self._batches.change(self._record.id, lambda now: now.finished(errors))
        for kind, file_id in self._record.made_files.items():
            if getattr(self._record, f"{kind}_file_id") is None:
                self._context.files.storage.remove(locate(self._record.owner, file_id))

    def _look(self) -> bool:
        """Shows now and then that the attempt goes on; False if the batch does not run any more."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            self._record = self._batches.look(self._record)
        return self._record.is_running

    def _change(self, **changes: Any) -> None:
        self._record = self._batches.change(
            self._record.id, lambda now: now.model_copy(update=changes)
        )

"""Runs one batch: takes it from each status to the next, wherever another process has left it."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import orjson
from celery import Celery
from celery.utils.functional import chunks

from batchery.errors import BatcheryError
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import Done, Journal
from batchery_producer.files.jsonl import encoded
from batchery_producer.files.openai_batch import OpenAIFormat
from batchery_producer.gateway.batches.leases import Lease, LeaseLost
from batchery_producer.gateway.batches.output import INPUT, BatchOutput, Entry
from batchery_producer.gateway.batches.records import (
    OUTPUT_PURPOSE,
    Batch,
    BatchError,
    BatchErrors,
    BatchRecord,
    BatchUsage,
    Status,
)
from batchery_producer.gateway.batches.store import FILE_NOT_FOUND, BatchStore, FileStore
from batchery_producer.gateway.batches.validation import ENDPOINTS, validated
from batchery_producer.gateway.models.served_models import ServedModels
from batchery_producer.gateway.models.vectors import numbers
from batchery_producer.gateway.problems import Problem
from batchery_producer.publishing.connection import REVOKE_CHUNK
from batchery_producer.run.loop import FileRun
from batchery_producer.run.options import SubmitOptions

logger = logging.getLogger(__name__)

#: How often results are kept, in seconds: what clients see of the progress is that old.
FLUSH_S = 1.0

#: How often the runner looks whether its batch was cancelled, in seconds.
CANCEL_LOOK_S = 1.0

#: After so long without any result, in seconds, a run starts over: from what is kept, and what is
#: still in the queue. So jobs that Redis has lost are sent again.
STALL_S = 60.0

#: How much longer than the batch its jobs are worth running, in seconds, as clocks differ.
EXPIRY_GRACE_S = 60.0

#: For requests that are not done when the time of their batch is over.
NO_TIME = "the request was not done within the completion window of the batch"


class Unfinished(BatcheryError):
    """A run ended before its batch did; it is tried again."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all batches of a process share.

    Attributes:
        app: Sends the jobs.
        models: Those of the settings.
        files: The files.
        batches: The batches.
        is_stopping: Says whether the process is about to end.
    """

    app: Celery
    models: ServedModels
    files: FileStore
    batches: BatchStore
    is_stopping: Callable[[], bool]


class BatchRun:
    """One batch, for as long as this process has its lease."""

    def __init__(self, surroundings: Surroundings, record: BatchRecord, lease: Lease) -> None:
        self._shared = surroundings
        self._record = record
        self._lease = lease
        #: Whether jobs may be in flight that this process has not sent.
        self._is_resumed = record.batch.status is not Status.VALIDATING
        self._looked_s = float("-inf")
        self._is_cancelled = False

    def run(self) -> None:
        """Takes the batch to its end, unless the process stops.

        Raises:
            LeaseLost: Another process may run it now.
            Unfinished: No results come, for example; it is to be run again.
            BatcheryError: As a `FileRun` raises: Redis is away, or the store.
        """
        steps: dict[Status, Callable[[], None]] = {
            Status.VALIDATING: self._validate,
            Status.IN_PROGRESS: self._send_all,
            Status.FINALIZING: self._finalize,
            Status.CANCELLING: self._finalize,
        }
        while not self._batch.is_over:
            if self._shared.is_stopping():
                return
            step = steps[self._batch.status]
            try:
                step()
            except Problem as problem:
                if problem.code != FILE_NOT_FOUND:
                    raise
                # No other attempt would find it.
                self._fail([BatchError(code=FILE_NOT_FOUND, message=problem.message)])
        self._shared.batches.close(self._record)

    @property
    def _batch(self) -> Batch:
        return self._record.batch

    # Statuses

    def _validate(self) -> None:
        """Reads the file."""
        if self._was_cancelled():
            self._cancel()
            return
        batch, owner = self._batch, self._record.owner
        kinds = ENDPOINTS[batch.endpoint]
        with self._shared.files.open(owner, batch.input_file_id) as file:
            found = validated(
                file, batch.endpoint, lambda name: self._shared.models.find(name, kinds).name
            )
        if found.errors:
            self._fail(found.errors)
            return
        counts = batch.request_counts.model_copy(update={"total": found.requests})
        self._move(Status.IN_PROGRESS, model=found.model, request_counts=counts)

    def _send_all(self) -> None:
        """Runs the requests that have not ended."""
        output = self._output()
        dataset = self._dataset()
        if not self._must_end():
            self._send(output, dataset)
        if self._shared.is_stopping():
            return
        self._lease.check()
        if self._was_cancelled():
            self._cancel()
            return
        done, total = len(output.done), self._batch.request_counts.total
        if done >= total:
            self._move(Status.FINALIZING, ending=Status.COMPLETED)
        elif self._has_expired():
            output.expire(dataset, NO_TIME)
            output.flush()
            self._move(Status.FINALIZING, ending=Status.EXPIRED)
        else:
            raise Unfinished(f"{done} of {total} requests are done, and no more come")

    def _finalize(self) -> None:
        """Makes the files of what has come back."""
        output, record = self._output(), self._record
        format_ = OpenAIFormat(
            self._journal(), self._batch.model or "", _line_name, unpack=_unpacked
        )
        tokens = 0

        def lines_of_results() -> Iterator[bytes]:
            nonlocal tokens
            for entry in output.entries():
                if "result" in entry:
                    line = format_.result(entry)
                    tokens += _tokens_of(line)
                    yield _encoded(line)

        failures: Iterable[Entry] = (each for each in output.entries() if "error" in each)
        made = [
            self._write(record.output_id, "output", lines_of_results()),
            self._write(record.error_id, "error", (encoded(format_.failure(f)) for f in failures)),
        ]
        is_cancelled = self._batch.status is Status.CANCELLING
        status = Status.CANCELLED if is_cancelled else record.ending or Status.COMPLETED
        self._move(
            status,
            output_file_id=made[0],
            error_file_id=made[1],
            request_counts=self._counts(output.done),
            usage=BatchUsage.of_input(tokens),
        )

    # Parts of them

    def _send(self, output: BatchOutput, dataset: Dataset) -> None:
        model = self._shared.models.find(self._batch.model, ENDPOINTS[self._batch.endpoint])
        options = SubmitOptions(
            queue=model.queue,
            # As /v1/embeddings asks, so that its jobs share batches with these.
            keywords={"encoding": "base64"},
            priority=self._record.priority,
            tenant=self._record.tenant,
            expires_s=max(self._batch.expires_at - time.time(), 0) + EXPIRY_GRACE_S,
            flush_s=FLUSH_S,
            timeout_s=STALL_S,
            window=self._record.window,
            stop=self._must_end,
        )
        run = FileRun(self._shared.app, model.name, options, is_certain=True)
        total = self._batch.request_counts.total
        summary = run.run(output.missing(dataset), output, self._journal(), total=lambda: total)
        self._is_resumed = True
        if summary.message and not self._must_end():
            raise Unfinished(summary.message)
        if self._was_cancelled() or self._has_expired():
            control: Any = self._shared.app.control
            for some in chunks(iter(run.in_flight), REVOKE_CHUNK):
                control.revoke(some)

    def _write(self, file_id: str, what: str, lines: Iterator[bytes]) -> str | None:
        """Makes a file of some lines; returns its id, or None if there is no line."""
        first = next(lines, None)
        if first is None:
            return None
        record = self._record
        name = f"{record.id}_{what}.jsonl"
        with self._shared.files.writing(
            record.owner, file_id, name, OUTPUT_PURPOSE, record.output_expires_s
        ) as file:
            for line in chain([first], lines):
                file.write(line + b"\n")
        return file_id

    def _output(self) -> BatchOutput:
        return BatchOutput(
            self._shared.batches.storage,
            self._shared.batches.pieces(self._record),
            self._lease,
            is_resumed=self._is_resumed,
            flushed=self._note,
        )

    def _dataset(self) -> Dataset:
        owner, file_id = self._record.owner, self._batch.input_file_id
        self._shared.files.get(owner, file_id)
        return Dataset(self._shared.files.url(owner, file_id), format="openai")

    def _journal(self) -> Journal:
        record = self._record
        return Journal(record.run, self._batch.model or "", {}, [INPUT], [], record.window)

    def _counts(self, done: Done) -> Any:
        counts = {"completed": done.succeeded, "failed": done.failed}
        return self._batch.request_counts.model_copy(update=counts)

    # Its end

    def _must_end(self) -> bool:
        return (
            self._shared.is_stopping()
            or not self._lease.is_held
            or self._has_expired()
            or self._was_cancelled()
        )

    def _has_expired(self) -> bool:
        return time.time() >= self._batch.expires_at

    def _was_cancelled(self) -> bool:
        if not self._is_cancelled and time.monotonic() - self._looked_s >= CANCEL_LOOK_S:
            self._looked_s = time.monotonic()
            self._is_cancelled = self._shared.batches.cancelled_at(self._record) is not None
        return self._is_cancelled

    # The record

    def _cancel(self) -> None:
        self._move(Status.CANCELLING)
        at_s = self._shared.batches.cancelled_at(self._record)
        if at_s is not None:
            self._save(self._batch.model_copy(update={"cancelling_at": at_s}))

    def _fail(self, errors: list[BatchError]) -> None:
        self._move(Status.FAILED, errors=BatchErrors(data=errors))

    def _note(self, done: Done) -> None:
        """Keeps the progress."""
        self._save(self._batch.model_copy(update={"request_counts": self._counts(done)}))

    def _move(self, status: Status, *, ending: Status | None = None, **changes: Any) -> None:
        if ending is not None:
            self._record = self._record.model_copy(update={"ending": ending})
        self._save(self._batch.moved(status, time.time(), **changes))
        logger.info("batch %s: %s", self._record.id, status)

    def _save(self, batch: Batch) -> None:
        """Keeps the record, unless another process has brought the batch to its end.

        Raises:
            LeaseLost: It may have.
        """
        self._lease.check()
        kept = self._shared.batches.get(self._record.owner, self._record.id)
        if kept.batch.is_over:
            raise LeaseLost(f"batch {self._record.id}: {kept.batch.status} already")
        record = self._record.with_batch(batch)
        self._shared.batches.save(record)
        self._record = record


def _unpacked(vector: str) -> Any:
    """The numbers of a vector; a text that is none stays as it is."""
    try:
        return numbers(vector)
    except ValueError:
        return vector


def _encoded(line: Entry) -> bytes:
    try:
        return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # Half a character, or an integer that is too large for it.
        return encoded(line)


def _tokens_of(line: Entry) -> int:
    return int(line["response"]["body"].get("usage", {}).get("total_tokens", 0))


def _line_name(_: int, line: int) -> str:
    return f"line {line}"

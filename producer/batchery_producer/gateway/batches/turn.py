"""One turn of a batch: a job that takes it a little further, wherever another one has left it.

A turn lasts some seconds, so that all batches have theirs however many there are. It knows nothing
that is not in the record, and changes the batch by saving that: under the token of its attempt.
What it writes has a name of its own, which only the saved record makes known. So the same turn may
run twice, and end late or never.
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery import Celery

from batchery.errors import DatasetError
from batchery.retry import RetryPolicy
from batchery_producer.files.records import Broken
from batchery_producer.gateway.batches.files import (
    CHUNK_BYTES,
    FILE_NOT_FOUND,
    OUTPUT_PURPOSE,
    FileObject,
    FileStore,
    WrittenFile,
    describe_file,
)
from batchery_producer.gateway.batches.requests import (
    AHEAD,
    ENDPOINTS,
    STALL_S,
    BatchLines,
    Ended,
    SlicesInFlight,
    validated,
)
from batchery_producer.gateway.batches.store import (
    BatchError,
    BatchErrors,
    BatchObject,
    BatchRecord,
    BatchStore,
    BatchUsage,
    Piece,
    Status,
    Turn,
    build_folder_name,
)
from batchery_producer.gateway.models import ServedModel, ServedModels
from batchery_producer.gateway.problems import Problem

logger = logging.getLogger(__name__)

#: How long a turn lasts, in seconds; making the files takes as long as it takes.
TURN_S = 3.0

#: After how long without any result another batch has its turn, in seconds.
IDLE_S = 1.0

#: How often a turn looks whether its batch was cancelled, and shows that it goes on, in seconds.
LOOK_S = 1.0

#: Bytes of lines above which they are written at once.
PIECE_BYTES = 4 * 1024 * 1024

#: How long pieces that are missing are looked for, in seconds: a store may show them late.
MISSING_S = 600.0


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What all batches of a process share.

    Attributes:
        app: Sends the jobs.
        models: Those of the settings.
        files: The files.
        batches: The batches.
    """

    app: Celery
    models: ServedModels
    files: FileStore
    batches: BatchStore


class BatchTurn:
    """A batch, for as long as this attempt has its turn."""

    def __init__(self, context: TurnContext, record: BatchRecord, turn: Turn) -> None:
        self._context = context
        self._record = record
        self._turn = turn
        self._retries = RetryPolicy()
        self._until_s = time.monotonic() + TURN_S
        self._looked_s = float("-inf")
        self._is_cancelled = False
        self._pieces = 0

    def run(self) -> BatchRecord:
        """Takes the batch on, and returns its record; if it is not over, it needs another turn.

        Raises:
            Superseded: Another attempt has the turn.
            Problem: Redis is away, or a file; try again.
            BatcheryError: So is the store, or the queue is full.
        """
        steps: dict[Status, Callable[[], None]] = {
            Status.VALIDATING: self._validate,
            Status.IN_PROGRESS: self._work,
            Status.FINALIZING: self._finalize,
            Status.CANCELLING: self._finalize,
        }
        while not self._batch.is_over and time.monotonic() < self._until_s:
            try:
                steps[self._batch.status]()
            except Problem as problem:
                if problem.code != FILE_NOT_FOUND:
                    raise
                self._end_without_file(problem.message)
        if self._batch.is_over:
            self._context.batches.close(self._record)
        return self._record

    def hand_over(self) -> int:
        """Ends the turn: only the next one is there to be begun now; returns its number."""
        self._turn = self._turn._replace(number=self._turn.number + 1)
        self._save(self._record)
        return self._turn.number

    @property
    def _batch(self) -> BatchObject:
        return self._record.batch

    # Statuses

    def _validate(self) -> None:
        """Reads the file."""
        if self._was_cancelled():
            self._cancel()
            return
        batch, kinds = self._batch, ENDPOINTS[self._batch.endpoint]
        with self._context.files.open(self._record.owner, batch.input_file_id) as file:
            found = validated(
                file,
                batch.endpoint,
                lambda name: self._context.models.find(name, kinds).name,
                self._look,
            )
        if found.errors:
            self._move(Status.FAILED, errors=BatchErrors(data=found.errors))
            return
        counts = batch.request_counts.model_copy(update={"total": found.requests})
        self._change(slices=found.slices, progress_at=time.time())
        self._move(Status.IN_PROGRESS, model=found.model, request_counts=counts)

    def _work(self) -> None:
        """Runs requests until the turn is over, or all have ended."""
        kinds = ENDPOINTS[self._batch.endpoint]
        try:
            model = self._context.models.find(self._batch.model, kinds)
        except Problem:
            # It is in the settings no more, and may come back as long as there is time.
            if not self._must_end():
                raise
        else:
            self._run_requests(model)
        if self._record.ended_slices == len(self._record.slices):
            self._move(Status.FINALIZING, ending=Status.COMPLETED)
        elif self._was_cancelled():
            self._cancel()
        elif self._has_expired():
            self._expire()
            self._move(Status.FINALIZING, ending=Status.EXPIRED)
        else:
            self._until_s = time.monotonic()

    def _run_requests(self, model: ServedModel) -> None:
        """Sends and awaits requests, and keeps what has come back."""
        lines = BatchLines(self._record, self._context.files, model.is_own_name)
        slices = SlicesInFlight(self._context.app, model, self._record, lines)
        with closing(slices):
            idle_s = time.monotonic() + IDLE_S
            while not self._must_end() and time.monotonic() < min(self._until_s, idle_s):
                self._send_ahead(slices)
                if slices.collect():
                    idle_s = time.monotonic() + IDLE_S
                    self._change(progress_at=time.time())
                elif time.time() - self._record.progress_at > STALL_S:
                    slices.send_lost()
                    self._change(progress_at=time.time())
                self._end_slices(slices)
            if self._must_end():
                self._stop(slices)
            slices.take_ended(self._keep)

    def _finalize(self) -> None:
        """Makes the files of what has come back."""
        pieces = self._context.batches.pieces(self._record)
        try:
            output, errors = self._join_both(pieces)
        except MissingPieceError as error:
            if time.time() - (self._batch.finalizing_at or self._batch.cancelling_at or 0) < (
                MISSING_S
            ):
                raise
            text = f"results are missing from the store of files: {error}"
            self._move(Status.FAILED, errors=_errors("missing_results", text))
            return
        is_cancelled = self._batch.status is Status.CANCELLING
        self._move(
            Status.CANCELLED if is_cancelled else self._record.ending or Status.COMPLETED,
            files=[each for each in (output, errors) if each],
            output_file_id=output and output.id,
            error_file_id=errors and errors.id,
            usage=self._batch.usage or BatchUsage(),
        )

    # Parts of them

    def _send_ahead(self, slices: SlicesInFlight) -> None:
        """Sees to it that some slices are in flight."""
        first = self._record.ended_slices
        for number in range(first, min(first + AHEAD, len(self._record.slices))):
            slices.load(number)
            if number < self._record.sent:
                continue
            may_be_sent = number < self._record.sending
            # Kept first, so that another attempt knows that it may find them.
            self._change(sending=number + 1)
            self._save(self._record)
            slices.send(number, may_be_sent=may_be_sent)
            self._change(sent=number + 1)

    def _end_slices(self, slices: SlicesInFlight) -> None:
        """Keeps what has come back of a slice that has ended, or if it is much."""
        first, ended = self._record.ended_slices, self._record.ended_slices
        while ended < min(first + AHEAD, len(self._record.slices)) and slices.is_done(ended):
            ended += 1
        if ended > first:
            self._change(ended_slices=ended)
        if ended > first or sum(map(len, slices.ended.output)) >= PIECE_BYTES:
            slices.take_ended(self._keep)

    def _stop(self, slices: SlicesInFlight) -> None:
        """Takes what is there by now, and has the rest not run."""
        with suppress(Problem):  # The file is gone, so nobody knows what was sent.
            # One that an attempt had begun to send may be with workers, too.
            for number in range(self._record.ended_slices, self._record.sending):
                slices.load(number)
        slices.revoke(slices.take_rest())

    def _expire(self) -> None:
        """Has all requests fail that have not ended, as there is no time left."""
        ended = Ended()
        lines = BatchLines(self._record, self._context.files)
        with suppress(Problem):  # The file is gone, too; what was computed is kept.
            for number in range(self._record.ended_slices, len(self._record.slices)):
                for line in lines.read(number):
                    row = line if isinstance(line, Broken) else line.row
                    ended.errors.append(lines.expired(row))
                    ended.lines.append(row.line)
                self._look()
        self._keep(ended)

    def _keep(self, ended: Ended) -> None:
        """Writes lines as pieces, and makes them known."""
        if not ended.lines:
            return
        pieces = [
            self._write(kind, b"".join(lines))
            for kind, lines in (("output", ended.output), ("error", ended.errors))
            if lines
        ]
        record, counts = self._record, self._batch.request_counts
        first = record.slices[record.ended_slices :]
        lines = [
            line for line in record.ended_lines + ended.lines if first and line > first[0].lines
        ]
        failed = len(ended.lines) - ended.completed
        counted = {
            "completed": counts.completed + ended.completed,
            "failed": counts.failed + failed,
        }
        known = self._batch.usage or BatchUsage()
        tokens_in = known.input_tokens + ended.tokens_in
        tokens_out = known.output_tokens + ended.tokens_out
        changes = {
            "request_counts": counts.model_copy(update=counted),
            "usage": BatchUsage(
                input_tokens=tokens_in,
                output_tokens=tokens_out,
                total_tokens=tokens_in + tokens_out,
            ),
        }
        kept = record.with_batch(self._batch.model_copy(update=changes))
        self._save(kept.model_copy(update={"ended_lines": lines}), pieces=pieces)

    def _write(self, kind: str, content: bytes) -> Piece:
        self._pieces += 1
        name = f"{kind}-{self._turn.number:08d}-{self._turn.token}-{self._pieces}"
        folder = build_folder_name(self._record.owner, self._record.id)
        self._context.files.storage.write(f"{folder}/{name}", content)
        return Piece(name, len(content))

    def _join_both(self, pieces: list[Piece]) -> tuple[FileObject | None, FileObject | None]:
        """As `_join`, for output and errors: both or none."""
        output = self._join("output", pieces)
        try:
            return output, self._join("error", pieces)
        except BaseException:
            if output is not None:
                self._context.files.give_up(self._record.owner, output.id)
            raise

    def _join(self, kind: str, pieces: list[Piece]) -> FileObject | None:
        """Makes a file of the pieces of a kind; None if there are none.

        Raises:
            MissingPieceError: One is not there as it was written.
        """
        some = [piece for piece in pieces if piece.name.startswith(kind)]
        if not some:
            return None
        record, files = self._record, self._context.files
        size = sum(piece.bytes for piece in some)
        name = f"{record.id}_{kind}.jsonl"
        file = describe_file(name, OUTPUT_PURPOSE, size, record.output_expires_s)
        files.reserve(record.owner, file)
        try:
            with files.create(record.owner, file.id) as written:
                for piece in some:
                    self._copy(piece, written)
        except BaseException:
            files.give_up(record.owner, file.id)
            raise
        return file

    def _copy(self, piece: Piece, written: WrittenFile) -> None:
        storage = self._context.files.storage
        source = storage.open(
            f"{build_folder_name(self._record.owner, self._record.id)}/{piece.name}"
        )
        if source is None:
            raise MissingPieceError(f"{piece.name}: not there")
        size = 0
        with source:
            while part := source.read(CHUNK_BYTES):
                written.write(part)
                size += len(part)
                self._look()
        if size != piece.bytes:
            raise MissingPieceError(f"{piece.name}: has {size} bytes in place of {piece.bytes}")

    def _end_without_file(self, message: str) -> None:
        """Ends a batch whose file is gone; what was computed is kept."""
        errors = _errors(FILE_NOT_FOUND, message)
        if self._batch.status is Status.VALIDATING:
            self._move(Status.FAILED, errors=errors)
        elif self._has_expired():
            self._move(Status.FINALIZING, ending=Status.EXPIRED)
        else:
            self._move(Status.FINALIZING, ending=Status.FAILED, errors=errors)

    # Its end

    def _must_end(self) -> bool:
        return (
            self._has_expired()
            or self._was_cancelled()
            or self._record.ended_slices == len(self._record.slices)
        )

    def _has_expired(self) -> bool:
        return time.time() >= self._batch.expires_at

    def _was_cancelled(self) -> bool:
        if not self._is_cancelled and time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            look = partial(self._context.batches.cancelled_at, self._record)
            self._is_cancelled = self._retries.call(look, (Problem,)) is not None
        return self._is_cancelled

    def _cancel(self) -> None:
        at_s = self._context.batches.cancelled_at(self._record) or time.time()
        self._move(Status.CANCELLING, at_s=at_s)

    def _look(self) -> None:
        """Shows now and then that the turn goes on."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            with suppress(Problem):  # Redis is away; what counts is asked when all is saved.
                self._context.batches.touch(self._record, self._turn)

    # The record

    def _move(
        self,
        status: Status,
        *,
        at_s: float | None = None,
        ending: Status | None = None,
        files: list[FileObject] | None = None,
        **changes: Any,
    ) -> None:
        if ending is not None:
            self._change(ending=ending)
        at_s = time.time() if at_s is None else at_s
        record = self._record.with_batch(self._batch.moved(status, at_s, **changes))
        self._save(record, files=files or ())
        logger.info("batch %s: %s", record.id, status)

    def _change(self, **changes: Any) -> None:
        self._record = self._record.model_copy(update=changes)

    def _save(self, record: BatchRecord, **more: Any) -> None:
        """Keeps the record, and waits for a Redis that is away."""
        save = partial(self._context.batches.save, record, self._turn, **more)
        self._retries.call(save, (Problem,))
        self._record = record


class MissingPieceError(DatasetError):
    """A part of what has come back is not where it was written."""


def _errors(code: str, message: str) -> BatchErrors:
    return BatchErrors(data=[BatchError(code=code, message=message)])

"""What runs a batch: steps, each of which is a job of the gateway's queue.

`advance` reads the file, sends the jobs of its first slices, and makes the files at the end.
`run_slice` sends and awaits the requests of one slice, writes their answers into a file of its own,
and sends the next slice; the last one sends `advance`. Each step takes some seconds, and may run
twice, late or never to its end: it finds out what there is, and what another one has done stays.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from celery import Celery
from celery.utils.functional import chunks
from kombu.exceptions import OperationalError

from batchery.errors import DatasetError, InvalidItem
from batchery.protocol.headers import with_tenant
from batchery.retry import RetryPolicy
from batchery.settings import Settings
from batchery_producer.answers import build_header
from batchery_producer.broker import REVOKE_CHUNK
from batchery_producer.collector import collector_for
from batchery_producer.files.recovery import InFlightRecovery
from batchery_producer.gateway.batches.files import (
    CHUNK_BYTES,
    OUTPUT_PURPOSE,
    FileIsGone,
    FileObject,
    FileStore,
    describe_file,
)
from batchery_producer.gateway.batches.requests import (
    EMBEDDINGS_URL,
    ENDPOINTS,
    NO_TIME,
    BatchRequests,
    Validated,
    WrongResult,
    validated,
)
from batchery_producer.gateway.batches.store import (
    BatchError,
    BatchErrors,
    BatchRecord,
    BatchStore,
    Piece,
    RequestCounts,
    SliceEnd,
    Status,
)
from batchery_producer.gateway.models import ServedModel, ServedModels
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import BATCH, SLICE, Store
from batchery_producer.publisher import Publisher

#: Slices in flight at once: while one is awaited, the next one is in the queue already.
AHEAD = 2

#: How long a step awaits results, in seconds; and after how long without any it ends.
STEP_S = 3.0
IDLE_S = 0.5

#: After how long a slice of which nothing has come is looked at again, in seconds.
PAUSE_S = 2.0

#: How often a step looks whether its batch is still wanted, and shows that it goes on, in seconds.
LOOK_S = 1.0

#: How long one look for results takes, in seconds.
COLLECT_S = 0.25

#: After so long without any result, in seconds, jobs are sent again that are in no queue and with
#: no worker: Redis has lost them.
STALL_S = 60.0

#: How much longer than the batch its jobs are worth running, in seconds, as clocks differ.
EXPIRY_GRACE_S = 60.0

#: How long sending may wait for space in a queue, in seconds; then another batch has its turn.
ROOM_WAIT_S = 1.0

#: How long pieces that are missing are looked for, in seconds: a store may show them late.
MISSING_S = 600.0

#: So many attempts at a step may be killed in a row; then it is the step that kills.
MAX_LOST_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class JobContext:
    """What all jobs of a process share."""

    app: Celery
    settings: Settings
    store: Store
    models: ServedModels
    files: FileStore
    batches: BatchStore


class NotWanted(Exception):
    """A batch was cancelled, or its time is over."""


class MissingPieceError(DatasetError):
    """A part of what has come back is not where it was written."""


class BatchRun:
    """One step of a batch."""

    def __init__(self, context: JobContext, record: BatchRecord) -> None:
        self._context = context
        self._batches = context.batches
        self._record = record
        self._looked_s = float("-inf")

    def advance(self) -> None:
        """Takes a batch on, to its end if there is nothing to wait for.

        Raises:
            Superseded: Somebody else has done so at the same time; look again.
            Problem: Redis is away; try again.
            BatcheryError: So is the store, for example.
        """
        if self._record.status is Status.VALIDATING:
            self._validate()
        if self._record.status is Status.IN_PROGRESS:
            self._go_on()
        if self._record.status is Status.CANCELLING and self._record.ending is None:
            self._stop(Status.CANCELLED)
        if self._record.ending is not None and not self._record.is_over:
            self._finish()
        if self._record.is_over:
            self._batches.close(self._record)

    def run_slice(self, number: int) -> float | None:
        """Sends and awaits the requests of a slice, for some seconds.

        Returns:
            In how many seconds to go on with it; None if that is done.

        Raises:
            BatcheryError: As `advance`, as are problems.
        """
        record = self._record
        if record.status is not Status.IN_PROGRESS or number in self._batches.ends(record):
            return None
        try:
            self._look()
            model = self._find_model()
            if model is None:  # It is in the settings no more, and may come back.
                return PAUSE_S
            with closing(SliceRun(self._context, record, number, model)) as run:
                run.send(model)
                has_progress = run.collect(self._look)
                if not run.is_done:
                    return 0 if has_progress else PAUSE_S
                if run.end():
                    self._send_next(number)
        except NotWanted:
            self._context.store.send(BATCH, record.id, tenant=record.tenant)
        except FileIsGone as error:
            self._freeze(Status.FAILED, _errors("file_not_found", error.message))
            self.advance()
        return None

    def fail(self, code: str, message: str) -> float | None:
        """Ends a batch that cannot be taken on; what was computed is not kept."""
        self._save(self._record.moved(Status.FAILED, errors=_errors(code, message)))
        self._batches.close(self._record)
        return None

    # Parts of them

    def _validate(self) -> None:
        """Reads the file."""
        record, find = self._record, self._context.models.find
        kinds = ENDPOINTS[record.endpoint]
        try:
            with self._context.files.open(record.owner, record.input_file_id) as file:
                found = validated(
                    file, record.endpoint, lambda name: find(name, kinds).name, self._show_life
                )
        except FileIsGone as error:
            found = Validated(errors=_errors("file_not_found", error.message).data)
        if found.errors:
            self._save(record.moved(Status.FAILED, errors=BatchErrors(data=found.errors)))
            return
        counts = RequestCounts(total=found.requests)
        changes = {"model": found.model, "slices": found.slices, "request_counts": counts}
        self._save(record.moved(Status.IN_PROGRESS, **changes))

    def _go_on(self) -> None:
        """Sends slices, or ends the batch."""
        record = self._record
        rest = self._find_rest()
        if not rest:
            self._freeze(Status.COMPLETED)
        elif time.time() >= record.expires_at:
            self._stop(Status.EXPIRED)
        for number in rest[:AHEAD] if self._record.status is Status.IN_PROGRESS else ():
            self._context.store.send(SLICE, record.id, number, tenant=record.tenant)

    def _find_rest(self) -> list[int]:
        ended = self._batches.ends(self._record)
        return [number for number in range(len(self._record.slices)) if number not in ended]

    def _stop(self, ending: Status) -> None:
        """Takes what there is of all slices by now, and has the rest not run."""
        is_expired = ending is Status.EXPIRED
        with suppress(FileIsGone):  # What was computed is kept.
            for number in self._find_rest():
                is_begun = not self._batches.begins(self._record, number)
                if is_begun or is_expired:
                    with closing(SliceRun(self._context, self._record, number)) as run:
                        run.stop()
                        run.end(is_expired=is_expired)
                self._show_life()
        self._freeze(ending)

    def _freeze(self, ending: Status, errors: BatchErrors | None = None) -> None:
        """Determines what the files of the batch will have."""
        ends = self._batches.ends(self._record)
        told = [ends[number] for number in sorted(ends)]
        status = Status.CANCELLING if ending is Status.CANCELLED else Status.FINALIZING
        changes = {"ends": told, "ending": ending, "errors": errors}
        self._save(self._record.counted(told).moved(status, **changes))

    def _finish(self) -> None:
        """Makes the files."""
        record = self._record
        pieces = {
            "output": [each.output for each in record.ends if each.output],
            "error": [each.errors for each in record.ends if each.errors],
        }
        files: dict[str, FileObject] = {}
        try:
            for kind, some in pieces.items():
                if some:
                    files[kind] = self._join(kind, some)
        except BaseException as error:
            for file in files.values():
                self._context.files.remove(record.owner, file.id)
            since_s = record.finalizing_at or record.cancelling_at or 0
            if not isinstance(error, MissingPieceError) or time.time() - since_s < MISSING_S:
                raise
            text = f"results are missing from the store of files: {error}"
            self._save(record.moved(Status.FAILED, errors=_errors("missing_results", text)))
            return
        ids = {f"{kind}_file_id": file.id for kind, file in files.items()}
        self._save(record.moved(record.ending or Status.COMPLETED, **ids), list(files.values()))

    def _join(self, kind: str, pieces: Sequence[Piece]) -> FileObject:
        """Makes a file of some pieces.

        Raises:
            MissingPieceError: One is not there as it was written.
        """
        record, files = self._record, self._context.files
        size, name = sum(piece.bytes for piece in pieces), f"{record.id}_{kind}.jsonl"
        file = describe_file(name, OUTPUT_PURPOSE, size, record.output_expires_s)
        files.keep(record.owner, file, self._read_pieces(pieces))
        return file

    def _read_pieces(self, pieces: Iterable[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            source = self._context.files.storage.open(f"{self._record.folder}/{piece.name}")
            if source is None:
                raise MissingPieceError(f"{piece.name}: not there")
            size = 0
            with source:
                while part := source.read(CHUNK_BYTES):
                    yield part
                    size += len(part)
                    self._show_life()
            if size != piece.bytes:
                raise MissingPieceError(f"{piece.name}: has {size} bytes, not {piece.bytes}")

    def _send_next(self, number: int) -> None:
        """Goes on after a slice that this step has ended; waits for a broker that is away."""
        record, ended = self._record, self._batches.ends(self._record)
        following: list[Any] = [SLICE, record.id, number + AHEAD]
        if len(ended) == len(record.slices):
            following = [BATCH, record.id]
        elif number + AHEAD >= len(record.slices):
            return
        send = partial(self._context.store.send, *following, tenant=record.tenant)
        RetryPolicy().call(send, (OperationalError,))

    def _find_model(self) -> ServedModel | None:
        batch = self._record
        with suppress(Problem):
            return self._context.models.find(batch.model, ENDPOINTS[batch.endpoint])
        return None

    def _look(self) -> None:
        """Shows that the step goes on; raises `NotWanted` if it need not."""
        if time.time() >= self._record.expires_at or not self._show_life():
            raise NotWanted

    def _show_life(self) -> bool:
        """Shows now and then that the step goes on; False if the batch is not wanted any more."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return True
        self._looked_s = time.monotonic()
        return self._batches.show_life(self._record)

    def _save(self, record: BatchRecord, files: Sequence[FileObject] = ()) -> None:
        self._record = self._batches.save(record, files)


class SliceRun:
    """The requests of a slice, their jobs and what has become of them."""

    def __init__(
        self,
        context: JobContext,
        record: BatchRecord,
        number: int,
        model: ServedModel | None = None,
    ) -> None:
        """Reads the slice.

        Args:
            context: Of its batch.
            record: The batch.
            number: Of the slice.
            model: Of the batch; None if nothing will be sent.

        Raises:
            Problem: The file is gone.
        """
        self._context = context
        self._batches = context.batches
        self._record = record
        self._number = number
        names = {} if model is None else {"is_own_name": model.is_own_name}
        self._lines = BatchRequests(record, context.files, **names)
        self._requests = list(self._lines.read(number))
        self._by_job = {job.id: (each, job) for each in self._requests for job in each.jobs}
        self._retries = RetryPolicy()
        self._collector = collector_for(context.app, self._retries)
        self._collector.expect(self._by_job)

    def close(self) -> None:
        """Leaves in flight what is there."""
        self._collector.close()

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        return not self._collector.awaited

    def send(self, model: ServedModel) -> None:
        """Sends what was not sent yet, and again what was lost."""
        batches, record = self._batches, self._record
        before = batches.progress(record, self._number)
        if before is not None and time.time() - before.at_s < STALL_S:
            return
        ids: Sequence[str] = list(self._collector.awaited)
        if before is not None or not batches.begins(record, self._number):
            # An earlier attempt has sent some of it, or all.
            app, pattern = self._context.app, self._lines.pattern
            ids = InFlightRecovery(app, model.queue, pattern, self._retries).missing(ids)
        self._publish(model, ids)
        batches.show_progress(record, self._number, before or SliceEnd())

    def _publish(self, model: ServedModel, job_ids: Iterable[str]) -> None:
        record = self._record
        left_s = max(record.expires_at - time.time(), 0)
        options = {"priority": record.priority, "expires": left_s + EXPIRY_GRACE_S}
        with Publisher(
            self._context.app,
            model.name,
            queue=model.queue,
            # As /v1/embeddings asks, so that its jobs share batches with these.
            keywords={"encoding": "base64"} if record.endpoint == EMBEDDINGS_URL else {},
            outage_policy=self._retries,
            wait_s=ROOM_WAIT_S,
            persistent=True,
            **with_tenant(options, record.tenant),
        ) as publisher:
            jobs = [self._by_job[each][1] for each in job_ids]
            for count, group in groupby(jobs, key=lambda job: job.count):
                headers = build_header(count, self._collector.headers)
                publisher.send([(job.id, job.item) for job in group], headers)

    def collect(self, look: Callable[[], None]) -> bool:
        """Takes what has come back, and awaits more; says whether there was anything new."""
        until_s = time.monotonic() + STEP_S
        idle_s = time.monotonic() + IDLE_S
        while not self.is_done and time.monotonic() < min(until_s, idle_s):
            look()
            for job_id, answer in self._collector.collect(COLLECT_S):
                self._by_job[job_id][0].answers[job_id] = answer
                idle_s = time.monotonic() + IDLE_S
        now = SliceEnd()
        for each in (each for each in self._requests if each.is_done):
            each.end()
            now.failed += each.error is not None
            now.completed += each.error is None
        before = self._batches.progress(self._record, self._number) or SliceEnd()
        has_progress = now.completed + now.failed > before.completed + before.failed
        if has_progress:
            self._batches.show_progress(self._record, self._number, now)
        return has_progress

    def stop(self) -> None:
        """Takes what is there by now, and tells workers not to begin the rest."""
        for job_id, answer in self._collector.poll_all():
            self._by_job[job_id][0].answers[job_id] = answer
        control: Any = self._context.app.control
        for some in chunks(iter(self._collector.awaited), REVOKE_CHUNK):
            control.revoke(some)

    def end(self, *, is_expired: bool = False) -> bool:
        """Writes what has become of the requests, and makes it known.

        Args:
            is_expired: Whether those that have not ended had no time.

        Returns:
            Whether nobody else has done so before.
        """
        end, errors = SliceEnd(), list[bytes]()

        def answer_all() -> Iterator[bytes]:
            for each in self._requests:
                error: tuple[str, str] | None = NO_TIME if is_expired else None
                if each.is_done:
                    results, error = each.end(), each.error
                    try:
                        if error is None:
                            line, (read, written) = self._lines.result(each, results)
                            end.completed += 1
                            end.input_tokens += read
                            end.output_tokens += written
                            yield line
                    except (InvalidItem, WrongResult) as wrong:
                        error = (type(wrong).__name__, str(wrong))
                if error is not None:
                    errors.append(self._lines.failure(each, error))

        end.output = self._write("output", answer_all())
        end.errors = self._write("error", errors)
        end.failed = len(errors)
        is_first = self._batches.end_slice(self._record, self._number, end)
        if is_first:
            self._collector.forget(list(self._by_job))
        return is_first

    def _write(self, kind: str, lines: Iterable[bytes]) -> Piece | None:
        name = f"{self._number}-{kind}-{secrets.token_hex(8)}"
        size = self._context.files.storage.write(f"{self._record.folder}/{name}", lines)
        return Piece(name, size) if size else None


def _errors(code: str, message: str) -> BatchErrors:
    return BatchErrors(data=[BatchError(code=code, message=message)])

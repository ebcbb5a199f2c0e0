"""What runs a batch: jobs of the gateway's queue, each of which may run twice, late or again.

The first one reads the file, cuts it into slices of some hundred requests, and sends the jobs of
the first slices. The job of a slice sends and awaits its requests, writes their answers into a file
of its own name, and sends that of a later slice; the last one joins the files. A slice of which not
all has come after some seconds makes room for others, and is looked at again. The first attempt
that ends a slice counts, and its lease sees to it that there is one.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from celery import Celery
from celery.utils.functional import chunks

from batchery.errors import DatasetError
from batchery.protocol.headers import with_tenant
from batchery.retry import RetryPolicy
from batchery.settings import Settings
from batchery_producer.answers import build_header
from batchery_producer.broker import REVOKE_CHUNK, BrokerConnection
from batchery_producer.collector import Collector
from batchery_producer.files.recovery import find_in_flight
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
    Request,
    read_file,
    read_slice,
    write_line,
)
from batchery_producer.gateway.batches.store import (
    BatchError,
    BatchErrors,
    BatchRecord,
    BatchStore,
    RequestCounts,
    SliceState,
    Status,
)
from batchery_producer.gateway.models import ServedModel, ServedModels
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import BATCH, Store
from batchery_producer.publisher import Publisher

#: Slices in flight at once: while one is awaited, the next one is in the queue already.
AHEAD = 2

#: How long an attempt at a slice awaits results, in seconds; without any it ends sooner.
ATTEMPT_S = 3.0
IDLE_S = 0.5

#: After how long a slice of which nothing has come is looked at again, in seconds.
PAUSE_S = 2.0

#: How often a step looks whether its batch is still wanted, and shows that it goes on, in seconds.
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


class MissingPieceError(DatasetError):
    """A part of what has come back is not where it was written."""


class BatchRun:
    """One step of a batch; all methods raise `BatcheryError` and `Problem`: try again."""

    def __init__(self, context: JobContext, record: BatchRecord) -> None:
        self._context = context
        self._batches = context.batches
        self._record = record
        self._looked_s = float("-inf")

    def begin(self) -> None:
        """Reads the file, and has the first slices run that have not ended."""
        if self._record.status is Status.VALIDATING:
            self._validate()
        ends = self._batches.list_ends(self._record.id)
        rest = [number for number in range(len(self._record.slices)) if number not in ends]
        if not rest:
            self._join(ends)
        for number in rest[:AHEAD]:
            self._send(number)

    def fail(self, code: str, message: str) -> None:
        """Ends a batch that cannot be taken on; what was computed is not kept."""
        self._change(lambda now: now.moved(Status.FAILED, errors=_errors(code, message)))
        self.tidy()

    def tidy(self) -> None:
        """Removes what only a batch needs that is not over."""
        self._context.files.storage.remove(self._record.folder)

    def _validate(self) -> None:
        record, find = self._record, self._context.models.find
        kinds = ENDPOINTS[record.endpoint]
        try:
            with self._context.files.open(record.owner, record.input_file_id) as file:
                found = read_file(
                    file, record.endpoint, lambda name: find(name, kinds).name, self._look
                )
            errors = BatchErrors(data=found.errors) if found.errors else None
        except FileIsGone as error:
            errors = _errors("file_not_found", error.message)

        def make(now: BatchRecord) -> BatchRecord:
            if now.status is not Status.VALIDATING:
                return now
            if errors is not None:
                return now.moved(Status.FAILED, errors=errors)
            counts = RequestCounts(total=found.requests)
            changes = {"model": found.model, "slices": found.slices, "request_counts": counts}
            return now.moved(Status.IN_PROGRESS, **changes)

        self._change(make)

    def _join(self, ends: Mapping[int, SliceState]) -> None:
        """Makes the files of a batch of which all slices have ended."""
        self._change(
            lambda now: now.moved(Status.FINALIZING) if now.status is Status.IN_PROGRESS else now
        )
        record, files = self._record, self._context.files
        try:
            made = {} if record.is_over else self._make_files(ends)
        except MissingPieceError as error:
            since_s = record.finalizing_at or record.cancelling_at or 0
            if time.time() - since_s < MISSING_S:
                raise
            self.fail("missing_results", f"results are missing from the store of files: {error}")
            return
        ids = {f"{kind}_file_id": file.id for kind, file in made.items()}
        self._change(
            lambda now: now.counted(ends.values()).moved(_find_ending(now, ends), **ids),
            list(made.values()),
        )
        for name, id_ in ids.items():
            if getattr(self._record, name) != id_:  # Another attempt was faster.
                files.remove(record.owner, id_)
        self.tidy()

    def _make_files(self, ends: Mapping[int, SliceState]) -> dict[str, FileObject]:
        """Writes the output file and the error file, as far as they have lines."""
        record, files = self._record, self._context.files
        made: dict[str, FileObject] = {}
        with ExitStack() as undo:
            for kind in ("output", "error"):
                size = sum(getattr(each, f"{kind}_bytes") for each in ends.values())
                if size:
                    name, kept_s = f"{record.id}_{kind}.jsonl", record.output_expires_s
                    made[kind] = file = describe_file(name, OUTPUT_PURPOSE, size, kept_s)
                    files.keep(record.owner, file, self._read_pieces(kind, ends))
                    undo.callback(files.remove, record.owner, file.id)
            undo.pop_all()
        return made

    def _read_pieces(self, kind: str, ends: Mapping[int, SliceState]) -> Iterator[bytes]:
        for end in ends.values():
            left = end.output_bytes if kind == "output" else end.error_bytes
            if not left:
                continue
            source = self._context.files.storage.open(f"{self._record.folder}/{end.name}")
            if source is None:
                raise MissingPieceError(f"{end.name}: not there")
            with source:
                source.seek(0 if kind == "output" else end.output_bytes)
                while part := source.read(min(CHUNK_BYTES, left)):
                    yield part
                    left -= len(part)
                    self._look()
            if left:
                raise MissingPieceError(f"{end.name}: {left} bytes are missing")

    def _send(self, number: int) -> None:
        record = self._record
        self._context.store.send(BATCH, record.id, number)

    def _look(self) -> bool:
        """Shows now and then that the step goes on; False if the batch does not run any more."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._looked_s = time.monotonic()
            self._record = self._batches.look(self._record)
        return self._record.is_running

    def _change(
        self, make: Callable[[BatchRecord], BatchRecord], files: Sequence[FileObject] = ()
    ) -> None:
        self._record = self._batches.change(self._record.id, make, files)


class SliceRun(BatchRun):
    """One attempt at a slice of a batch, which knows its requests and what has become of them."""

    def __init__(self, context: JobContext, record: BatchRecord, number: int) -> None:
        super().__init__(context, record)
        self._number = number
        self._requests: list[Request] = []
        self._by_job: dict[str, Request] = {}
        self._retries = RetryPolicy()
        self._collector = Collector(context.app, self._retries)

    def run(self) -> float | None:
        """Sends and awaits the requests, for some seconds.

        Returns:
            In how many seconds to go on with it; None if that is done.
        """
        id_, number = self._record.id, self._number
        if number not in self._batches.list_ends(id_):
            try:
                with closing(self._collector):
                    has_progress = self._work()
                    if self._collector.awaited and self._look():
                        return 0 if has_progress else PAUSE_S
                    is_first = self._end()
            except FileIsGone as error:
                errors = _errors("file_not_found", error.message)
                self._change(lambda now: now.model_copy(update={"errors": errors}))
                is_first = self._batches.end_slice(id_, number, SliceState())
            if not is_first:
                return None  # The other attempt goes on.
        ends, following = self._batches.list_ends(id_), number + AHEAD
        if self._record.is_over or len(ends) == len(self._record.slices):
            self._join(ends)
        elif following < len(self._record.slices) and following not in ends:
            self._send(following)
        return None

    def _work(self) -> bool:
        """Sends what was not sent yet, and awaits results; says whether there was anything new."""
        record, batches, model = self._record, self._batches, None
        with suppress(Problem):
            model = self._context.models.find(record.model, ENDPOINTS[record.endpoint])
        self._requests += read_slice(record, self._number, self._context.files, model)
        self._by_job |= {job: each for each in self._requests for job in each.jobs}
        self._collector.expect(self._by_job)
        if model is None or not self._look():  # A model may come back to the settings.
            return False
        before, ids = batches.begin_slice(record.id, self._number), list(self._by_job)
        if before is None or time.time() - before.at_s > STALL_S:
            if before is not None:
                app, pattern = self._context.app, re.compile(rb"%b-\d+-\d+" % record.id.encode())
                known = find_in_flight(app, model.queue, pattern, self._retries)
                ids = self._collector.find_missing(ids, known)
            self._publish(model, ids)
            sent = (before or SliceState()).model_copy(update={"at_s": time.time()})
            batches.show_progress(record.id, self._number, sent)
        until_s = time.monotonic() + ATTEMPT_S
        idle_s = time.monotonic() + IDLE_S
        while self._collector.awaited and time.monotonic() < min(until_s, idle_s) and self._look():
            for job_id, answer in self._collector.collect(COLLECT_S):
                self._by_job[job_id].answers[job_id] = answer
                idle_s = time.monotonic() + IDLE_S
        ended = [each.read_answer() for each in self._requests if each.is_done]
        failed = sum(each.error is not None for each in ended)
        has_progress = before is None or len(ended) > before.completed + before.failed
        if has_progress:
            now = SliceState(completed=len(ended) - failed, failed=failed)
            batches.show_progress(record.id, self._number, now)
        return has_progress

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
            jobs = [self._by_job[each].read_job(each) for each in job_ids]
            for count, group in groupby(jobs, key=itemgetter(0)):
                header = build_header(count, self._collector.headers)
                publisher.send([job[1:] for job in group], header)

    def _end(self) -> bool:
        """Writes what has become of the requests; True if nobody else has done so before."""
        record, storage = self._record, self._context.files.storage
        if self._collector.awaited:
            self._stop()
        has_all = record.status is not Status.CANCELLING
        state, errors = SliceState(name=f"{self._number}-{secrets.token_hex(8)}"), list[bytes]()

        def write() -> Iterator[bytes]:
            for each in self._requests:
                if not each.is_done and not has_all:
                    continue
                line, usage = write_line(record, each)
                state.expired += not each.is_done
                if usage is None:
                    errors.append(line)
                    continue
                state.completed += 1
                state.input_tokens += usage["prompt_tokens"]
                state.output_tokens += usage.get("completion_tokens", 0)
                state.output_bytes += len(line)
                yield line
            yield from errors

        path = f"{record.folder}/{state.name}"
        state.error_bytes = storage.write(path, write()) - state.output_bytes
        state.failed = len(errors)
        is_first = self._batches.end_slice(record.id, self._number, state)
        if is_first:
            self._collector.forget(list(self._by_job))
        else:
            storage.remove(path)
        return is_first

    def _stop(self) -> None:
        """Takes what is there by now, and tells workers not to begin the rest."""
        if self._batches.begin_slice(self._record.id, self._number) is None:
            return  # Nothing was sent.
        for job_id, answer in self._collector.poll_all():
            self._by_job[job_id].answers[job_id] = answer
        control: Any = self._context.app.control
        for some in chunks(iter(self._collector.awaited), REVOKE_CHUNK):
            control.revoke(some)


def _find_ending(record: BatchRecord, ends: Mapping[int, SliceState]) -> Status:
    """The status of a batch whose files are made."""
    if record.errors is not None:
        return Status.FAILED
    if record.status is Status.CANCELLING:
        return Status.CANCELLED
    return Status.EXPIRED if any(each.expired for each in ends.values()) else Status.COMPLETED


def _errors(code: str, message: str) -> BatchErrors:
    return BatchErrors(data=[BatchError(code=code, message=message)])

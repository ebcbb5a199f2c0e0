"""The requests of a batch's file: validated, sent slice by slice, and their answers as lines.

As with OpenAI, a file is taken as a whole: a line that is no request, an id that is missing or used
twice, another route or model, and nothing runs. What only a request's own body has wrong fails
alone, later, in the error file.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, BinaryIO

import orjson
from celery import Celery
from celery.utils.functional import chunks

from batchery.retry import RetryPolicy
from batchery_producer.answers import Answer, build_header, joined
from batchery_producer.broker import REVOKE_CHUNK
from batchery_producer.collector import collector_for
from batchery_producer.files.journal import Journal
from batchery_producer.files.json_lines import encoded
from batchery_producer.files.records import Broken, Record, SeenIds
from batchery_producer.files.rows import InvalidLine, JsonRows, Lines
from batchery_producer.gateway.batches.files import FileStore
from batchery_producer.gateway.batches.openai_batch import (
    EXPIRED,
    URL,
    OpenAIFormat,
    RequestError,
    RequestPicker,
    in_form,
)
from batchery_producer.gateway.batches.store import MAX_REQUESTS, BatchError, BatchRecord, Slice
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.models import ITEMS_PER_JOB, ServedModel, numbers
from batchery_producer.gateway.problems import SERVER_TEXTS, Problem
from batchery_producer.openai_generation import REQUESTS, count_item_chars, count_texts
from batchery_producer.publisher import Publisher
from batchery_producer.run.options import SubmitOptions
from batchery_producer.run.recovery import InFlightRecovery

# Validation


#: Routes that a batch may ask for, and the kinds of models that they need.
ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    URL: ("embedding",),
    **dict.fromkeys(REQUESTS, ("generation",)),
}

#: Maximum errors that are told of one file.
MAX_ERRORS = 100

#: Jobs and bytes from which on a slice of a file takes no further request.
SLICE_JOBS = 512
SLICE_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class Validated:
    """What a file was found to be.

    Attributes:
        model: Name of the model, as the settings have it; None if there is an error.
        requests: Number of requests.
        errors: What is wrong; at most `MAX_ERRORS`, by line.
        slices: The parts of the file.
    """

    model: str | None = None
    requests: int = 0
    errors: list[BatchError] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)


def validated(
    file: BinaryIO,
    endpoint: str,
    find_model: Callable[[str], str],
    look: Callable[[], None] = lambda: None,
) -> Validated:
    """Reads a file of requests, a line at a time.

    Args:
        file: The file, open.
        endpoint: Route of all requests.
        find_model: Gives the model of a name; raises a `Problem` if there is none.
        look: Called with each request; what it raises ends this.
    """
    found = Validated()
    named: str | None = None
    jobs = SLICE_JOBS

    def settle(name: str) -> str:
        nonlocal named
        if named is None:
            named = name
            found.model = find_model(name)
        return named

    with SeenIds() as seen:
        picker = RequestPicker(None, None, seen)
        picker.settle, picker.url = settle, endpoint
        for start, line, row in _rows(file):
            look()
            found.requests += 1
            if jobs >= SLICE_JOBS or start.offset - found.slices[-1].offset >= SLICE_BYTES:
                found.slices.append(start)
                jobs = 0
            jobs += _count_jobs(row)
            if found.requests > MAX_REQUESTS:
                text = f"more than {MAX_REQUESTS:,} requests; send several batches"
                found.errors = [BatchError(code="too_many_requests", message=text)]
                break
            error = _find_error(picker, line, row)
            if error is not None and len(found.errors) < MAX_ERRORS:
                found.errors.append(error)
    if not found.requests:
        text = "the file has no requests"
        found.errors.append(BatchError(code="empty_file", message=text))
    return found


class RequestRows(JsonRows):
    """The lines of a file that came over HTTP, where nobody can name an encoding."""

    encoding_hint = "upload the file in UTF-8"


def _rows(file: BinaryIO) -> Iterator[tuple[Slice, int, Mapping[str, Any] | BatchError]]:
    """The place before each row, its line, and the row or what is wrong with it."""
    lines = Lines(file)
    rows = RequestRows(lines)
    while True:
        start = Slice(lines.read_bytes, lines.number)
        try:
            row = next(rows, None)
        except InvalidLine as error:
            yield start, rows.number, _bad(rows.number, "invalid_json_line", str(error))
            continue
        if row is None:
            return
        if isinstance(row, Mapping):
            yield start, rows.number, row
        else:
            text = "a text; expected an object with custom_id, method, url and body"
            yield start, rows.number, _bad(rows.number, "invalid_json_line", text)


def _count_jobs(row: Mapping[str, Any] | BatchError) -> int:
    """How many jobs a request becomes at most."""
    body = row.get("body") if isinstance(row, Mapping) else None
    given = body.get("input", body.get("prompt")) if isinstance(body, Mapping) else None
    return -(-len(given) // ITEMS_PER_JOB) if isinstance(given, list) and given else 1


def _find_error(
    picker: RequestPicker, line: int, row: Mapping[str, Any] | BatchError
) -> BatchError | None:
    if isinstance(row, BatchError):
        return row
    try:
        error = picker.find_error(line, row)
    except Problem as problem:
        error = RequestError("model_not_found", problem.message, "body.model")
    return _bad(line, *error) if error else None


def _bad(line: int, code: str, text: str, param: str | None = None) -> BatchError:
    message = text.encode(errors="replace").decode()
    return BatchError(code=code, line=line, message=message, param=param)


# Lines: each request becomes jobs, and their answers a line of an output file


#: For requests that are not done when the time of their batch is over.
NO_TIME = "the request was not done within the completion window of the batch"

#: Error type of a request whose body is wrong.
REJECTED = "InvalidItem"


@dataclass(frozen=True, slots=True)
class LineJob:
    """A job of a request.

    Attributes:
        id: Of the task.
        item: The item, or a list of items.
        count: How many items the list has; 0 if there is no list.
        first: Index of the first one among those of the request.
    """

    id: str
    item: Any
    count: int
    first: int


@dataclass(slots=True)
class Line:
    """A request that has not ended.

    Attributes:
        row: The request, without its items.
        jobs: Its jobs, by id.
        answers: How those of them ended that have ended.
    """

    row: Record
    jobs: Mapping[str, LineJob]
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all of its jobs have ended."""
        return len(self.answers) == len(self.jobs)

    def answer(self) -> Answer:
        """How the request ended: all values, or the first error."""
        values: list[Any] = []
        answer = Answer()
        for job in self.jobs.values():
            answer = self.answers[job.id]
            if job.count:
                answer = joined(answer, job.count, job.first)
                values += answer.value or ()
            if answer.error is not None:
                return answer
        if values:
            answer = Answer(value=values)
        return in_form(answer, self.row.form) if self.row.form else answer


class BatchLines:
    """The lines of one batch."""

    def __init__(
        self,
        record: BatchRecord,
        files: FileStore,
        is_own_name: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Reads nothing yet.

        Args:
            record: The batch.
            files: Has its file.
            is_own_name: Whether the name of a model is no alias.
        """
        self._record = record
        self._files = files
        self._is_own_name = is_own_name
        model = record.batch.model or ""
        self.journal = Journal(record.run, model, {}, [""], [])
        self._format = OpenAIFormat(self.journal, model, _line_name, unpack=_unpacked)

    def read(self, number: int) -> Iterator[Line | Broken]:
        """The requests of a slice that have not ended."""
        record, ended = self._record, set(self._record.ended_lines)
        start = record.slices[number]
        following = record.slices[number + 1 : number + 2]
        with (
            SeenIds() as seen,
            self._files.open(record.owner, record.batch.input_file_id) as file,
        ):
            file.seek(start.offset)
            lines = Lines(file)
            lines.number = start.lines
            picker = RequestPicker(None, None, seen)
            # The file was validated: all of its requests name one model.
            picker.settle = lambda model: model
            picker.is_own_name, picker.url = self._is_own_name, record.batch.endpoint
            rows = JsonRows(lines)
            for row in rows:
                if following and rows.number > following[0].lines:
                    return
                if rows.number not in ended:
                    yield self._line(picker.pick(rows.number, row))

    def _line(self, row: Record | Broken) -> Line | Broken:
        if isinstance(row, Broken):
            return row
        items = row.item if row.item_count else [row.item]
        limits = Caller("", None, None, 0, self._record.max_items, self._record.max_chars)
        try:
            limits.check(sum(map(count_texts, items)), sum(map(count_item_chars, items)))
        except Problem as problem:
            return Broken(row.line, row.id, problem.message)
        if not row.item_count:
            job = LineJob(self.journal.task_id(0, row.line), row.item, 0, 0)
            return Line(row, {job.id: job})
        jobs = {}
        for part, first in enumerate(range(0, len(items), ITEMS_PER_JOB)):
            some = items[first : first + ITEMS_PER_JOB]
            job = LineJob(self.journal.task_id(part, row.line), some, len(some), first)
            jobs[job.id] = job
        return Line(row, jobs)

    def result(self, row: Record, value: Any) -> tuple[bytes, tuple[int, int]]:
        """A line of the output file, and the tokens that were read and written."""
        form = {"form": row.form} if row.form else {}
        line = self._format.result({"id": row.id, "line": row.line, **form, "result": value})
        usage = line["response"]["body"].get("usage", {})
        tokens = (int(usage.get("prompt_tokens", 0)), int(usage.get("completion_tokens", 0)))
        try:
            content = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:  # Half a character, or an integer that is too large for it.
            content = encoded(line)
        return content + b"\n", tokens

    def failure(self, row: Record | Broken, type_: str, message: str) -> bytes:
        """A line of the error file."""
        error = {"type": type_, "message": SERVER_TEXTS.get(type_, message)}
        line = self._format.failure({"id": row.id, "line": row.line, "error": error})
        return encoded(line) + b"\n"

    def expired(self, row: Record | Broken) -> bytes:
        """A line of the error file, for a request that had no time."""
        return self.failure(row, EXPIRED, NO_TIME)


def get_jobs(lines: Sequence[Line]) -> dict[str, LineJob]:
    """The jobs of some requests that have not ended, by id."""
    return {
        job.id: job for line in lines for job in line.jobs.values() if job.id not in line.answers
    }


def _unpacked(vector: str) -> Any:
    """The numbers of a vector; a text that is none stays as it is."""
    try:
        return numbers(vector)
    except ValueError:
        return vector


def _line_name(_: int, line: int) -> str:
    return f"line {line}"


# Slices in flight


#: Slices in flight at once: while one is awaited, the next one is in the queue already.
AHEAD = 2

#: After so long without any result, in seconds, jobs are sent again that are in no queue and with
#: no worker: Redis has lost them.
STALL_S = 60.0

#: How much longer than the batch its jobs are worth running, in seconds, as clocks differ.
EXPIRY_GRACE_S = 60.0

#: How long sending may wait for space in a queue, in seconds; then another batch has its turn.
ROOM_WAIT_S = 1.0

#: How long one look for results takes, in seconds.
LOOK_S = 0.25


@dataclass(slots=True)
class Ended:
    """What has ended since it was last taken.

    Attributes:
        output: Lines of the output file.
        errors: Lines of the error file.
        lines: Numbers of these lines.
        completed: How many have a result.
        tokens_in: Tokens that they read.
        tokens_out: Tokens that they wrote.
        jobs: Ids of jobs whose results are not needed any more.
    """

    output: list[bytes] = field(default_factory=list)
    errors: list[bytes] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    completed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    jobs: list[str] = field(default_factory=list)


class SlicesInFlight:
    """The slices of a batch that one turn sends and awaits."""

    def __init__(
        self, app: Celery, model: ServedModel, record: BatchRecord, lines: BatchLines
    ) -> None:
        self._app = app
        self._record = record
        self._lines = lines
        self._queue = model.queue
        retries = RetryPolicy()
        options = SubmitOptions(
            priority=record.priority,
            tenant=record.tenant,
            expires_s=max(record.batch.expires_at - time.time(), 0) + EXPIRY_GRACE_S,
        )
        self._collector = collector_for(app, retries)
        self._publisher = Publisher(
            app,
            model.name,
            queue=model.queue,
            # As /v1/embeddings asks, so that its jobs share batches with these.
            keywords={"encoding": "base64"} if record.batch.endpoint == URL else {},
            outage_policy=retries,
            wait_s=ROOM_WAIT_S,
            persistent=True,
            **options.sending,
        )
        self._retries = retries
        #: Requests that have not ended, by slice and by the ids of their jobs.
        self._waiting: dict[int, dict[int, Line]] = {}
        self._by_job: dict[str, Line] = {}
        self.ended = Ended()

    def close(self) -> None:
        """Leaves in flight what is there."""
        self._collector.close()
        self._publisher.close()

    def load(self, number: int) -> None:
        """Awaits a slice, whose requests may have been sent.

        Raises:
            Problem: The file is gone.
        """
        if number in self._waiting:
            return
        waiting = self._waiting[number] = {}
        for line in self._lines.read(number):
            if isinstance(line, Broken):
                self._fail(line.line, self._lines.failure(line, REJECTED, line.reason))
                continue
            waiting[line.row.line] = line
            self._by_job |= dict.fromkeys(line.jobs, line)
        self._collector.expect(get_jobs(list(waiting.values())))

    def send(self, number: int, *, may_be_sent: bool) -> None:
        """Sends a slice that was loaded.

        Args:
            number: Which one.
            may_be_sent: Whether an earlier attempt may have sent some of it.
        """
        jobs = get_jobs(list(self._waiting[number].values()))
        self._send(self._missing(list(jobs)) if may_be_sent else list(jobs))

    def send_lost(self) -> None:
        """Sends what waits, and is in no queue and with no worker."""
        waiting = get_jobs([line for some in self._waiting.values() for line in some.values()])
        self._send(self._missing(list(waiting)))

    def _send(self, job_ids: Sequence[str]) -> None:
        jobs = [self._by_job[each].jobs[each] for each in job_ids]
        for count, group in groupby(jobs, key=lambda job: job.count):
            headers = build_header(count, self._collector.headers)
            self._publisher.send([(job.id, job.item) for job in group], headers)

    def _missing(self, job_ids: Sequence[str]) -> Sequence[str]:
        recovery = InFlightRecovery(
            self._app, self._queue, self._lines.journal.pattern, self._retries
        )
        return recovery.missing(job_ids)

    def collect(self, wait_s: float = LOOK_S) -> bool:
        """Takes what has come back; False if that is nothing."""
        before = len(self.ended.lines)
        for job_id, answer in self._collector.collect(wait_s):
            self._take(job_id, answer)
        return len(self.ended.lines) > before

    def take_rest(self) -> list[str]:
        """Takes what is there by now; returns the ids of jobs that go on."""
        for job_id, answer in self._collector.poll_all():
            self._take(job_id, answer)
        return list(get_jobs([line for some in self._waiting.values() for line in some.values()]))

    def revoke(self, job_ids: Sequence[str]) -> None:
        """Tells workers not to begin some jobs."""
        control: Any = self._app.control
        for some in chunks(iter(job_ids), REVOKE_CHUNK):
            control.revoke(some)

    def is_done(self, number: int) -> bool:
        """Whether all requests of a slice that was loaded have ended."""
        return not self._waiting[number]

    def take_ended(self, keep: Callable[[Ended], None]) -> None:
        """Hands over what has ended; when that is kept, its results leave the backend."""
        ended, self.ended = self.ended, Ended()
        keep(ended)
        self._collector.forget(ended.jobs)

    def _take(self, job_id: str, answer: Any) -> None:
        line = self._by_job[job_id]
        line.answers[job_id] = answer
        if not line.is_done:
            return
        row = line.row
        answer = line.answer()
        if answer.error is not None:
            self._fail(row.line, self._lines.failure(row, *answer.error))
        else:
            content, (tokens_in, tokens_out) = self._lines.result(row, answer.value)
            self.ended.output.append(content)
            self.ended.lines.append(row.line)
            self.ended.completed += 1
            self.ended.tokens_in += tokens_in
            self.ended.tokens_out += tokens_out
        self.ended.jobs += line.jobs
        for waiting in self._waiting.values():
            waiting.pop(row.line, None)
        for each in line.jobs:
            del self._by_job[each]

    def _fail(self, number: int, content: bytes) -> None:
        self.ended.errors.append(content)
        self.ended.lines.append(number)

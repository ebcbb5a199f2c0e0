"""The requests of a batch's file: validated, read slice by slice, and their answers as lines.

As with OpenAI, a file is taken as a whole: a line that is no request, an id that is missing or used
twice, another route or model, and nothing runs. What only a request's own body has wrong fails
alone, later, in the error file.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import orjson

from batchery_producer.answers import Answer, joined
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
from batchery_producer.gateway.models import ITEMS_PER_JOB, numbers
from batchery_producer.gateway.problems import SERVER_TEXTS, Problem
from batchery_producer.openai_generation import REQUESTS, count_chars, count_texts

#: Maximum values of a line, and as how many a list or an object counts: as of a body of the route.
MAX_VALUES = 300_000
CONTAINER_VALUES = 5

#: Texts of JSON, in which commas and brackets are no values.
TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')

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
    look: Callable[[], object] = lambda: None,
) -> Validated:
    """Reads a file of requests, a line at a time.

    Args:
        file: The file, open.
        endpoint: Route of all requests.
        find_model: Gives the model of a name; raises a `Problem` if there is none.
        look: Called with each request; what it raises ends this.
    """
    found, jobs = Validated(), SLICE_JOBS
    names: list[str] = []

    def settle(name: str) -> str:
        if not names:
            names.append(name)
            found.model = find_model(name)
        return names[0]

    lines = RequestLines(file, look)
    rows = RequestRows(lines)
    with SeenIds() as seen:
        picker = RequestPicker(None, None, seen)
        picker.settle, picker.url = settle, endpoint
        while True:
            start = Slice(lines.read_bytes, lines.number)
            row, error = _next(rows, picker)
            if row is None:
                break
            found.requests += 1
            if jobs >= SLICE_JOBS or start.offset - found.slices[-1].offset >= SLICE_BYTES:
                found.slices.append(start)
                jobs = 0
            jobs += _count_jobs(row)
            if found.requests > MAX_REQUESTS:
                text = f"more than {MAX_REQUESTS:,} requests; send several batches"
                found.errors = [BatchError(code="too_many_requests", message=text)]
                break
            if error is not None and len(found.errors) < MAX_ERRORS:
                text = error.text.encode(errors="replace").decode()
                told = {"code": error.code, "message": text, "param": error.field or None}
                found.errors.append(BatchError(line=rows.number, **told))
    if not found.requests:
        text = "the file has no requests"
        found.errors.append(BatchError(code="empty_file", message=text))
    return found


class RequestRows(JsonRows):
    """The lines of a file that came over HTTP, where nobody can name an encoding."""

    encoding_hint = "upload the file in UTF-8"


class TooManyValues(InvalidLine):
    """A line has more in it than a body of the route may have."""


class RequestLines(Lines):
    """The lines of a file, none of which takes long to be read."""

    def __init__(self, stream: BinaryIO, look: Callable[[], object]) -> None:
        super().__init__(stream)
        self._look = look

    def __next__(self) -> bytes:
        """The next line; raises an `InvalidLine` if it is too long, or has too much in it."""
        self._look()
        line = super().__next__()
        bare = TEXTS.sub(b"", line)
        values = bare.count(b",") + CONTAINER_VALUES * (bare.count(b"[") + bare.count(b"{"))
        if values > MAX_VALUES:
            raise TooManyValues(
                f"more than {MAX_VALUES:,} values, of which a list or an object counts as"
                f" {CONTAINER_VALUES}; make several requests of it"
            )
        return line


def _next(
    rows: RequestRows, picker: RequestPicker
) -> tuple[Mapping[str, Any] | None, RequestError | None]:
    """The next row, None at the end; and what is wrong with it."""
    try:
        row = next(rows, None)
        if row is None or isinstance(row, Mapping):
            return row, picker.find_error(rows.number, row) if row else None
        text = "a text; expected an object with custom_id, method, url and body"
        return {}, RequestError("invalid_json_line", text, "")
    except InvalidLine as error:
        code = "too_large" if isinstance(error, TooManyValues) else "invalid_json_line"
        return {}, RequestError(code, str(error), "")
    except Problem as problem:
        return {}, RequestError("model_not_found", problem.message, "body.model")


def _count_jobs(row: Mapping[str, Any]) -> int:
    """How many jobs a request becomes at most."""
    body = row.get("body")
    given = body.get("input", body.get("prompt")) if isinstance(body, Mapping) else None
    return -(-len(given) // ITEMS_PER_JOB) if isinstance(given, list) and given else 1


# Requests and their answers


#: For requests that are not done when the time of their batch is over.
NO_TIME = "the request was not done within the completion window of the batch"

#: Error type of a request whose body is wrong.
REJECTED = "InvalidItem"


@dataclass(frozen=True, slots=True)
class RequestJob:
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
class Request:
    """A request, and how far it is.

    Attributes:
        row: What the file says, or what is wrong with it.
        jobs: Its jobs, in order; none if something is wrong with it.
        answers: How those of them ended that have ended, by id.
    """

    row: Record | Broken
    jobs: list[RequestJob]
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all of its jobs have ended."""
        return len(self.answers) == len(self.jobs)

    @property
    def answer(self) -> Answer:
        """How it ended: all values, or the first error."""
        if isinstance(self.row, Broken):
            return Answer(error=(REJECTED, self.row.reason))
        values: list[Any] = []
        answer = Answer()
        for job in self.jobs:
            answer = self.answers[job.id]
            if job.count:
                answer = joined(answer, job.count, job.first)
                values += answer.value or ()
            if answer.error is not None:
                return answer
        if values:
            answer = Answer(value=values)
        return in_form(answer, self.row.form) if self.row.form else answer


class BatchRequests:
    """The requests of one batch."""

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
        model = record.model or ""
        self._journal = Journal(record.run, model, {}, [""], [])
        self._format = OpenAIFormat(self._journal, model, _line_name, unpack=_unpacked)
        #: Matches the ids of its jobs in messages.
        self.pattern = self._journal.pattern

    def read(self, number: int) -> Iterator[Request]:
        """The requests of a slice.

        Raises:
            Problem: The file is gone.
        """
        record = self._record
        start = record.slices[number]
        ends = [each.lines for each in record.slices[number + 1 : number + 2]]
        with (
            SeenIds() as seen,
            self._files.open(record.owner, record.input_file_id) as file,
        ):
            file.seek(start.offset)
            lines = Lines(file)
            lines.number = start.lines
            picker = RequestPicker(None, None, seen)
            # The file was validated: all of its requests name one model.
            picker.settle = lambda model: model
            picker.is_own_name, picker.url = self._is_own_name, record.endpoint
            rows = JsonRows(lines)
            for row in rows:
                if ends and rows.number > ends[0]:
                    return
                yield self._request(picker.pick(rows.number, row))

    def _request(self, row: Record | Broken) -> Request:
        if isinstance(row, Broken):
            return Request(row, [])
        items = row.item if row.item_count else [row.item]
        limits = Caller("", None, None, 0, self._record.max_items, self._record.max_chars)
        try:
            limits.check(sum(map(count_texts, items)), count_chars(items))
        except Problem as problem:
            return Request(Broken(row.line, row.id, problem.message), [])
        if not row.item_count:
            id_ = self._journal.task_id(0, row.line)
            return Request(row, [RequestJob(id_, row.item, 0, 0)])
        jobs = []
        for part, first in enumerate(range(0, len(items), ITEMS_PER_JOB)):
            some = items[first : first + ITEMS_PER_JOB]
            id_ = self._journal.task_id(part, row.line)
            jobs.append(RequestJob(id_, some, len(some), first))
        return Request(row, jobs)

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

    def failure(self, row: Record | Broken, error: tuple[str, str] = (EXPIRED, NO_TIME)) -> bytes:
        """A line of the error file; by default for a request that had no time."""
        type_, message = error
        told = {"type": type_, "message": SERVER_TEXTS.get(type_, message)}
        line = self._format.failure({"id": row.id, "line": row.line, "error": told})
        return encoded(line) + b"\n"


def _unpacked(vector: str) -> Any:
    """The numbers of a vector; a text that is none stays as it is."""
    try:
        return numbers(vector)
    except ValueError:
        return vector


def _line_name(_: int, line: int) -> str:
    return f"line {line}"

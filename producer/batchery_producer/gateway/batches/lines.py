"""Requests of a batch file: each becomes jobs, and their answers a line of an output file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from batchery_producer.answers import Answer, joined
from batchery_producer.files.journal import Journal, encoded
from batchery_producer.files.openai_batch import EXPIRED, OpenAIFormat, RequestPicker, in_form
from batchery_producer.files.records import Broken, Record, SeenIds
from batchery_producer.files.rows import JsonRows, Lines
from batchery_producer.gateway.batches.files import FileStore
from batchery_producer.gateway.batches.records import BatchRecord
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.inference import ITEMS_PER_JOB
from batchery_producer.gateway.models.vectors import numbers
from batchery_producer.gateway.problems import Problem

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
        self.journal = Journal(record.run, model, {}, [""], [], 0)
        self._format = OpenAIFormat(self.journal, model, _line_name, unpack=_unpacked)

    def read(self, number: int) -> Iterator[Line | Broken]:
        """The requests of a slice that have not ended.

        Raises:
            Problem: The file is gone.
        """
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
            picker.is_own_name = self._is_own_name
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
            limits.check(len(items), sum(map(len, items)))
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

    def result(self, row: Record, value: Any) -> tuple[bytes, int]:
        """A line of the output file, and its tokens."""
        form = {"form": row.form} if row.form else {}
        line = self._format.result({"id": row.id, "line": row.line, **form, "result": value})
        tokens = int(line["response"]["body"].get("usage", {}).get("total_tokens", 0))
        try:
            content = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:  # Half a character, or an integer that is too large for it.
            content = encoded(line)
        return content + b"\n", tokens

    def failure(self, row: Record | Broken, type_: str, message: str) -> bytes:
        """A line of the error file."""
        error = {"type": type_, "message": message}
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

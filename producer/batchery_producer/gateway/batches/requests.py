"""The lines of a batch's file: whether they are requests, and how their answers are written.

A line of a file is `{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {"model":
..., "input": ...}}`; chats and prompts have other URLs. As with OpenAI, a file is taken as a whole:
a line that is no request, an id that is missing or used twice, another route or model, and nothing
runs. What only a request's own body has wrong fails alone, later, in the error file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, BinaryIO

import orjson
from starlette.responses import Response

from batchery_producer.files.rows import InvalidLine, split_lines
from batchery_producer.gateway.batches.files import FileStore
from batchery_producer.gateway.batches.store import BatchError, BatchRecord, Slice
from batchery_producer.gateway.models import ITEMS_PER_JOB
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.request_fields import CONTAINER_VALUES, MAX_VALUES, count_values

# What a file must be


#: Maximum requests of a batch.
MAX_REQUESTS = 50_000

#: Maximum errors that are told of one file.
MAX_ERRORS = 100

#: Jobs and bytes from which on a slice of a file takes no further request.
SLICE_JOBS = 512
SLICE_BYTES = 4 * 1024 * 1024

EXPECTED = "expected an object with custom_id, method, url and body"


def _wrong(code: str, message: str, param: str | None = None) -> Problem:
    """What makes a line no request of its file."""
    return Problem(Kind.INVALID, message, code=code, param=param)


@dataclass(slots=True)
class FileFacts:
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


def read_file(file: BinaryIO, endpoint: str, find_model: Callable[[str], str]) -> FileFacts:
    """Reads a file of requests, a line at a time.

    Args:
        file: The file, open.
        endpoint: Route of all requests.
        find_model: Gives the model of a name; raises a `Problem` if there is none.
    """
    found, jobs, model = FileFacts(), SLICE_JOBS, None
    seen: dict[bytes, int] = {}
    for start, content in _split_lines(file, Slice(0, 0)):
        row: Mapping[str, Any] = {}
        try:
            row = _parse_line(content)
            _check_line(row, endpoint)
            line, id_, name = start.lines + 1, row["custom_id"], row["body"]["model"]
            first = seen.setdefault(blake2b(id_.encode(), digest_size=16).digest(), line)
            if first != line:
                text = f"the id {id_!r:.100} is already used in line {first}"
                raise _wrong("duplicate_custom_id", text, "custom_id")
            if model is None:
                model = name
                found.model = find_model(name)
            elif name != model:
                text = f"model {name!r:.100}, but the first request has model {model!r:.100}"
                raise _wrong("mismatched_model", f"{text}; a batch has one model", "body.model")
        except Problem as wrong:
            if len(found.errors) < MAX_ERRORS:
                code, line = wrong.code or wrong.kind, start.lines + 1
                error = BatchError(code=code, line=line, message=wrong.message, param=wrong.param)
                found.errors.append(error)
        found.requests += 1
        if found.requests > MAX_REQUESTS:
            text = f"more than {MAX_REQUESTS:,} requests; send several batches"
            found.errors = [BatchError(code="too_many_requests", message=text)]
            break
        if jobs >= SLICE_JOBS or start.offset - found.slices[-1].offset >= SLICE_BYTES:
            found.slices.append(start)
            jobs = 0
        jobs += _count_jobs(row.get("body"))
    if not found.requests:
        found.errors = [BatchError(code="empty_file", message="the file has no requests")]
    return found


def _split_lines(file: BinaryIO, start: Slice) -> Iterator[tuple[Slice, bytes | InvalidLine]]:
    """The lines that are not blank, and where each begins."""
    offset, number = start
    file.seek(offset)
    for line in split_lines(file):
        if isinstance(line, InvalidLine) or line.strip():
            yield Slice(offset, number), line
        offset, number = file.tell(), number + 1


def _parse_line(content: bytes | InvalidLine) -> Mapping[str, Any]:
    """The object in a line; one that would take long to be read is wrong."""
    if isinstance(content, InvalidLine):
        raise _wrong("too_large", str(content))
    if max(count_values([content])) > MAX_VALUES:
        raise _wrong(
            "too_large",
            f"more than {MAX_VALUES:,} values, of which a list or an object counts as"
            f" {CONTAINER_VALUES}; make several requests of it",
        )
    try:
        row = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        text = f"not JSON in UTF-8 ({error.msg} at column {error.colno}); {EXPECTED}"
        raise _wrong("invalid_json_line", text) from None
    if not isinstance(row, dict):
        raise _wrong("invalid_json_line", f"a JSON {type(row).__name__}; {EXPECTED}")
    return row


def _check_line(row: Mapping[str, Any], endpoint: str) -> None:
    id_, body, method, url = (row.get(name) for name in ("custom_id", "body", "method", "url"))
    model = body.get("model") if isinstance(body, dict) else None
    for is_right, param, code, text in (
        (_is_text(id_), "custom_id", "missing_custom_id", "no custom_id, or it is no text"),
        (isinstance(body, dict), "body", "missing_body", "no body, or it is no object"),
        (method in ("POST", None), "method", "invalid_method", f"{method!r:.100}: must be POST"),
        (url == endpoint, "url", "invalid_url", f"{url!r:.100}: must be {endpoint}"),
        (_is_text(model), "body.model", "missing_model", "no model, or it is no text"),
    ):
        if not is_right:
            raise _wrong(code, f"{param}: {text}", param)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _count_jobs(body: Any) -> int:
    """How many jobs a request becomes at most."""
    given = body.get("input", body.get("prompt")) if isinstance(body, dict) else None
    return -(-len(given) // ITEMS_PER_JOB) if isinstance(given, list) and given else 1


# Its lines, and their answers


@dataclass(slots=True)
class Line:
    """A request of a batch's file, and its answer.

    Attributes:
        id: Names the request in its answer.
        custom_id: The caller's name of it.
        body: What it asks for.
        size_bytes: How long it is.
        answer: None as long as there is none.
    """

    id: str
    custom_id: str
    body: dict[str, Any]
    size_bytes: int
    answer: Response | None = None

    @property
    def is_failed(self) -> bool:
        """Whether its answer is an error."""
        return self.answer is not None and self.answer.status_code != 200


def read_slice(record: BatchRecord, number: int, files: FileStore) -> Iterator[Line]:
    """The lines of a slice of a batch.

    Args:
        record: The batch.
        number: Of the slice.
        files: Has its file.

    Raises:
        FileIsGone: There is no file any more.
    """
    ends = record.slices[number + 1 : number + 2]
    with files.open(record.owner, record.input_file_id) as file:
        for start, content in _split_lines(file, record.slices[number]):
            if start in ends:
                return
            assert isinstance(content, bytes)  # The file was validated.
            row = orjson.loads(content)
            id_ = f"{record.id}-{start.lines + 1}"
            yield Line(id_, row["custom_id"], row["body"], len(content))


def write_line(line: Line) -> bytes:
    """A line of an output or error file, with its end; a request without an answer had no time."""
    response, error = None, None
    if line.answer is not None:
        body = orjson.Fragment(line.answer.body)
        status = line.answer.status_code
        response = {"status_code": status, "request_id": line.id, "body": body}
    else:
        text = "the request was not done within the completion window of the batch"
        error = {"code": "batch_expired", "message": text}
    id_ = line.id.replace("batch_", "batch_req_")
    found = {"id": id_, "custom_id": line.custom_id, "response": response, "error": error}
    return orjson.dumps(found) + b"\n"

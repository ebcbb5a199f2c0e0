"""Validation: what is wrong with the file of a batch, before any of its requests runs.

As with OpenAI, a file is taken as a whole: a line that is no request, an id that is missing or used
twice, another route or model, and nothing runs. What only a request's own body has wrong fails
alone, later, in the error file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from batchery_producer.files.openai_batch import RequestError, RequestPicker
from batchery_producer.files.records import SeenIds
from batchery_producer.files.rows import InvalidLine, JsonRows, Lines
from batchery_producer.gateway.batches.records import MAX_REQUESTS, BatchError, Slice
from batchery_producer.gateway.inference import ITEMS_PER_JOB
from batchery_producer.gateway.problems import Problem

#: Routes that a batch may ask for, and the kinds of models that they need.
ENDPOINTS: Mapping[str, tuple[str, ...]] = {"/v1/embeddings": ("embedding",)}

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
        picker.settle = settle
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
            error = _find_error(picker, line, row, endpoint)
            if error is not None and len(found.errors) < MAX_ERRORS:
                found.errors.append(error)
    if not found.requests:
        text = "the file has no requests"
        found.errors.append(BatchError(code="empty_file", message=text))
    return found


def _rows(file: BinaryIO) -> Iterator[tuple[Slice, int, Mapping[str, Any] | BatchError]]:
    """The place before each row, its line, and the row or what is wrong with it."""
    lines = Lines(file)
    rows = JsonRows(lines)
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
    given = body.get("input") if isinstance(body, Mapping) else None
    return -(-len(given) // ITEMS_PER_JOB) if isinstance(given, list) and given else 1


def _find_error(
    picker: RequestPicker, line: int, row: Mapping[str, Any] | BatchError, endpoint: str
) -> BatchError | None:
    if isinstance(row, BatchError):
        return row
    try:
        error = picker.find_error(line, row, endpoint)
    except Problem as problem:
        error = RequestError("model_not_found", problem.message, "body.model")
    return _bad(line, *error) if error else None


def _bad(line: int, code: str, text: str, param: str | None = None) -> BatchError:
    message = text.encode(errors="replace").decode()
    return BatchError(code=code, line=line, message=message, param=param)

"""The requests of a batch's file: whether they are any, what jobs they become, and their answers.

A line of a file is `{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {"model":
..., "input": ...}}`; chats and prompts have other URLs. As with OpenAI, a file is taken as a whole:
a line that is no request, an id that is missing or used twice, another route or model, and nothing
runs. What only a request's own body has wrong fails alone, later, in the error file.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import orjson
from celery.utils.functional import chunks
from pydantic import ConfigDict, Field, ValidationError

from batchery.errors import InvalidItem
from batchery.protocol.headers import MAX_ITEMS
from batchery_producer.answers import Answer, joined
from batchery_producer.files.json_lines import encoded
from batchery_producer.files.rows import InvalidLine, split_lines
from batchery_producer.gateway.batches.files import FileStore
from batchery_producer.gateway.batches.store import BatchError, BatchRecord, Slice
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.models import ITEMS_PER_JOB, ServedModel, numbers, shorten
from batchery_producer.gateway.problems import OPENAI, SERVER_TEXTS, Kind, Problem
from batchery_producer.openai_generation import (
    REQUESTS,
    TOO_LONG_CODE,
    GenerationRequest,
    build_completion,
    count_chars,
    count_copied_chars,
    count_texts,
)
from batchery_producer.request_fields import (
    CONTAINER_VALUES,
    MAX_VALUES,
    RequestBody,
    count_values,
    expected,
)

# What a file must be


EMBEDDINGS_URL = "/v1/embeddings"

#: Routes that a batch may ask for, and the kinds of models that they need.
ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    EMBEDDINGS_URL: ("embedding",),
    **dict.fromkeys(REQUESTS, ("generation",)),
}

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


def read_file(
    file: BinaryIO,
    endpoint: str,
    find_model: Callable[[str], str],
    look: Callable[[], object] = lambda: None,
) -> FileFacts:
    """Reads a file of requests, a line at a time.

    Args:
        file: The file, open.
        endpoint: Route of all requests.
        find_model: Gives the model of a name; raises a `Problem` if there is none.
        look: Called with each request; what it raises ends this.
    """
    found, jobs, model = FileFacts(), SLICE_JOBS, None
    seen: dict[bytes, int] = {}
    for start, content in _split_lines(file, Slice(0, 0)):
        look()
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


# What a body asks for


#: Why token ids are refused where a model has the place of another one.
ALIAS_IDS = (
    "{}: has token ids, but {!r:.100} is an alias, so they may be another tokenizer's; send"
    " texts (LangChain: check_embedding_ctx_length=False), or the model's own ids under its own"
    " name"
)

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class EmbeddingsLine(RequestBody):
    """A body for embeddings, with OpenAI's fields alone."""

    model_config = ConfigDict(extra="forbid")

    model: str
    user: Any = None
    input: Annotated[
        str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, max_length=MAX_ITEMS)],
        expected(f"a text or token ids, or a list of 1 to {MAX_ITEMS:,} of them"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None

    def items(self) -> list[Any]:
        """The texts, and the ids of tokens."""
        is_one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return [self.input] if is_one else list(self.input)


def read_items(url: str, body: Mapping[str, Any], *, is_own_name: bool = True) -> list[Any]:
    """The items of a request: texts, ids of tokens, or what a generation model takes.

    Args:
        url: Its route.
        body: Its body.
        is_own_name: Whether its model is named by no alias.

    Raises:
        InvalidItem: What its own body has wrong.
    """
    for name in ("input", "prompt"):
        if has_ids(body.get(name)) and not is_own_name:
            raise InvalidItem(ALIAS_IDS.format(name, body["model"]))
    try:
        request = REQUESTS.get(url, EmbeddingsLine).model_validate(dict(body))
    except ValidationError as error:
        first = error.errors()[0]
        text = str(first["msg"]).removeprefix("Value error, ")
        raise InvalidItem(f"{'.'.join(map(str, first['loc']))}: {text}") from None
    if isinstance(request, GenerationRequest) and request.stream:
        raise InvalidItem("stream: batch files have whole answers; leave it out")
    return request.items()


def has_ids(given: Any) -> bool:
    """Whether an input has token ids: itself, or one of its items."""
    return isinstance(given, list) and any(isinstance(each, int | list) for each in given)


# Requests and their answers


#: Types of errors that get status 400, because the request was wrong; all others get 500.
CLIENT_ERRORS = ("InvalidItem", "PromptTooLong", "BatchArgumentError", "ValueError", "TypeError")

#: Greatest difference from 1 of the length of a vector that a model has scaled to length 1.
LENGTH_TOLERANCE = 1e-3


@dataclass(slots=True)
class Request:
    """A request, and how far it is.

    Attributes:
        id: It is in the ids of its jobs.
        custom_id: The caller's.
        asked: What its body asks for, besides its items.
        jobs: Items of its jobs, by their ids and in order; none if its body is wrong.
        error: What is wrong with its body: type and text.
        answers: How those of its jobs ended that have ended, by id.
    """

    id: str
    custom_id: str
    asked: Mapping[str, Any]
    jobs: dict[str, list[Any]] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all of its jobs have ended."""
        return len(self.answers) == len(self.jobs)

    def read_answer(self) -> Answer:
        """The results of all items, or the first error, when it is done."""
        results: list[Any] = []
        for id_, items in self.jobs.items():
            answer = joined(self.answers[id_], len(items), len(results))
            if answer.error is not None:
                return answer
            results += answer.value
        return Answer(results, self.error)


def read_slice(
    record: BatchRecord, number: int, files: FileStore, model: ServedModel | None = None
) -> Iterator[Request]:
    """The requests of a slice of a batch.

    Args:
        record: The batch.
        number: Of the slice.
        files: Has its file.
        model: Its model; None if the settings have it no more.

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
            body = row["body"]
            asked = {name: body.get(name) for name in ("encoding_format", "dimensions")}
            request = Request(f"{record.id}-{start.lines + 1}", row["custom_id"], asked)
            try:
                is_own_name = model is None or model.is_own_name(body["model"])
                items = read_items(record.endpoint, body, is_own_name=is_own_name)
                _check_limits(record, items)
            except (InvalidItem, Problem) as error:
                request.error = ("InvalidItem", str(error))
            else:
                parts = enumerate(chunks(iter(items), ITEMS_PER_JOB))
                request.jobs = {f"{request.id}-{part}": some for part, some in parts}
            yield request


def _check_limits(record: BatchRecord, items: list[Any]) -> None:
    chars = count_chars(items)
    limits = Caller("", None, None, 0, record.max_items, record.max_chars)
    limits.check(sum(map(count_texts, items)), chars, chars - count_copied_chars(items))


def write_line(record: BatchRecord, request: Request) -> tuple[bytes, Mapping[str, int] | None]:
    """The line of a request; one that is not done had no time.

    Returns:
        The line with its end; and the tokens that it took, or None for one of the error file.
    """
    line: dict[str, Any] = {
        "id": request.id.replace("batch_", "batch_req_"),
        "custom_id": request.custom_id,
        "response": None,
        "error": None,
    }
    usage = None
    if request.is_done:
        status, body = _answer(record, request)
        usage = body.get("usage")
        line["response"] = {"status_code": status, "request_id": request.id, "body": body}
    else:
        text = "the request was not done within the completion window of the batch"
        line["error"] = {"code": "batch_expired", "message": text}
    try:
        content = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # Half a character, or an integer that is too large for it.
        content = encoded(line)
    return content + b"\n", usage


def _answer(record: BatchRecord, request: Request) -> tuple[int, dict[str, Any]]:
    """The status and the body with which a request is answered."""
    answer, model = request.read_answer(), record.model or ""
    if answer.error is None:
        try:
            if record.endpoint in REQUESTS:
                made = build_completion(record.endpoint, request.id, model, answer.value)
                return 200, dict(made)
            return 200, _list_vectors(model, request.asked, answer.value)
        except InvalidItem as error:  # The vectors are shorter than it asks for.
            answer = Answer(error=("InvalidItem", str(error)))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            text = f"the result is none of {record.model!r}: {error!r:.200}"
            answer = Answer(error=("WrongResult", text))
    assert answer.error is not None
    type_, text = answer.error[0], SERVER_TEXTS.get(*answer.error)
    code = TOO_LONG_CODE if type_ == "PromptTooLong" else type_
    status = 400 if type_ in CLIENT_ERRORS else 500
    return status, OPENAI.body(Problem(Kind.FAILED, text, code=code), status)


def _list_vectors(model: str, asked: Mapping[str, Any], results: list[Any]) -> dict[str, Any]:
    vectors: list[str] = [result["vector"] for result in results]
    if (dimensions := asked["dimensions"]) is not None:
        try:
            vectors = [shorten(each, dimensions, scale=_is_scaled(each)) for each in vectors]
        except ValueError as error:
            raise InvalidItem(str(error)) from None
    is_text = asked["encoding_format"] == "base64"
    tokens = sum(result["tokens"] for result in results)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": each if is_text else numbers(each)}
            for index, each in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _is_scaled(vector: str) -> bool:
    return bool(abs(np.linalg.norm(numbers(vector)) - 1) < LENGTH_TOLERANCE)

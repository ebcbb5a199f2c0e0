"""The requests of a batch's file: whether they are any, what jobs they become, and their answers.

A line of a file is `{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {"model":
..., "input": ...}}`; chats and prompts have other URLs. As with OpenAI, a file is taken as a whole:
a line that is no request, an id that is missing or used twice, another route or model, and nothing
runs. What only a request's own body has wrong fails alone, later, in the error file.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import orjson

from batchery.errors import BatcheryError, InvalidItem
from batchery.protocol.headers import MAX_ITEMS
from batchery_producer.answers import Answer, joined
from batchery_producer.files.dataset import SeenIds
from batchery_producer.files.journal import Journal
from batchery_producer.files.json_lines import encoded
from batchery_producer.files.rows import InvalidLine, read_json, split_lines
from batchery_producer.gateway.batches.files import FileStore
from batchery_producer.gateway.batches.store import MAX_REQUESTS, BatchError, BatchRecord, Slice
from batchery_producer.gateway.callers import Caller, check_copies
from batchery_producer.gateway.models import ITEMS_PER_JOB, numbers, shorten
from batchery_producer.gateway.problems import SERVER_TEXTS, Problem
from batchery_producer.openai_generation import (
    REQUESTS,
    TOO_LONG_CODE,
    build_completion,
    count_chars,
    count_copied_chars,
    count_texts,
    read_line,
)

# What a file must be


EMBEDDINGS_URL = "/v1/embeddings"

#: Routes that a batch may ask for, and the kinds of models that they need.
ENDPOINTS: Mapping[str, tuple[str, ...]] = {
    EMBEDDINGS_URL: ("embedding",),
    **dict.fromkeys(REQUESTS, ("generation",)),
}

#: Maximum errors that are told of one file.
MAX_ERRORS = 100

#: Jobs and bytes from which on a slice of a file takes no further request.
SLICE_JOBS = 512
SLICE_BYTES = 4 * 1024 * 1024

#: Maximum values of a line, and as how many a list or an object counts: as of a body of the route.
MAX_VALUES = 300_000
CONTAINER_VALUES = 5

#: Texts of JSON, in which commas and brackets are no values.
TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


class TooManyValues(InvalidLine):
    """A line has more in it than a body of the route may have."""


def split_requests(
    file: BinaryIO, look: Callable[[], object] = lambda: None
) -> Iterator[bytes | InvalidLine]:
    """The lines of a file, none of which takes long to be read; `look` is called before each."""
    for line in split_lines(file, is_remote=True):
        look()
        bare = b"" if isinstance(line, InvalidLine) else TEXTS.sub(b"", line)
        values = bare.count(b",") + CONTAINER_VALUES * (bare.count(b"[") + bare.count(b"{"))
        yield (
            line
            if values <= MAX_VALUES
            else TooManyValues(
                f"more than {MAX_VALUES:,} values, of which a list or an object counts as"
                f" {CONTAINER_VALUES}; make several requests of it"
            )
        )


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
    found, jobs, start = Validated(), SLICE_JOBS, Slice(0, 0)
    with SeenIds() as seen:
        checker = RequestChecker(endpoint, find_model, seen)
        # Nobody can name an encoding over HTTP.
        rows = read_json(split_requests(file, look), hint="upload the file in UTF-8")
        for line, row in rows:
            error = checker.check(line, row)
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
                found.errors.append(error)
            start = Slice(file.tell(), line)
    if not found.requests:
        text = "the file has no requests"
        found.errors.append(BatchError(code="empty_file", message=text))
    found.model = checker.model
    return found


class RequestChecker:
    """Says what makes a row no request of its file, whatever its body asks for."""

    def __init__(self, endpoint: str, find_model: Callable[[str], str], seen: SeenIds) -> None:
        self._endpoint = endpoint
        self._find_model = find_model
        self._seen = seen
        #: How the first request names the model.
        self._name = ""
        self.model: str | None = None

    def check(self, line: int, row: Any) -> BatchError | None:
        """What is wrong with a row of the file, if anything."""
        try:
            found = self._find_error(line, row)
        except Problem as problem:
            found = ("model_not_found", problem.message, "body.model")
        if not found:
            return None
        code, text, param = found
        message = text.encode(errors="replace").decode()
        return BatchError(code=code, line=line, message=message, param=param)

    def _find_error(self, line: int, row: Any) -> tuple[str, str, str | None] | None:
        if isinstance(row, InvalidLine):
            is_large = isinstance(row, TooManyValues)
            return "too_large" if is_large else "invalid_json_line", str(row), None
        if not isinstance(row, Mapping):
            text = "a text; expected an object with custom_id, method, url and body"
            return "invalid_json_line", text, None
        id_, body, method = row.get("custom_id"), row.get("body"), row.get("method", "POST")
        if not isinstance(id_, str) or not id_:
            return "missing_custom_id", "no custom_id, or it is no text", "custom_id"
        if id_.encode(errors="replace").decode() != id_:
            return "invalid_custom_id", "custom_id has half a character", "custom_id"
        if (first := self._seen.first_line(id_, 0, line)[1]) != line:
            text = f"the id {id_!r:.100} is already used in line {first}"
            return "duplicate_custom_id", text, "custom_id"
        if not isinstance(body, Mapping):
            text = "no body, or it is no object; a request has custom_id, method, url and body"
            return "missing_body", text, "body"
        if method != "POST":
            return "invalid_method", f"method {method!r:.100}: must be POST", "method"
        if row.get("url") != self._endpoint:
            text = f"must be {self._endpoint}, the endpoint of the batch"
            return "invalid_url", f"url {row.get('url')!r:.100}: {text}", "url"
        return self._find_model_error(body.get("model"))

    def _find_model_error(self, name: Any) -> tuple[str, str, str] | None:
        if not isinstance(name, str) or not name:
            return "missing_model", "no model, or it is no text", "body.model"
        if not self._name:
            self._name = name
            self.model = self._find_model(name)
        if name != self._name:
            text = f"model {name!r:.100}, but the first request has model {self._name!r:.100}"
            return "mismatched_model", f"{text}; a batch has one model", "body.model"
        return None


def _count_jobs(row: Any) -> int:
    """How many jobs a request becomes at most."""
    body = row.get("body") if isinstance(row, Mapping) else None
    given = body.get("input", body.get("prompt")) if isinstance(body, Mapping) else None
    return -(-len(given) // ITEMS_PER_JOB) if isinstance(given, list) and given else 1


# What a body asks for


#: Why token ids are refused where a model has the place of another one.
ALIAS_IDS = (
    "{}: has token ids, but {!r:.100} is an alias, so they may be another tokenizer's; send"
    " texts (LangChain: check_embedding_ctx_length=False), or the model's own ids under its own"
    " name"
)

#: Fields of other vendors that would change the vectors.
UNSERVED = (
    *("embedding_type", "output_dtype", "output_dimension", "task", "input_type", "truncation"),
    *("truncate", "normalized", "normalize", "late_chunking", "return_multivector"),
    "truncate_prompt_tokens",
)


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
    if url in REQUESTS:
        return read_line(url, body)
    if unserved := [name for name in UNSERVED if body.get(name) is not None]:
        raise InvalidItem(f"{', '.join(unserved)}: not served in batch files; leave it out")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise InvalidItem("encoding_format: float or base64")
    dimensions = body.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise InvalidItem("dimensions: a whole number from 1 on")
    given = body.get("input")
    items = [given] if isinstance(given, str) or _are_ids(given) else given
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        items = [None]
    if all(isinstance(each, str) for each in items) or all(map(_are_ids, items)):
        return items
    text = f"body: input must be a text or token ids, or a list of 1 to {MAX_ITEMS:,} of them"
    raise InvalidItem(text)


def has_ids(given: Any) -> bool:
    """Whether an input has token ids: itself, or one of its items."""
    return isinstance(given, list) and any(isinstance(each, int | list) for each in given)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(i) is int and i >= 0 for i in given)


# Requests and their answers


#: How a request ends that is not done when the time of its batch is over: type and text.
NO_TIME = ("TaskRevokedError", "the request was not done within the completion window of the batch")

#: Types of errors that get status 400, because the request was wrong; all others get 500.
CLIENT_ERRORS = ("InvalidItem", "PromptTooLong", "BatchArgumentError", "ValueError", "TypeError")

#: Greatest difference from 1 of the length of a vector that a model has scaled to length 1.
LENGTH_TOLERANCE = 1e-3


class WrongResult(BatcheryError):
    """A job has a result of another form than its model's."""


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
        id: Of its first job.
        custom_id: The caller's.
        body: What it asks for, without its items.
        jobs: Its jobs, in order; none if its body is wrong.
        error: What is wrong with it: type and text.
        answers: How those of its jobs ended that have ended, by id.
    """

    id: str
    custom_id: str
    body: Mapping[str, Any]
    jobs: list[RequestJob] = field(default_factory=list)
    error: tuple[str, str] | None = None
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all of its jobs have ended."""
        return len(self.answers) == len(self.jobs)

    def end(self) -> list[Any]:
        """The results of its items, when it is done; `error` says whether one of them failed."""
        results: list[Any] = []
        for job in self.jobs:
            answer = self.answers[job.id]
            if job.count:
                answer = joined(answer, job.count, job.first)
            self.error = self.error or answer.error
            results += answer.value or () if job.count else (answer.value,)
        return results


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
        self._model = record.model or ""
        self._journal = Journal(record.run, self._model, {}, [""], [])
        #: Matches the ids of its jobs in messages.
        self.pattern = self._journal.pattern

    def read(self, number: int) -> Iterator[Request]:
        """The requests of a slice.

        Raises:
            FileIsGone: There is no file any more.
        """
        record = self._record
        start = record.slices[number]
        ends = [each.lines for each in record.slices[number + 1 : number + 2]]
        with self._files.open(record.owner, record.input_file_id) as file:
            file.seek(start.offset)
            for count, row in read_json(split_lines(file, is_remote=True)):
                line = start.lines + count
                if ends and line > ends[0]:
                    return
                # The file was validated.
                assert isinstance(row, Mapping)
                yield self._request(line, row["custom_id"], row["body"])

    def _request(self, line: int, custom_id: str, body: Mapping[str, Any]) -> Request:
        record = self._record
        asked = {name: body.get(name) for name in ("encoding_format", "dimensions")}
        request = Request(self._journal.task_id(0, line), custom_id, asked)
        limits = Caller("", None, None, 0, record.max_items, record.max_chars)
        try:
            is_own_name = self._is_own_name(body["model"])
            items = read_items(record.endpoint, body, is_own_name=is_own_name)
            chars = count_chars(items)
            limits.check(sum(map(count_texts, items)), chars)
            check_copies(chars, chars - count_copied_chars(items))
        except (InvalidItem, Problem) as error:
            request.error = ("InvalidItem", str(error))
            return request
        if len(items) == 1:
            request.jobs.append(RequestJob(request.id, items[0], 0, 0))
            return request
        for part, first in enumerate(range(0, len(items), ITEMS_PER_JOB)):
            some = items[first : first + ITEMS_PER_JOB]
            id_ = self._journal.task_id(part, line)
            request.jobs.append(RequestJob(id_, some, len(some), first))
        return request

    def result(self, request: Request, results: list[Any]) -> tuple[bytes, tuple[int, int]]:
        """A line of the output file, and the tokens that were read and written.

        Raises:
            InvalidItem: The vectors are shorter than the request asks for.
            WrongResult: The results are those of another task.
        """
        try:
            if self._record.endpoint in REQUESTS:
                body = build_completion(self._record.endpoint, request.id, self._model, results)
            else:
                body = self._list_vectors(request.body, results)
        except InvalidItem:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise WrongResult(f"the result is none of {self._model!r}: {error!r:.200}") from error
        usage = body["usage"]
        line = _line(request, {"status_code": 200, "request_id": request.id, "body": body}, None)
        try:
            content = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)
        except orjson.JSONEncodeError:  # Half a character, or an integer that is too large for it.
            content = encoded(line)
        return content + b"\n", (usage["prompt_tokens"], usage.get("completion_tokens", 0))

    def _list_vectors(self, asked: Mapping[str, Any], results: list[Any]) -> dict[str, Any]:
        vectors: list[Any] = []
        for result in results:
            vector: str = result["vector"]
            if asked["dimensions"] is not None:
                is_scaled = abs(np.linalg.norm(numbers(vector)) - 1) < LENGTH_TOLERANCE
                try:
                    vector = shorten(vector, asked["dimensions"], scale=bool(is_scaled))
                except ValueError as error:
                    raise InvalidItem(str(error)) from None
            is_text = asked["encoding_format"] == "base64"
            vectors.append(vector if is_text else numbers(vector))
        tokens = sum(result["tokens"] for result in results)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ],
            "model": self._model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def failure(self, request: Request, error: tuple[str, str]) -> bytes:
        """A line of the error file, for an error's type and text."""
        type_, text = error[0], SERVER_TEXTS.get(*error)
        if type_ == NO_TIME[0]:
            line = _line(request, None, {"code": "batch_expired", "message": text})
            return encoded(line) + b"\n"
        status = 400 if type_ in CLIENT_ERRORS else 500
        kind = "invalid_request_error" if status == 400 else "server_error"
        code = TOO_LONG_CODE if type_ == "PromptTooLong" else type_
        told = {"message": text, "type": kind, "param": None, "code": code}
        response = {"status_code": status, "request_id": request.id, "body": {"error": told}}
        return encoded(_line(request, response, None)) + b"\n"


def _line(request: Request, response: Any, error: Any) -> dict[str, Any]:
    id_ = f"batch_req_{request.id.replace('-', '')}"
    return {"id": id_, "custom_id": request.custom_id, "response": response, "error": error}

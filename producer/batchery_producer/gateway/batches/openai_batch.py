"""OpenAI's batch files: requests as input, responses and errors as output.

A request is `{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {"model": ...,
"input": ...}}`; chats and prompts have other URLs. All requests of a run name one model and one
URL, as in OpenAI's own batches. The model is the task, or an alias of it, unless the caller names
one. `dimensions` and `encoding_format`, `temperature` and the like are each request's own.
"""

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from batchery.errors import InvalidItem
from batchery.protocol.headers import MAX_ITEMS
from batchery_producer.answers import Answer
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Picker, Record
from batchery_producer.openai_generation import (
    REQUESTS,
    TOO_LONG_CODE,
    build_completion,
    read_line,
)

URL = "/v1/embeddings"

#: The URLs that requests may have.
URLS = (URL, *REQUESTS)

#: Types of errors that get status 400, because the request was wrong; all others get 500.
CLIENT_ERRORS = ("InvalidItem", "PromptTooLong", "BatchArgumentError", "ValueError", "TypeError")

#: Type of error of jobs that no worker began in time.
EXPIRED = "TaskRevokedError"

#: Message for an invalid input.
INPUT = f"body: input must be a text or token ids, or a list of 1 to {MAX_ITEMS:,} of them"

#: Why token ids are refused where a model has the place of another one.
ALIAS_IDS = (
    "{}: has token ids, but {!r:.100} is an alias, so they may be another tokenizer's; send"
    " texts (LangChain: check_embedding_ctx_length=False), or the model's own ids under its own"
    " name"
)

#: How a request wants its vectors: fields of its body.
FORM = ("encoding_format", "dimensions")

#: Message for dimensions of something else.
NO_VECTOR = "dimensions: the task's result is no vector"

#: Fields of other vendors that would change the vectors.
UNSERVED = (
    *("embedding_type", "output_dtype", "output_dimension", "task", "input_type", "truncation"),
    *("truncate", "normalized", "normalize", "late_chunking", "return_multivector"),
    "truncate_prompt_tokens",
)

#: Greatest difference from 1 of the length of a vector that a model has scaled to length 1.
LENGTH_TOLERANCE = 1e-3

#: Error type of lines that cannot become a job.
INVALID_LINE = "InvalidLine"


class RequestError(NamedTuple):
    """What makes a row no request of its file: a code, a text, and the field that is wrong."""

    code: str
    text: str
    field: str


class RequestPicker(Picker):
    """Makes records of requests: the input is the item, `custom_id` is the id."""

    #: Takes the model of a request, and returns that of the run.
    settle: Callable[[str], str]

    #: Whether the name of a model is no alias, so that token ids are of its own tokenizer.
    is_own_name: Callable[[str], bool] = staticmethod(lambda _: True)

    #: The URL of all requests; empty until the first one says it.
    url: str = ""

    def pick(self, line: int, row: Mapping[str, Any] | str) -> Record | Broken:
        """As `Picker.pick`; it raises nothing."""
        if not isinstance(row, Mapping):
            return self.broken(line, "a bare string; expected a request: custom_id, url, body")
        id_, body = row.get("custom_id"), row.get("body", {})
        error = self.find_error(line, row)
        if error and error.code in ("missing_custom_id", "duplicate_custom_id"):
            return self.broken(line, error.text)
        try:
            if error:
                raise InvalidItem(error.text)
            items = self._read(body)
        except InvalidItem as reason:
            return Broken(line, id_, str(reason), self.source)
        item, item_count = (items[0], 0) if len(items) == 1 else (items, len(items))
        wanted = {name: body.get(name) for name in FORM}
        form = {name: value for name, value in wanted.items() if value not in (None, "float")}
        if self.url in REQUESTS:
            form = {"url": self.url}
        return Record(line, id_, item, self.source, item_count, form or None)

    def find_error(self, line: int, row: Mapping[str, Any]) -> RequestError | None:
        """What makes a row no request of its file, whatever its body asks for; remembers its id."""
        id_, body, method = row.get("custom_id"), row.get("body"), row.get("method", "POST")
        if not isinstance(id_, str) or not id_:
            return RequestError("missing_custom_id", "no custom_id, or it is no text", "custom_id")
        if not _is_unicode(id_):
            return RequestError("invalid_custom_id", "custom_id has half a character", "custom_id")
        if used := self.used(id_, line):
            return RequestError("duplicate_custom_id", used, "custom_id")
        if not isinstance(body, Mapping):
            text = "no body, or it is no object; a request has custom_id, method, url and body"
            return RequestError("missing_body", text, "body")
        if method != "POST":
            return RequestError("invalid_method", f"method {method!r:.100}: must be POST", "method")
        given = row.get("url")
        self.url = self.url or (given if given in URLS else "")
        if not self.url or given != self.url:
            there = f"{self.url}, the endpoint of the batch" if self.url else " or ".join(URLS)
            text = f"url {given!r:.100}: must be {there}"
            return RequestError("invalid_url", text, "url")
        model = body.get("model")
        if not isinstance(model, str) or not model:
            return RequestError("missing_model", "no model, or it is no text", "body.model")
        if model != (settled := self.settle(model)):
            text = f"model {model!r:.100}, but the first request has model {settled!r:.100}"
            return RequestError("mismatched_model", f"{text}; a batch has one model", "body.model")
        return None

    def _read(self, body: Mapping[str, Any]) -> list[Any]:
        """The items of a request.

        Raises:
            InvalidItem: What its own body has wrong.
        """
        for field in ("input", "prompt"):
            if has_ids(body.get(field)) and not self.is_own_name(body["model"]):
                raise InvalidItem(ALIAS_IDS.format(field, body["model"]))
        if self.url in REQUESTS:
            return read_line(self.url, body)
        if reason := self._reject(body):
            raise InvalidItem(reason)
        return _read_items(body.get("input"))

    def _reject(self, body: Mapping[str, Any]) -> str:
        """Says what the body of a request for embeddings has wrong."""
        unserved = [name for name in UNSERVED if body.get(name) is not None]
        encoding, dimensions = (body.get(name) for name in FORM)
        clauses = (
            (encoding not in (None, "float", "base64"), "encoding_format: float or base64"),
            (not _is_dimensions(dimensions), "dimensions: a whole number from 1 on"),
            (not _read_items(body.get("input")), INPUT),
            (bool(unserved), f"{', '.join(unserved)}: not served in batch files; leave it out"),
        )
        return next((reason for holds, reason in clauses if holds), "")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_items(given: Any) -> list[Any]:
    """The items of an input, each a text or the ids of its tokens; none if it is something else."""
    items = [given] if isinstance(given, str) or _are_ids(given) else given
    if not isinstance(items, list) or len(items) > MAX_ITEMS:
        return []
    is_one_kind = all(isinstance(each, str) for each in items) or all(map(_are_ids, items))
    return items if is_one_kind else []


def has_ids(given: Any) -> bool:
    """Whether an input has token ids: itself, or one of its items."""
    return isinstance(given, list) and any(isinstance(each, int | list) for each in given)


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(i) is int and i >= 0 for i in given)


def _is_dimensions(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value is not True and value > 0)


def in_form(answer: Answer, form: Mapping[str, Any]) -> Answer:
    """Cuts the vectors of an answer to the dimensions of its request.

    The job itself computes whole vectors, so that requests of any dimensions share a batch.
    """
    wanted = form.get("dimensions")
    if wanted is None:
        return answer
    results = answer.value if _are_many(answer.value) else [answer.value]
    cut: list[Any] = []
    for each in results:
        vector = _numbers(each.get("vector") if isinstance(each, Mapping) else each)
        if vector is None:
            return replace(answer, value=None, error=("InvalidItem", NO_VECTOR))
        if len(vector) < wanted:
            text = f"dimensions = {wanted}: the model's vectors have {len(vector)}"
            return replace(answer, value=None, error=("InvalidItem", text))
        short = shortened(vector, wanted)
        cut.append({**each, "vector": short} if isinstance(each, Mapping) else short)
    return replace(answer, value=cut if results is answer.value else cut[0])


def shortened(vector: Sequence[float], dimensions: int) -> Sequence[float]:
    """The leading dimensions; of length 1 if the whole vector is."""
    cut = list(vector[:dimensions])
    length = math.hypot(*cut)
    if abs(math.hypot(*vector) - 1) > LENGTH_TOLERANCE or not length:
        return cut
    return [number / length for number in cut]


def _numbers(vector: Any) -> Sequence[float] | None:
    """The numbers of a vector, which may be their bytes in base64; None if it is something else."""
    if isinstance(vector, str):
        try:
            content = base64.b64decode(vector, validate=True)
            return struct.unpack(f"<{len(content) // 4}f", content)
        except (ValueError, struct.error):
            return None
    return vector if isinstance(vector, list) and _is_vector(vector) else None


class OpenAIFormat:
    """Converts results and failures to lines of OpenAI's output and error files."""

    def __init__(
        self,
        journal: Journal,
        model: str,
        line_name: Callable[[int, int], str],
        *,
        unpack: Callable[[str], Any] | None = None,
    ) -> None:
        """Prepares.

        Args:
            journal: Knows the ids of the jobs.
            model: Its name, for results.
            line_name: Names a line of the input, given its source and its number.
            unpack: Makes numbers of a vector in base64 where a request wants those; by default it
                stays as it is.
        """
        self._journal = journal
        self._model = model
        self._line_name = line_name
        self._unpack = unpack
        self._numbers = {name: number for number, name in enumerate(journal.files)}

    def result(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """A line of the output file."""
        form, result = entry.get("form", {}), entry["result"]
        if "url" not in form:
            body = self._body(result, form.get("encoding_format", "float"))
            return self._line(entry, 200, body)
        results = result if isinstance(result, list) else [result]
        if not all(isinstance(each, Mapping) and "tokens_in" in each for each in results):
            return self._line(entry, 200, _as_it_is(result))
        job = self._journal.task_id(self._source(entry), entry["line"])
        return self._line(entry, 200, build_completion(form["url"], job, self._model, results))

    def failure(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """A line of the error file."""
        type_, message = entry["error"]["type"], entry["error"]["message"]
        if type_ == INVALID_LINE:
            where = self._line_name(self._source(entry), entry["line"])
            return self._line(
                entry, None, {"code": "invalid_line", "message": f"{where}: {message}"}
            )
        if type_ == EXPIRED:
            return self._line(entry, None, {"code": "batch_expired", "message": message})
        status = 400 if type_ in CLIENT_ERRORS else 500
        kind = "invalid_request_error" if status == 400 else "server_error"
        code = TOO_LONG_CODE if type_ == "PromptTooLong" else type_
        error = {"message": message, "type": kind, "param": None, "code": code}
        return self._line(entry, status, {"error": error})

    def _line(
        self, entry: Mapping[str, Any], status: int | None, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """A line; if the status is None there was no response, and the body is the error."""
        job = self._journal.task_id(self._source(entry), entry["line"])
        custom_id = entry["id"] if isinstance(entry["id"], str) else None
        response = {"status_code": status, "request_id": job, "body": body}
        return {
            "id": f"batch_req_{job.replace('-', '')}",
            "custom_id": custom_id,
            "response": None if status is None else response,
            "error": body if status is None else None,
        }

    def _source(self, entry: Mapping[str, Any]) -> int:
        return self._numbers.get(entry.get("file", ""), 0)

    def _body(self, result: Any, encoding: str) -> Mapping[str, Any]:
        results = result if _are_many(result) else [result]
        vectors: list[Any] = [
            each.get("vector") if isinstance(each, Mapping) else each for each in results
        ]
        if isinstance(result, str) or not all(map(_is_vector, vectors)):
            return _as_it_is(result)
        tokens = sum(each.get("tokens", 0) for each in results if isinstance(each, Mapping))
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._as(encoding, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self._model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _as(self, encoding: str, vector: Sequence[float] | str) -> Any:
        if isinstance(vector, str):
            return self._unpack(vector) if self._unpack and encoding == "float" else vector
        if encoding == "float":
            return vector
        numbers = [math.nan if each is None else each for each in vector]
        return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def _as_it_is(result: Any) -> Mapping[str, Any]:
    """The body of a task that is no model of such requests."""
    return result if isinstance(result, Mapping) else {"result": result}


def _is_vector(value: Any) -> bool:
    """Numbers, or their bytes in base64."""
    if isinstance(value, list):
        return all(isinstance(each, int | float) for each in value[:1])
    return isinstance(value, str)


def _are_many(result: Any) -> bool:
    """Whether it is the result of a list of texts, and not one vector."""
    return isinstance(result, list) and all(isinstance(each, Mapping | list) for each in result)

"""OpenAI's batch files: requests for embeddings as input, responses and errors as output.

A request is `{"custom_id": ..., "method": "POST", "url": "/v1/embeddings", "body": {"model": ...,
"input": ...}}`. All requests of a run name one model, as in OpenAI's own batches. The model is the
task unless the caller names one.
"""

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchery.protocol.multi_item import MAX_ITEMS
from batchery_producer.files.journal import Journal
from batchery_producer.files.records import Broken, Picker, Record

URL = "/v1/embeddings"

#: Types of errors that get status 400, because the request was wrong; all others get 500.
CLIENT_ERRORS = ("InvalidItem", "BatchArgumentError", "ValueError", "TypeError")

#: Type of error of jobs that no worker began in time.
EXPIRED = "TaskRevokedError"

#: Message for an invalid input.
INPUT = f"body: input must be a text, or a list of 1 to {MAX_ITEMS:,} texts"

#: Error type of lines that cannot become a job.
INVALID_LINE = "InvalidLine"


def is_request(row: Any) -> bool:
    """Whether a row is a request of a batch file."""
    return (
        isinstance(row, Mapping)
        and "custom_id" in row
        and "url" in row
        and isinstance(row.get("body"), Mapping)
    )


@dataclass(frozen=True, slots=True)
class Model:
    """What all requests of a file have in common.

    Attributes:
        name: Name of the model in the requests.
        encoding: Encoding of vectors in the responses: `float` or `base64`.
    """

    name: str
    encoding: str

    def __str__(self) -> str:
        return f"model {self.name!r} with encoding_format {self.encoding!r}"

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> "Model":
        """The model of a request."""
        body = request["body"]
        return cls(str(body.get("model", "")), str(body.get("encoding_format", "float")))


class RequestPicker(Picker):
    """Makes records of requests: the input is the item, `custom_id` is the id."""

    #: Takes the model of a request, and returns that of the run.
    settle: Callable[[Model], Model]

    def pick(self, line: int, row: Mapping[str, Any] | str) -> Record | Broken:
        """As `Picker.pick`; it raises nothing."""
        if not isinstance(row, Mapping):
            return self.broken(line, "a bare string; expected a request: custom_id, url, body")
        id_ = row.get("custom_id")
        if not isinstance(id_, str) or not id_:
            return self.broken(line, "no custom_id, or it is not a text")
        reason = self.used(id_, line) or self._reject(row)
        if reason:
            return Broken(line, id_, reason, self.source)
        texts = _texts_of(row["body"].get("input")) or []
        item, item_count = (texts[0], 0) if len(texts) == 1 else (texts, len(texts))
        return Record(line, id_, item, self.source, item_count)

    def _reject(self, row: Mapping[str, Any]) -> str:
        if not is_request(row):
            return "no request: it needs custom_id, method, url and body"
        body = row["body"]
        found = Model.of(row)
        model = self.settle(found)
        clauses = (
            (row.get("method", "POST") != "POST", f"method {row.get('method')!r}: must be POST"),
            (row["url"] != URL, f"url {row['url']!r}: only {URL} is served"),
            (not found.name, "body: no model"),
            (found.encoding not in ("float", "base64"), "encoding_format: float or base64"),
            (body.get("dimensions") is not None, "body: dimensions cannot be chosen"),
            (found != model, f"{found}, but the first request has {model}"),
            (not _texts_of(body.get("input")), INPUT),
        )
        return next((reason for holds, reason in clauses if holds), "")


def _texts_of(given: Any) -> list[str] | None:
    texts = given if isinstance(given, list) else [given]
    return texts if len(texts) <= MAX_ITEMS and all(isinstance(t, str) for t in texts) else None


class OpenAIFormat:
    """Converts results and failures to lines of OpenAI's output and error files."""

    def __init__(
        self, journal: Journal, model: Model, line_name: Callable[[int, int], str]
    ) -> None:
        """Prepares.

        Args:
            journal: Journal of the run.
            model: Model of the requests.
            line_name: Names a line of the input in messages, by source and line.
        """
        self._journal = journal
        self._model = model
        self._line_name = line_name
        self._numbers = {name: number for number, name in enumerate(journal.files)}

    def result(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """A line of the output file."""
        return self._line(entry, 200, self._body(entry["result"]))

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
        error = {"message": message, "type": kind, "param": None, "code": type_}
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

    def _body(self, result: Any) -> Mapping[str, Any]:
        results = result if _are_many(result) else [result]
        vectors: list[Any] = [
            each.get("vector") if isinstance(each, Mapping) else each for each in results
        ]
        if isinstance(result, str) or not all(map(_is_vector, vectors)):
            # The task is no embedding model, so its result stays as it is.
            return result if isinstance(result, Mapping) else {"result": result}
        tokens = sum(each.get("tokens", 0) for each in results if isinstance(each, Mapping))
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self._model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _encoded(self, vector: Sequence[float] | str) -> Any:
        if isinstance(vector, str) or self._model.encoding == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _is_vector(value: Any) -> bool:
    """Numbers, or their bytes in base64."""
    if isinstance(value, list):
        return all(isinstance(each, int | float) for each in value[:1])
    return isinstance(value, str)


def _are_many(result: Any) -> bool:
    """Whether it is the result of a list of texts, and not one vector."""
    return isinstance(result, list) and all(isinstance(each, Mapping | list) for each in result)

"""What went wrong with a request, and how each API says so."""

import logging
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import orjson
from kombu.exceptions import OperationalError
from pydantic import BaseModel
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoAnswer
from starlette.responses import Response
from starlette.types import Scope

from batchery.errors import (
    BatchArgumentError,
    BrokerRefused,
    DatasetError,
    DeadlineExceeded,
    GaveUp,
    InvalidItem,
    NoResult,
    QueueFull,
)

logger = logging.getLogger("uvicorn.error")

#: What callers get to know of a Redis that is away. The log has its address and the reason.
REDIS_AWAY = "Redis does not answer"

#: In how many seconds to come again then.
AWAY_RETRY_S = 1.0


class Kind(StrEnum):
    """Kinds of problems; each API has its own status and words for them."""

    INVALID = "invalid"
    EMPTY = "empty"
    TOO_LARGE = "too_large"
    HEAD_TOO_LARGE = "head_too_large"
    TOO_SLOW = "too_slow"
    NOT_JSON = "not_json"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    UNSUPPORTED = "unfit"
    CONFLICT = "conflict"
    NO_SUCH_METHOD = "no_such_method"
    OVERLOADED = "overloaded"
    FAILED = "failed"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    GONE = "gone"


#: The usual status of each kind.
STATUS = {
    Kind.INVALID: 422,
    Kind.EMPTY: 422,
    Kind.TOO_LARGE: 413,
    Kind.HEAD_TOO_LARGE: 431,
    Kind.TOO_SLOW: 408,
    Kind.NOT_JSON: 415,
    Kind.UNAUTHORIZED: 401,
    Kind.FORBIDDEN: 403,
    Kind.NOT_FOUND: 404,
    # No model can do this, though there may be one of the name.
    Kind.UNSUPPORTED: 404,
    Kind.CONFLICT: 409,
    Kind.NO_SUCH_METHOD: 405,
    Kind.OVERLOADED: 429,
    Kind.FAILED: 500,
    Kind.UNAVAILABLE: 503,
    Kind.TIMEOUT: 504,
    # Nobody reads it; as nginx logs callers who hang up.
    Kind.GONE: 499,
}


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Says what is wrong.

        Args:
            kind: Decides the status.
            message: Names the thing, what was wrong with it, and what to do.
            code: A name for programs, such as `model_not_found`.
            param: The field of the request.
            retry_after_s: In how many seconds to come again.
            headers: More headers of the answer.
        """
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})


def build_problem(error: BaseException) -> Problem:
    """The problem that an error of a job, or of sending it, is to its caller."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFull):
        return Problem(Kind.OVERLOADED, str(error), retry_after_s=error.retry_after_s)
    text = str(error) or type(error).__name__
    if isinstance(error, InvalidItem | BatchArgumentError):
        return Problem(Kind.INVALID, text)
    if isinstance(error, NoResult | DeadlineExceeded):
        return Problem(Kind.TIMEOUT, text)
    if isinstance(error, DatasetError):
        return Problem(Kind.UNAVAILABLE, text, retry_after_s=AWAY_RETRY_S)
    if isinstance(error, GaveUp | BrokerRefused | OperationalError | RedisError):
        return redis_problem(error)
    return Problem(Kind.FAILED, f"{type(error).__name__}: {text}", code=type(error).__name__)


def redis_problem(error: Exception) -> Problem:
    """The problem that an error of Redis is to callers, who get no address and no user of it."""
    logger.warning("Redis: %s", error)
    is_away = isinstance(error, GaveUp | OperationalError | NoConnection | NoAnswer)
    text = REDIS_AWAY if is_away else "Redis refuses what the gateway asks; its log says why"
    return Problem(Kind.UNAVAILABLE, text, retry_after_s=AWAY_RETRY_S)


class ErrorFormat(NamedTuple):
    """How an API words its errors.

    Attributes:
        status: Statuses of kinds that differ from the usual ones.
        body: Makes the body of a problem, given its status.
        schema: What such a body looks like.
    """

    status: Mapping[Kind, int]
    body: Callable[[Problem, int], Any]
    schema: type[BaseModel]

    def get_status(self, kind: Kind) -> int:
        """The status of a kind."""
        return self.status.get(kind, STATUS[kind])


class OpenAIErrorDetails(BaseModel):
    """What is wrong, as OpenAI tells it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(BaseModel):
    """An error of OpenAI's routes."""

    error: OpenAIErrorDetails


class TeiErrorBody(BaseModel):
    """An error of the routes of Text Embeddings Inference."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class CohereErrorBody(BaseModel):
    """An error of Cohere's routes."""

    message: str


class PlainErrorBody(BaseModel):
    """An error of the routes that are our own."""

    detail: str


def _openai(problem: Problem, status: int) -> Any:
    if status == 429:
        kind = "rate_limit_exceeded"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": problem.message,
            "type": kind,
            "param": problem.param,
            "code": problem.code,
        }
    }


#: TEI's names of kinds.
TEI_TYPES = {
    Kind.EMPTY: "Empty",
    Kind.OVERLOADED: "Overloaded",
    Kind.FAILED: "Backend",
    Kind.UNSUPPORTED: "Backend",
    Kind.UNAVAILABLE: "Unhealthy",
    Kind.TIMEOUT: "Unhealthy",
}


def _tei(problem: Problem, _: int) -> Any:
    return {"error": problem.message, "error_type": TEI_TYPES.get(problem.kind, "Validation")}


def _cohere(problem: Problem, _: int) -> Any:
    return {"message": problem.message}


def _plain(problem: Problem, _: int) -> Any:
    return {"detail": problem.message}


OPENAI = ErrorFormat({Kind.INVALID: 400, Kind.EMPTY: 400}, _openai, OpenAIErrorBody)
TEI = ErrorFormat(
    {Kind.EMPTY: 400, Kind.UNSUPPORTED: 424, Kind.FAILED: 424, Kind.TIMEOUT: 503},
    _tei,
    TeiErrorBody,
)
COHERE = ErrorFormat({Kind.INVALID: 400, Kind.EMPTY: 400}, _cohere, CohereErrorBody)
PLAIN = ErrorFormat({}, _plain, PlainErrorBody)

#: The form of each path; the longest beginning wins.
FORMS: dict[str, ErrorFormat] = {
    "/": PLAIN,
    "/v1/": OPENAI,
    "/v1/embeddings": OPENAI,
    "/v1/embed": COHERE,
    "/v1/rerank": COHERE,
    "/v2/": COHERE,
    **dict.fromkeys(
        (
            "/embed",
            "/predict",
            "/rerank",
            "/similarity",
            "/tokenize",
            "/decode",
            "/info",
            "/health",
            "/metrics",
        ),
        TEI,
    ),
}

_LONGEST_FIRST = sorted(FORMS, key=len, reverse=True)


def choose_error_format(path: str) -> ErrorFormat:
    """The form in which errors of a path are told."""
    if path == "/":
        return TEI  # Its clients post there.
    return FORMS[next((each for each in _LONGEST_FIRST if path.startswith(each)), "/")]


#: Problems that are ours, not the caller's; whatever keeps all requests out is logged elsewhere.
LOGGED = (Kind.FAILED, Kind.TIMEOUT)


def log_failure(scope: Scope, problem: Problem) -> None:
    """Logs that a request fails, with the id that its caller sees."""
    if problem.kind in LOGGED:
        why = " ".join(problem.message.split())
        request = (scope["state"]["request_id"], scope["method"], scope["path"])
        logger.warning("request %s: %s %.200r: %s: %.500s", *request, problem.kind, why)


def answer(path: str, problem: Problem) -> Response:
    """The answer to a request that failed."""
    form = choose_error_format(path)
    status = form.get_status(problem.kind)
    headers = problem.headers
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    return Response(
        orjson.dumps(form.body(problem, status)),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )

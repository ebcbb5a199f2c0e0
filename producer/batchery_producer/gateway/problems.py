"""What went wrong with a request, and how each API says so."""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self, TypeVar

import orjson
from celery.exceptions import TaskRevokedError
from fastapi.exceptions import RequestValidationError
from kombu.exceptions import OperationalError
from pydantic import BaseModel, ValidationError
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
    PromptTooLong,
    QueueFull,
    ServerBusy,
    ServerFailed,
    ServerRefused,
    UnknownJob,
)
from batchery.log_pace import LogPace
from batchery.retry import find_refusal
from batchery_producer.openai_generation import TOO_LONG_CODE

logger = logging.getLogger("uvicorn.error")

#: What callers get to know of a Redis that is away. The log has its address and the reason.
REDIS_AWAY = "Redis does not answer"

#: What callers get to know of a server behind a model, by the name of the error. The logs have its
#: address and its words.
SERVER_TEXTS = {
    "ServerFailed": "the server behind the model failed",
    "ServerBusy": "the server behind the model takes no more requests for now; come again later",
    "ServerRefused": "the server behind the model refuses its worker, whose log says why",
}

#: The keyword, or the part of an item, that an error of a job begins with.
PARAM = re.compile(r"(?:keyword (\w+)|((?:messages|prompt|tools)[^ :]*))(?=:| =)")

#: In how many seconds to come again then.
AWAY_RETRY_S = 1.0

#: The same of a Redis that answers, and has no memory for jobs: workers must make room.
REDIS_FULL = "Redis is full, and takes no jobs for now; come again later"
FULL_RETRY_S = 10.0

#: Of the lines about Redis: whoever looks each second would write one a second.
redis_log_pace = LogPace()


class Kind(StrEnum):
    """Kinds of problems; each API has its own status and words for some of them.

    Attributes:
        status: The usual status.
    """

    status: int

    def __new__(cls, value: str, status: int) -> Self:
        """Makes a kind of its row below."""
        kind = str.__new__(cls, value)
        kind._value_, kind.status = value, status
        return kind

    INVALID = "invalid", 422
    EMPTY = "empty", 422
    TOO_LARGE = "too_large", 413
    TOO_SLOW = "too_slow", 408
    NOT_JSON = "not_json", 415
    UNAUTHORIZED = "unauthorized", 401
    FORBIDDEN = "forbidden", 403
    NOT_FOUND = "not_found", 404
    # No model can do this, though there may be one of the name.
    UNSUPPORTED = "unfit", 404
    CONFLICT = "conflict", 409
    NO_SUCH_METHOD = "no_such_method", 405
    OVERLOADED = "overloaded", 429
    FAILED = "failed", 500
    BAD_GATEWAY = "bad_gateway", 502
    UNAVAILABLE = "unavailable", 503
    TIMEOUT = "timeout", 504
    # Nobody reads it; as nginx logs callers who hang up.
    GONE = "gone", 499


@dataclass(eq=False)
class Problem(Exception):
    """A request that is answered with an error.

    Attributes:
        kind: Decides the status.
        message: Names the thing, what was wrong with it, and what to do.
        code: A name for programs, such as `model_not_found`.
        param: The field of the request.
        retry_after_s: In how many seconds to come again.
        headers: More headers of the answer.
        detail: What the log has in place of the message, as it is not for callers.
    """

    kind: Kind
    message: str
    _: KW_ONLY
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    headers: Mapping[str, str] | None = None
    detail: str = ""

    def __str__(self) -> str:
        """Its message."""
        return self.message


Body = TypeVar("Body", bound=BaseModel)

#: pydantic's errors of a body that is missing, null, a list or the like.
NO_OBJECT = ("missing", "dict_type", "model_attributes_type")


def validate(form: type[Body], content: Any) -> Body:
    """A body in its form, where FastAPI has not seen to it.

    Raises:
        RequestValidationError: As FastAPI raises it.
    """
    try:
        return form.model_validate(content)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _build_invalid(error: Mapping[str, Any]) -> Problem:
    """The problem that one of pydantic's errors tells of."""
    text = str(error["msg"]).removeprefix("Value error, ")
    if tuple(error["loc"]) == ("body",) and error["type"] in NO_OBJECT:
        text = "the body is empty, or no object of JSON; send an object of the request's fields"
    where = ".".join(str(part) for part in error["loc"] if part != "body")
    return Problem(Kind.INVALID, f"{where}: {text}" if where else text, param=where or None)


def build_problem(error: BaseException) -> Problem:
    """The problem that an error of a request, of a job, or of sending it, is to its caller."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _build_invalid(error.errors()[0])
    if isinstance(error, QueueFull):
        return Problem(Kind.OVERLOADED, str(error), retry_after_s=error.retry_after_s)
    text = str(error) or type(error).__name__
    if isinstance(error, InvalidItem | BatchArgumentError):
        code = TOO_LONG_CODE if isinstance(error, PromptTooLong) else None
        found = PARAM.match(text)
        return Problem(Kind.INVALID, text, code=code, param=found and (found[1] or found[2]))
    if isinstance(error, ServerFailed):
        return _build_server_problem(error)
    if isinstance(error, UnknownJob):
        return Problem(Kind.NOT_FOUND, text)
    # Where a job has expired, its worker's clock was ahead of ours.
    is_expired = isinstance(error, TaskRevokedError) and text == "expired"
    if is_expired or isinstance(error, NoResult | DeadlineExceeded):
        return Problem(Kind.TIMEOUT, "no result in time" if is_expired else text)
    if isinstance(error, DatasetError):
        return Problem(Kind.UNAVAILABLE, text, retry_after_s=AWAY_RETRY_S)
    if isinstance(error, GaveUp | BrokerRefused | OperationalError | RedisError):
        return redis_problem(error)
    return Problem(Kind.FAILED, f"{type(error).__name__}: {text}", code=type(error).__name__)


def _build_server_problem(error: ServerFailed) -> Problem:
    text, detail = SERVER_TEXTS[type(error).__name__], str(error)
    if isinstance(error, ServerBusy):
        retry_after_s = error.retry_after_s
        return Problem(Kind.OVERLOADED, text, retry_after_s=retry_after_s, detail=detail)
    # OpenAI's clients heed it.
    headers = {"X-Should-Retry": "false"} if isinstance(error, ServerRefused) else None
    return Problem(Kind.BAD_GATEWAY, text, headers=headers, detail=detail)


def redis_problem(error: Exception) -> Problem:
    """The problem that an error of Redis is to callers, who get no address and no user of it."""
    if redis_log_pace.is_due(str(error)):
        logger.warning("Redis: %s", error)
    # Celery and kombu wrap a refusal in the error of a server that is away.
    cause: BaseException | None = error
    while cause is not None:
        if find_refusal(cause) == "OOM":
            return Problem(Kind.UNAVAILABLE, REDIS_FULL, retry_after_s=FULL_RETRY_S)
        cause = cause.__cause__
    is_away = isinstance(error, GaveUp | OperationalError | NoConnection | NoAnswer)
    text = REDIS_AWAY if is_away else "Redis refuses what the gateway asks; its log says why"
    return Problem(Kind.UNAVAILABLE, text, retry_after_s=AWAY_RETRY_S)


class ErrorFormat(NamedTuple):
    """How an API words its errors.

    Attributes:
        status: Statuses of kinds that differ from the usual ones.
        body: Makes the body of a problem, given its status.
    """

    status: Mapping[Kind, int]
    body: Callable[[Problem, int], Any]

    def get_status(self, kind: Kind) -> int:
        """The status of a kind."""
        return self.status.get(kind, kind.status)


#: What the schema says of errors.
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is wrong, or too much."},
    "5XX": {"description": "The model, its server or Redis failed."},
}


def _build_openai_error(problem: Problem, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {
        "error": {
            "message": problem.message,
            "type": "rate_limit_exceeded" if status == 429 else kind,
            "param": problem.param,
            "code": problem.code,
        }
    }


#: TEI's names of kinds; of all others, it is `Validation`.
TEI_TYPES = {
    Kind.EMPTY: "Empty",
    Kind.OVERLOADED: "Overloaded",
    Kind.FAILED: "Backend",
    Kind.UNSUPPORTED: "Backend",
    Kind.UNAVAILABLE: "Unhealthy",
    Kind.TIMEOUT: "Unhealthy",
}


def _build_tei_error(problem: Problem, _: int) -> dict[str, str]:
    return {"error": problem.message, "error_type": TEI_TYPES.get(problem.kind, "Validation")}


OPENAI = ErrorFormat({Kind.INVALID: 400, Kind.EMPTY: 400}, _build_openai_error)
TEI = ErrorFormat(
    {Kind.EMPTY: 400, Kind.UNSUPPORTED: 424, Kind.FAILED: 424, Kind.TIMEOUT: 503},
    _build_tei_error,
)
COHERE = ErrorFormat(OPENAI.status, lambda problem, _: {"message": problem.message})
PLAIN = ErrorFormat({}, lambda problem, _: {"detail": problem.message})

#: The form of each path; the longest beginning wins.
FORMS: dict[str, ErrorFormat] = {
    "/": PLAIN,
    "/v1/": OPENAI,
    "/v1/embeddings": OPENAI,
    "/v1/rerank": COHERE,
    "/v2/": COHERE,
    **dict.fromkeys(("/embed", "/predict", "/rerank", "/similarity"), TEI),
    "/info": TEI,
}

_LONGEST_FIRST = sorted(FORMS, key=len, reverse=True)


def choose_error_format(path: str) -> ErrorFormat:
    """The form in which errors of a path are told."""
    if path == "/":
        return TEI  # Its clients post there.
    return FORMS[next((each for each in _LONGEST_FIRST if path.startswith(each)), "/")]


#: Problems that are ours, not the caller's; whatever keeps all requests out is logged elsewhere.
LOGGED = (Kind.FAILED, Kind.BAD_GATEWAY, Kind.TIMEOUT)


def log_failure(scope: Scope, problem: Problem, error: BaseException | None = None) -> None:
    """Logs that a request fails, with the id that its caller sees, and the trace of an error."""
    if problem.kind in LOGGED or problem.detail:
        why = " ".join((problem.detail or problem.message).split())
        request = (scope["state"]["request_id"], scope["method"], scope["path"])
        line = "request %s: %s %.200r: %s: %.500s"
        logger.warning(line, *request, problem.kind, why, exc_info=error)


def answer(path: str, problem: Problem) -> Response:
    """The answer to a request that failed."""
    form = choose_error_format(path)
    status = form.get_status(problem.kind)
    headers = dict(problem.headers or {})
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    return Response(
        orjson.dumps(form.body(problem, status)),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )

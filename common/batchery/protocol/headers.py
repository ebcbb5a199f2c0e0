"""The headers that callers add to messages: stock workers ignore them, stock clients send none.

- `batchery_deadline`: until when the job should be answered, in Unix seconds. A worker compares it
  with its own clock, so the clocks of both machines must agree.
- `batchery_tenant`: for whom the job runs; without it, for one more tenant, the empty name.
- `batchery_sent_at`: when it was sent, in Unix seconds. A worker takes a job only when it has room:
  under overload, that is much later.
- `batchery`: an object, with `v` = 1. `n` and `values` are those of multi-item jobs, `reply` and
  `keep_s` those of completion streams, `vectors` that of packed vectors, `stream` that of piece
  streams (`protocol/pieces.py`).

A multi-item job is one message that carries n items, on any pool. `"n": 3` says that the argument
is a list of three items; the result is then a list of three `{"ok": value}` or `{"error": {...}}`.
With `"values": true` it is the plain list of values, and the first item that fails fails the job.

`"reply": "<name>"` asks for completions in a stream of that name, in the result backend. Batchery's
workers write to it in the same step that stores the results. Other workers do not, so a producer
must also look for results itself. With `keep_s` the stored result expires after so many seconds, if
not sooner by the app's settings: nobody but this producer fetches it, and not later than that.

`"vectors": "float32"` says that the producer reads packed vectors: the `vector` of an embedding may
be little-endian float32 in base64. A stored result says by a field of the same name and value that
its vectors are; in all others they are lists. Jobs share a batch whatever they say.
"""

import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from batchery.errors import BatchArgumentError, InvalidItem, counted
from batchery.execution.bisect_failures import NON_VALUES
from batchery.outcomes import Failed, Replace, RetryAfter
from batchery.tracebacks import error_text

DEADLINE, TENANT, SENT_AT = "batchery_deadline", "batchery_tenant", "batchery_sent_at"

#: The header with an object, and its version.
HEADER = "batchery"
VERSION = 1

#: Calls within so much time have the same deadline, so that they can be sent together, in seconds.
GRAIN_S = 0.01

#: Maximum length of a tenant's name; workers remember it for each tenant that has jobs.
MAX_TENANT_CHARS = 200

#: Digits after the point of a time of sending: milliseconds.
DIGITS = 3

#: Age beyond which a time of sending is not believed, in seconds: no job waits for a week, and one
#: absurd time would make a job years old.
MAX_AGE_S = 7 * 86_400

#: Names of completion streams, which become parts of Redis keys.
_STREAM = re.compile(r"[A-Za-z0-9_-]{1,64}")

#: Maximum of `keep_s`: Redis refuses numbers that are much larger.
MAX_KEEP_S = 2**31


def read_deadline(message: Mapping[str, Any]) -> float:
    """The deadline of a message, by its headers, in Unix seconds; infinity for none.

    Raises:
        InvalidItem: The header is no time.
    """
    found = message.get(DEADLINE)
    if found is None:
        return math.inf
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    # JSON has whole numbers that are larger than any float.
    if not is_number or not abs(found) <= sys.float_info.max:
        raise InvalidItem(f"header {DEADLINE} is {found!r:.80}; expected a time in Unix seconds")
    return float(found)


def deadline_header(deadline_s: float | None) -> dict[str, float]:
    """The header for a deadline from now on.

    Args:
        deadline_s: Seconds from now; None for no deadline.

    Raises:
        BatchArgumentError: It is in the past, or no number.
    """
    if deadline_s is None:
        return {}
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not is_number or not 0 < deadline_s < math.inf:
        raise BatchArgumentError(
            f"deadline_s = {deadline_s!r}: expected a number of seconds from now, above 0"
        )
    return {DEADLINE: round((time.time() + deadline_s) / GRAIN_S) * GRAIN_S}


def read_tenant(message: Mapping[str, Any]) -> str:
    """The tenant of a message, by its headers.

    Raises:
        InvalidItem: The header is no name.
    """
    name = message.get(TENANT)
    if name is None:
        return ""
    if not isinstance(name, str) or len(name) > MAX_TENANT_CHARS:
        text = f"expected a name of at most {MAX_TENANT_CHARS} characters"
        raise InvalidItem(f"header {TENANT} is {name!r:.80}; {text}")
    return name


def with_tenant(options: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Options of `apply_async` whose headers name a tenant; the same ones for None."""
    if tenant is None:
        return dict(options)
    headers = {**(options.get("headers") or {}), TENANT: tenant}
    read_tenant(headers)
    return {**options, "headers": headers}


def sent_now() -> dict[str, float]:
    """The header of a message that is sent now."""
    return {SENT_AT: round(time.time(), DIGITS)}


def read_sent_at(message: Mapping[str, Any], now_s: float) -> float:
    """When a message was sent, by its headers, in Unix seconds.

    Args:
        message: The headers.
        now_s: The time. It is the answer where the header is missing, no time, or too old. It is
            also the latest answer, as clocks may disagree.
    """
    found = message.get(SENT_AT)
    if isinstance(found, int | float) and found >= now_s - MAX_AGE_S:
        return float(min(found, now_s))
    return now_s


def read_stream_name(header: Any) -> str | None:
    """The name of the completion stream that a job asks for.

    Args:
        header: The value of the `batchery` header, or None.

    Returns:
        None if the job asks for none, or the name is malformed: it becomes part of a Redis key.
    """
    if not isinstance(header, Mapping) or header.get("v") != VERSION:
        return None
    name = header.get("reply")
    return name if isinstance(name, str) and _STREAM.fullmatch(name) else None


def read_keep_s(header: Any) -> int | None:
    """How long the result of a job is to be kept, in seconds.

    Args:
        header: The value of the `batchery` header, or None.

    Returns:
        None if the job does not say it, or not well: then as long as the app keeps results.
    """
    keep_s = header.get("keep_s") if isinstance(header, Mapping) else None
    if not isinstance(keep_s, int) or isinstance(keep_s, bool) or not 0 < keep_s <= MAX_KEEP_S:
        return None
    return keep_s


#: What the header says if packed vectors are read, and a stored result if it has them.
PACKED = {"vectors": "float32"}


def is_packed(found: Any) -> bool:
    """Whether a `batchery` header or a stored result says that of packed vectors."""
    return isinstance(found, Mapping) and found.get("vectors") == "float32"


#: The headers of a job whose pieces somebody reads.
STREAMED = {HEADER: {"v": VERSION, "stream": True}}


def is_streamed(header: Any) -> bool:
    """Whether somebody may read the pieces of a job; a multi-item job has none.

    Args:
        header: The value of the `batchery` header, or None.
    """
    if not isinstance(header, Mapping) or header.get("v") != VERSION:
        return False
    return header.get("stream") is True and header.get("n") is None


#: Field of an entry of the stream: a JSON list of task ids.
FIELD = b"ids"


def expires_s(app_s: float | None, keep_s: int | None) -> int:
    """In how many seconds a result expires, 0 for never.

    Args:
        app_s: As the app's settings say; 0 or None for never.
        keep_s: As the job says.
    """
    return min(int(app_s or MAX_KEEP_S), keep_s) if keep_s else int(app_s or 0)


@contextmanager
def expiring_as_asked(backend: Any, request: Any) -> Iterator[None]:
    """Has a Redis backend of this thread store as a job says, within the block."""
    keep_s = read_keep_s(getattr(request, HEADER, None))
    if keep_s is None or not hasattr(backend, "failure_expires"):
        yield
        return
    own = backend.expires, backend.failure_expires
    backend.expires, backend.failure_expires = (expires_s(app_s, keep_s) for app_s in own)
    try:
        yield
    finally:
        backend.expires, backend.failure_expires = own


def stream_key(backend: Any, name: str) -> bytes:
    """The key of a completion stream in a Redis backend, with the prefix that results have."""
    return backend_prefix(backend, name) + b"batchery:reply:" + name.encode()


def backend_prefix(backend: Any, name: str | bytes = "-") -> bytes:
    """The prefix of a Redis backend's keys, and so of our keys next to them; usually empty.

    Args:
        backend: Celery's, for one Redis or a cluster.
        name: What a key is about. In a cluster the keys of one name are in one shard.
    """
    own = name if isinstance(name, bytes) else name.encode()
    prefix: bytes = backend.get_key_for_task(name).removesuffix(b"celery-task-meta-" + own)
    return prefix


def read_ids(entry: Mapping[bytes, bytes]) -> list[str]:
    """The task ids in an entry of the stream."""
    ids: list[str] = json.loads(entry[FIELD])
    return ids


#: Maximum number of items in one message. A lost worker repeats the whole message.
MAX_ITEMS = 10_000

#: What becomes of a job's items: the result is that of its only item (False), has an entry for each
#: (True), or is the list of their values.
Form = bool | Literal["values"]


def check_map(count: int) -> None:
    """Makes sure that `map`, `starmap` or `chunks` may put so many items into one message.

    Raises:
        InvalidItem: They are too many.
    """
    if count > MAX_ITEMS:
        raise InvalidItem(
            f"map, starmap and each of chunks send their items in one message, and {count:,} are"
            f" more than the maximum of {MAX_ITEMS:,}: use submit_many, or smaller chunks"
        )


def read_items(argument: Any, header: Any) -> tuple[list[Any], Form]:
    """Reads what a job carries.

    Args:
        argument: The job's only positional argument.
        header: The value of the `batchery` header, or None.

    Returns:
        The items, and the form of their result; only a multi-item job has one other than False.

    Raises:
        InvalidItem: The header is malformed, or does not fit the argument.
    """
    if header is None:
        return [argument], False
    if not isinstance(header, Mapping) or header.get("v") != VERSION:
        raise InvalidItem(
            f"header {HEADER!r} is {header!r:.80}; expected an object with v={VERSION}:"
            " the producer is newer than this worker, or not Batchery"
        )
    count = header.get("n")
    if count is None:
        return [argument], False
    if isinstance(count, int) and header.get("values") is True:
        check_map(count)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_ITEMS:
        raise InvalidItem(f"header {HEADER!r}: n is {count!r:.80}; expected 1 to {MAX_ITEMS} items")
    if not isinstance(argument, list) or len(argument) != count:
        found = (
            counted(len(argument), "item")
            if isinstance(argument, list)
            else type(argument).__name__
        )
        raise InvalidItem(f"header {HEADER!r}: n={count}, but the argument is {found}")
    return argument, "values" if header.get("values") is True else True


def build_outcome(outcomes: Sequence[Any], form: Form) -> Any:
    """Makes the outcome of a job, made of those of its items."""
    if form == "values":
        failures = (_as_failure(each) for each in outcomes if isinstance(each, NON_VALUES))
        return next(failures, list(outcomes))
    return build_result(outcomes) if form else outcomes[0]


def _as_failure(outcome: Any) -> Any:
    """The failure of an item, which alone can be neither sent again nor replaced."""
    if isinstance(outcome, RetryAfter):
        return Failed(outcome.error or InvalidItem(f"try again in {outcome.seconds:g} s"))
    if isinstance(outcome, Replace):
        return Failed(InvalidItem("one item of a multi-item job cannot be replaced"))
    return outcome


def build_result(outcomes: Sequence[Any]) -> list[dict[str, Any]]:
    """Writes the outcomes of a multi-item job's items as its result."""
    return [_entry(outcome) for outcome in outcomes]


def _entry(outcome: Any) -> dict[str, Any]:
    if not isinstance(outcome, NON_VALUES):
        return {"ok": outcome}
    failure = _as_failure(outcome)
    error = _error(failure.exception if isinstance(failure, Failed) else failure)
    # To send it again is up to its caller.
    again = {"retry_after_s": outcome.seconds} if isinstance(outcome, RetryAfter) else {}
    return {"error": {**error, **again}}


def _error(error: BaseException) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": error_text(error)}

"""Multi-item jobs: one message that carries n items, on any pool.

The message header `batchery: {"v": 1, "n": 3}` says that the argument is a list of three items;
the result is then a list of three `{"ok": value}` or `{"error": {...}}`. Stock workers ignore the
header.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from batchery.errors import InvalidItem
from batchery.outcomes import Failed, Replace, RetryAfter

HEADER = "batchery"
VERSION = 1

#: Maximum number of items in one message. A lost worker repeats the whole message.
MAX_ITEMS = 10_000


def read_items(argument: Any, header: Any) -> tuple[list[Any], bool]:
    """Reads what a job carries.

    Args:
        argument: The job's only positional argument.
        header: The value of the `batchery` header, or None.

    Returns:
        The items, and whether this is a multi-item job.

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
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_ITEMS:
        raise InvalidItem(f"header {HEADER!r}: n is {count!r:.80}; expected 1 to {MAX_ITEMS} items")
    if not isinstance(argument, list) or len(argument) != count:
        found = f"{len(argument)} items" if isinstance(argument, list) else type(argument).__name__
        raise InvalidItem(f"header {HEADER!r}: n={count}, but the argument is {found}")
    return argument, True


def build_result(outcomes: Sequence[Any]) -> list[dict[str, Any]]:
    """Writes the outcomes of a multi-item job's items as its result."""
    return [_entry(outcome) for outcome in outcomes]


def _entry(outcome: Any) -> dict[str, Any]:
    if isinstance(outcome, Failed):
        return {"error": _error(outcome.exception)}
    if isinstance(outcome, RetryAfter):
        # One item of a message cannot be sent again alone: that is up to its caller.
        cause = outcome.error or InvalidItem(f"try again in {outcome.seconds:g} s")
        return {"error": {**_error(cause), "retry_after_s": outcome.seconds}}
    if isinstance(outcome, Replace):
        # One item of a message cannot become a job either.
        return {"error": _error(InvalidItem("one item of a multi-item job cannot be replaced"))}
    if isinstance(outcome, BaseException):
        return {"error": _error(outcome)}
    return {"ok": outcome}


def _error(error: BaseException) -> dict[str, Any]:
    try:
        message = str(error)
    except Exception as problem:  # noqa: BLE001 - the exception's own code, and its mates are fine
        message = f"its text cannot be made: {type(problem).__name__}"
    return {"type": type(error).__name__, "message": message}

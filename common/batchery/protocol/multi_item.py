"""Multi-item jobs: one message that carries n items, on any pool.

The message header `batchery: {"v": 1, "n": 3}` says that the argument is a list of three items;
the result is then a list of three `{"ok": value}` or `{"error": {...}}`. With `"values": true` it
is the plain list of values, and the first item that fails fails the job. Stock workers ignore the
header.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from batchery.errors import InvalidItem, counted
from batchery.execution.bisect_failures import NON_VALUES
from batchery.outcomes import Failed, Replace, RetryAfter
from batchery.protocol.headers import HEADER, VERSION

#: Maximum number of items in one message. A lost worker repeats the whole message.
MAX_ITEMS = 10_000

#: What becomes of a job's items: the result is that of its only item (False), has an entry for each
#: (True), or is the list of their values.
Form = bool | Literal["values"]


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
    try:
        message = str(error)
    except Exception as problem:  # noqa: BLE001 - the exception's own code, and its mates are fine
        message = f"its text cannot be made: {type(problem).__name__}"
    return {"type": type(error).__name__, "message": message}

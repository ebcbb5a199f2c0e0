"""What an item of a built-in model may be, and what is wrong with one that it may not be."""

from collections.abc import Collection, Sequence
from typing import Any

from batchery.errors import ONE_JOB_EACH, InvalidItem


def check_text(field: str, text: Any, max_chars: int) -> str:
    """Returns a text that a model can take.

    Args:
        field: Name of the text, for the error.
        text: Anything.
        max_chars: Maximum length, in characters.

    Raises:
        InvalidItem: It is no text, an empty one, or too long.
    """
    if not isinstance(text, str):
        raise InvalidItem(f"{field}: must be a string, not {type(text).__name__}")
    if not text:
        raise InvalidItem(f"{field}: is empty")
    if len(text) > max_chars:
        raise InvalidItem(f"{field}: {len(text)} characters are more than max_chars = {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidItem(
            f"{field}: is not Unicode: half a surrogate pair at character {error.start}"
        ) from None
    return text


def check_token_ids(ids: Sequence[Any], vocabulary: int, max_count: int) -> list[int]:
    """Returns token ids that a model knows.

    Args:
        ids: Anything in a list.
        vocabulary: Number of tokens that the model knows.
        max_count: Maximum number of ids.

    Raises:
        InvalidItem: There are none or too many, or one is no token id; names its position.
    """
    if not ids:
        raise InvalidItem("token ids: the list is empty")
    if len(ids) > max_count:
        raise InvalidItem(f"token ids: {len(ids)} are more than max_chars = {max_count}")
    # `True` is an `int`, too.
    if set(map(type, ids)) == {int} and 0 <= min(ids) <= max(ids) < vocabulary:
        return list(ids)
    for position, token in enumerate(ids):
        if type(token) is not int:
            kind = type(token).__name__
            raise InvalidItem(
                f"token ids: position {position} has a {kind}, not an integer; {ONE_JOB_EACH}"
            )
        if not 0 <= token < vocabulary:
            raise InvalidItem(
                f"token ids: {token} at position {position} is none of the model's,"
                f" which are 0 to {vocabulary - 1}"
            )
    raise AssertionError("one of them must be wrong")


def check_fields(item: Any, fields: Collection[str], max_chars: int) -> tuple[str, ...]:
    """Returns the texts of an item that is a dictionary of texts, in the order of the fields.

    Raises:
        InvalidItem: It is no dictionary of these fields, or one of its texts is wrong.
    """
    if not isinstance(item, dict) or item.keys() != set(fields):
        given = ", ".join(map(repr, item)) if isinstance(item, dict) else type(item).__name__
        names = " and ".join(map(repr, fields))
        raise InvalidItem(f"item: must be a dictionary with {names}, not {given:.80}")
    return tuple(check_text(field, item[field], max_chars) for field in fields)

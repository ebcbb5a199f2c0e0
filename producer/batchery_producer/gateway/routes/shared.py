"""What the routes that run models have in common."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import Request

from batchery_producer.gateway.models import ServedModel, shorten
from batchery_producer.gateway.problems import Kind, Problem

#: Maximum characters or token ids of a request whose answer is many times as large: a token of it
#: takes 70 bytes as JSON, and a vector per token a thousand, here and in Redis.
MAX_GROWING_CHARS = 100_000


def resolve_model(request: Request, name: str | None, kinds: Collection[str] | None) -> ServedModel:
    """The model of a name; without a name, the first one of these kinds; None is any kind.

    Raises:
        Problem: There is none.
    """
    found: ServedModel = request.app.state.gateway.models.find(name, kinds)
    return found


def read_items(request: Request, field: str, given: str | Sequence[Any]) -> list[Any]:
    """The items of a request: one, or a list, as many as it may have; none of them is empty.

    Args:
        request: Whose they are.
        field: Name of the field, for the error.
        given: A text, token ids, or a list of either.

    Raises:
        Problem: There is none, there are too many, or one of them is empty.
    """
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    items = [given] if is_one else list(given)
    if not items:
        raise Problem(Kind.EMPTY, f"{field}: an empty list; send a text at least", param=field)
    request.state.caller.check(len(items), 0)
    for index, item in enumerate(items):
        if not item:
            which = f"item {index} of {field}" if items[1:] else field
            raise Problem(Kind.EMPTY, f"{which}: is empty", param=field)
    return items


def count_chars(items: Sequence[Any]) -> int:
    """Characters of all items; of token ids, as many as there are."""
    return sum(
        sum(map(len, item.values())) if isinstance(item, dict) else len(item) for item in items
    )


def check_growth(chars: int) -> None:
    """Makes sure that an answer cannot get too large which is many times as large as its request.

    Args:
        chars: Characters or token ids of the request.

    Raises:
        Problem: There are too many.
    """
    if chars > MAX_GROWING_CHARS:
        raise Problem(
            Kind.TOO_LARGE,
            f"{chars} characters or token ids are more than {MAX_GROWING_CHARS} of a request whose"
            " answer is many times as large; send several requests",
        )


async def run_items(
    request: Request, model: ServedModel, items: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Any]:
    """Runs items, within the caller's limits.

    Raises:
        Problem: There are too many, one of them failed, or there are no results.
    """
    gateway = request.app.state.gateway
    request.state.caller.check(len(items), count_chars(items))
    gateway.health.check()
    found: list[Any] = await gateway.inference.values(request, model, items, keywords)
    return found


async def embed_items(
    request: Request,
    model: ServedModel,
    items: Sequence[Any],
    keywords: Mapping[str, Any],
    dimensions: int | None,
) -> list[dict[str, Any]]:
    """Runs texts of an embedding model, within the caller's limits; vectors are in base64.

    Vectors are cut here: requests of all dimensions share batches, and entries of the cache.

    Args:
        request: Whose they are.
        model: Of kind embedding.
        items: Texts, or token ids.
        keywords: Of the job, without `encoding` and `dimensions`.
        dimensions: How many leading dimensions are kept; all of them if None.

    Raises:
        Problem: As `run_items`; or the vectors have fewer dimensions.
    """
    keywords = {**keywords, "encoding": "base64"}
    if dimensions is not None and model.settings.dimensions is not None:
        # What the worker's setting cuts off cannot be put on here.
        return await run_items(request, model, items, {**keywords, "dimensions": dimensions})
    results = await run_items(request, model, items, keywords)
    if dimensions is None:
        return results
    scale = keywords.get("normalize", model.settings.normalize)
    try:
        return [
            {**each, "vector": shorten(each["vector"], dimensions, scale=scale)} for each in results
        ]
    except ValueError as error:
        raise Problem(Kind.INVALID, str(error), param="dimensions") from None

"""The one way from a request to the queue: items in, outcomes back."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from batchery_producer.answers import Outcome
from batchery_producer.async_client import AsyncTask
from batchery_producer.gateway.media import MEDIA
from batchery_producer.gateway.models import ITEMS_PER_JOB, ServedModel, in_base64, shorten
from batchery_producer.gateway.problems import Kind, Problem, build_problem
from batchery_producer.gateway.running import get_gateway

# What a request asks for


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
    """Characters of all texts; of token ids, as many as there are. Media are bytes."""
    return sum(
        sum(len(text) for field, text in item.items() if field not in MEDIA)
        if isinstance(item, dict)
        else len(item)
        for item in items
    )


def check_ids(model: ServedModel, name: str | None, field: str, given: Any) -> None:
    """Makes sure that token ids are those of a model's own tokenizer.

    Args:
        model: Of the request.
        name: What the request calls it; None for nothing.
        field: Name of the field, for the error.
        given: A text, token ids, or a list of either.

    Raises:
        Problem: There are ids, and the name is an alias.
    """
    has_ids = isinstance(given, list) and any(isinstance(each, int | list) for each in given)
    if has_ids and not model.is_own_name(name):
        raise Problem(
            Kind.INVALID,
            f"{field}: has token ids, but {name!r:.100} is an alias, so they may be another"
            " tokenizer's; send texts (LangChain: check_embedding_ctx_length=False), or the"
            " model's own ids under its own name",
            param=field,
        )


async def run_items(
    request: Request,
    model: ServedModel,
    items: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    keeps_base64: bool = False,
) -> list[Any]:
    """The result of each item, in order, within the caller's limits."""
    chars = count_chars(items)
    request.state.caller.check(len(items), chars, request.state.body_bytes)
    call = run_outcomes(request, model, items, keywords, keeps_base64=keeps_base64)
    outcomes = check_all(await call)
    return [outcome.value for outcome in outcomes]


async def embed_items(
    request: Request,
    model: ServedModel,
    items: Sequence[Any],
    keywords: Mapping[str, Any],
    dimensions: int | None = None,
) -> list[dict[str, Any]]:
    """Runs texts of an embedding model, within the caller's limits; vectors are in base64.

    Vectors are cut here: requests of all dimensions share batches, and entries of the cache.

    Args:
        request: Whose they are.
        model: Of a kind that makes a vector of each item.
        items: Texts or token ids; or media.
        keywords: Of the job, without `dimensions`.
        dimensions: How many leading dimensions are kept; all of them if None.

    Raises:
        Problem: As `run_items`; or the vectors have fewer dimensions.
    """
    if dimensions is not None and model.settings.dimensions is not None:
        # What the worker's setting cuts off cannot be put on here.
        keywords, dimensions = {**keywords, "dimensions": dimensions}, None
    results = await run_items(request, model, items, keywords, keeps_base64=True)
    for each in results:
        # Celery's tracer stores lists.
        if not isinstance(each["vector"], str):
            each["vector"] = in_base64(each["vector"])
    if dimensions is None:
        return results
    scale = keywords.get("normalize", model.settings.normalize)
    try:
        return [
            {**each, "vector": shorten(each["vector"], dimensions, scale=scale)} for each in results
        ]
    except ValueError as error:
        raise Problem(Kind.INVALID, str(error), param="dimensions") from None


# What clients of several vendors say of the texts of embeddings


#: What vendors call texts that are searched with, and those that are found -> the models' prompts.
PROMPTS = {
    **dict.fromkeys(("search_query", "retrieval.query"), "query"),
    **dict.fromkeys(("search_document", "retrieval.passage"), "document"),
}


def build_keywords(
    model: ServedModel,
    truncate: bool | None,
    direction: str | None = None,
    normalize: bool | None = None,
) -> dict[str, Any]:
    """Keywords for texts that are too long, and for the length of vectors.

    Jobs share a batch only if their keywords are equal, so nothing is said twice: neither what the
    caller left out, nor what is the model's setting anyway.

    Args:
        model: Its settings `overflow` and `normalize` hold without more ado.
        truncate: Whether they are cut.
        direction: Where they are cut.
        normalize: Whether vectors are scaled to length 1.
    """
    found: dict[str, Any] = {}
    if truncate is not None and truncate != (model.settings.overflow == "truncate"):
        found["truncate"] = truncate
    if direction is not None:
        found["truncation_direction"] = direction.lower()
    if normalize is not None and normalize != model.settings.normalize:
        found["normalize"] = normalize
    return found


# Items to outcomes


T = TypeVar("T")

#: How long a stream that has ended may be read on, in seconds.
KEEP_S = 120

#: In how many seconds a caller wants its answer; at most the setting `gateway.timeout_s`.
TIMEOUT_HEADER = "x-request-timeout"


async def run_outcomes(
    request: Request,
    model: ServedModel,
    items: Sequence[Any],
    keywords: Mapping[str, Any],
    per_job: int = ITEMS_PER_JOB,
    *,
    keeps_base64: bool = False,
) -> list[Outcome]:
    """How each item ended, in order; if the caller hangs up, the jobs are revoked.

    They run on behalf of the caller: with their tenant and class, and in the time that they have.
    """
    gateway, task = get_gateway(request), choose_task(request, model)
    try:
        call = task.outcomes(items, per_job=per_job, keywords=keywords, keeps_base64=keeps_base64)
        outcomes = await unless_gone(request, call)
    except Problem:
        raise
    except Exception as error:
        raise build_problem(error) from error
    gateway.health.note_answer(model.queue)
    gateway.measurements.results(model.name, outcomes)
    return outcomes


def choose_task(request: Request, model: ServedModel, *, is_stream: bool = False) -> AsyncTask:
    """The task of a model on behalf of a caller: with its tenant and class, in its time.

    A stream has as long as it takes; who reads it limits the time of each piece.
    """
    gateway, caller = get_gateway(request), request.state.caller
    gateway.health.check(model)
    timeout_s = None if is_stream else read_timeout_s(request)
    options = {} if caller.priority is None else {"priority": caller.priority}
    return gateway.client.task(
        model.name,
        timeout_s=timeout_s,
        tenant=caller.tenant,
        deadline_s=timeout_s,
        keep_s=KEEP_S,
        queue=model.queue,
        **options,
    )


def read_timeout_s(request: Request, longest_s: float | None = None) -> float:
    """How long a request waits for its results, in seconds.

    Args:
        request: Its header may ask for less.
        longest_s: The most that it may have; the setting `timeout_s` if None.

    Raises:
        Problem: Its header is no number of seconds.
    """
    if longest_s is None:
        longest_s = get_gateway(request).settings.gateway.timeout_s
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        asked_s = float(given)
    except ValueError:
        asked_s = 0.0
    if not asked_s > 0:
        raise Problem(
            Kind.INVALID, f"header X-Request-Timeout is {given!r:.40}: expected seconds above 0"
        )
    return min(asked_s, longest_s)


def check_all(outcomes: list[Outcome], first: int | None = None) -> list[Outcome]:
    """The outcomes of a request, if all of its items succeeded.

    Args:
        outcomes: Of all of its items, or of some.
        first: Place of the first one among the request's items; None if these are all.

    Raises:
        Problem: That of the first item that failed.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            problem = build_problem(outcome.error)
            if len(outcomes) > 1 or first is not None:
                problem.message = f"item {(first or 0) + outcome.index}: {problem.message}"
            raise problem
    return outcomes


async def unless_gone(request: Request, call: Awaitable[T]) -> T:
    """Awaits a call, and cancels it when its caller hangs up.

    Raises:
        Problem: The caller has gone, so nobody reads an answer.
    """
    answer = asyncio.ensure_future(call)
    gone = asyncio.ensure_future(wait_gone(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise gone.result()
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()


async def wait_gone(request: Request) -> Problem:
    """Returns as soon as nobody waits for an answer any more."""
    # A body that no route wanted may be there still.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Problem(Kind.GONE, "the caller has hung up")

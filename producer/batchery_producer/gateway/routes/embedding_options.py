"""What clients of several vendors say of the texts of embeddings."""

from typing import Any

from fastapi import Request

from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem

#: What vendors and models call the text that is searched with, and the texts that are found.
QUERIES = ("query", "search_query", "retrieval.query")
DOCUMENTS = ("document", "search_document", "passage", "retrieval.passage")


async def choose_prompt(
    request: Request, model: ServedModel, field: str, purpose: str | None
) -> dict[str, Any]:
    """The keyword with the model's prompt for what texts are for.

    A document may have none: many models have a prompt for queries alone.

    Args:
        request: Whose texts they are.
        model: Of kind embedding.
        field: Which field says so, for errors.
        purpose: What they are for, such as `search_query`; None if nobody said.

    Raises:
        Problem: The model has prompts, and none for this; or the gateway cannot read them.
    """
    if purpose is None:
        return {}
    known = next((names for names in (QUERIES, DOCUMENTS) if purpose in names), ())
    names, prompts = (purpose, *known), model.settings.prompts
    if not prompts.keys() & set(names):
        try:
            prompts = await request.app.state.gateway.prompts.of(model)
        except Problem as problem:
            text = f"{field}: {problem.message}; or name its prompts in the setting prompts"
            raise Problem(problem.kind, text, param=field) from problem
    for name in names:
        if name in prompts:
            return {"prompt": name}
    if any(prompts.values()) and known is not DOCUMENTS:
        raise Problem(
            Kind.INVALID,
            f"{field} {purpose!r:.80}: the model has no prompt for it; there are:"
            f" {', '.join(sorted(prompts))}",
            param=field,
        )
    return {}


def build_overflow_keywords(
    model: ServedModel, truncate: bool | None, direction: str | None = None
) -> dict[str, Any]:
    """Keywords for texts that are too long.

    Jobs share a batch only if their keywords are equal, so nothing is said twice: neither what the
    caller left out, nor what is the model's setting anyway.

    Args:
        model: Its setting `overflow` holds without more ado.
        truncate: Whether they are cut.
        direction: Where they are cut.
    """
    found: dict[str, Any] = {}
    if truncate is not None and truncate != (model.settings.overflow == "truncate"):
        found["truncate"] = truncate
    if direction is not None:
        found["truncation_direction"] = direction.lower()
    return found

"""Zero-shot and token classification, as Hugging Face's inference API has them."""

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import RequestBody
from batchery_producer.gateway.routes.fields import Unserved, expected
from batchery_producer.gateway.routes.shared import read_items, resolve_model, run_items
from batchery_producer.gateway.routes.tei_requests import TeiRequest
from batchery_producer.gateway.routes.tei_scores import classify_items

Texts = Annotated[str | list[str], expected("a text, or a list of texts")]


class ZeroShotParameters(RequestBody):
    """What a text may be about."""

    candidate_labels: Annotated[list[str], Field(min_length=1)]
    hypothesis_template: str | None = None
    multi_label: bool | None = None


class ZeroShotRequest(TeiRequest):
    """Texts, and labels."""

    inputs: Texts
    parameters: ZeroShotParameters


class TokenParameters(RequestBody):
    """How tokens become entities; `O` is never one."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: list[str] | None = None
    stride: Unserved = None


class TokenRequest(TeiRequest):
    """Texts that may have entities."""

    inputs: Texts
    parameters: TokenParameters = TokenParameters()


async def zero_shot(request: Request, body: ZeroShotRequest, model: str | None) -> Response:
    """All labels of each text, the likeliest first; of a text alone they are not in a list."""
    served = resolve_model(request, body.model or model, ("zero_shot",))
    texts = read_items(request, "inputs", body.inputs)
    options, labels = body.parameters, body.parameters.candidate_labels
    # Each text is computed with each label.
    chars = len(texts) * sum(map(len, labels))
    request.state.caller.check(len(texts) * len(labels), chars)
    given = options.model_dump(exclude={"candidate_labels"}, exclude_none=True)
    answers = await classify_items(request, served, texts, {**given, "labels": labels})
    return json_response(answers[0] if isinstance(body.inputs, str) else answers)


async def find_entities(request: Request, body: TokenRequest, model: str | None) -> Response:
    """The entities of each text; of a text alone they are not in a list."""
    served = resolve_model(request, body.model or model, ("token_classification",))
    texts = read_items(request, "inputs", body.inputs)
    strategy = body.parameters.aggregation_strategy
    ignored = body.parameters.ignore_labels or ()
    results = await run_items(request, served, texts, {"aggregation": strategy})
    name = "entity" if strategy == "none" else "entity_group"
    answers: list[list[dict[str, Any]]] = [
        [
            {
                name: each["label"],
                "score": each["score"],
                "word": each["text"],
                "start": each["start"],
                "end": each["end"],
            }
            for each in result["entities"]
            if each["label"] not in ignored
        ]
        for result in results
    ]
    return json_response(answers[0] if isinstance(body.inputs, str) else answers)

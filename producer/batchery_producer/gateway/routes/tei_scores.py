"""TEI's routes for scores: `/predict` and `/rerank`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from batchery_producer.gateway.answers import best_first, json_response
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.fields import ModelName, expected
from batchery_producer.gateway.routes.shared import read_items, resolve_model, run_items
from batchery_producer.gateway.routes.tei_requests import TeiRequest, TextRequest

router = APIRouter(tags=["tei"], route_class=JsonRoute)

#: More labels than any model has: the worker gives those that there are.
ALL_LABELS = 1_000_000

CLASSIFIERS = ("classification",)

#: A text, or a text and its pair.
Texts = Annotated[list[str], Field(min_length=1, max_length=2)]


class ScoreRequest(TextRequest):
    """Fields of both."""

    raw_scores: Annotated[
        bool, Field(description="The model's output as it is, not made a probability.")
    ] = False

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job."""
        found = super().keywords(model)
        return {**found, "raw_scores": True} if self.raw_scores else found


class PredictRequest(ScoreRequest):
    """Texts for `/predict`."""

    inputs: Annotated[
        str | Texts | list[Texts],
        expected("a text, a pair of texts, or a list of [text] and [text, text]"),
        Field(
            description="A text, a pair of texts, or a list of `[text]` and `[text, text]`.",
            examples=["the cat", [["the cat"], ["the cat", "a dog"]]],
        ),
    ]

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job: all labels."""
        return super().keywords(model) | {"top_k": ALL_LABELS}


class PipelineParameters(RequestBody):
    """What Hugging Face's own inference API has."""

    top_k: Annotated[int | None, Field(ge=1, description="Only so many labels.")] = None
    function_to_apply: Annotated[
        Literal["none"] | None,
        Field(description="`none` for the model's output as it is; else the model decides."),
    ] = None


class PipelineRequest(TeiRequest):
    """Texts in the form of that API, which clients post to `/`."""

    inputs: Annotated[str | list[str], expected("a text, or a list of texts")]
    parameters: PipelineParameters

    def keywords(self) -> dict[str, Any]:
        """Keywords of the job."""
        found: dict[str, Any] = {"top_k": self.parameters.top_k or ALL_LABELS}
        return {**found, "raw_scores": True} if self.parameters.function_to_apply else found


class Prediction(BaseModel):
    """One label of a text."""

    score: float
    label: str


class RerankTextsRequest(ScoreRequest):
    """Texts for `/rerank`."""

    query: Annotated[str, Field(examples=["what do cats do?"])]
    texts: Annotated[list[str], Field(examples=[["the cat sleeps", "the dog barks"]])]
    return_text: Annotated[bool, Field(description="Whether the answer has the texts, too.")] = (
        False
    )


class Rank(BaseModel):
    """One text, and how well it fits."""

    index: Annotated[int, Field(ge=0, description="Its place in the request.")]
    score: float
    text: str | None = None


@router.post("/predict", response_model=list[Prediction] | list[list[Prediction]])
async def predict(request: Request, body: PredictRequest, model: ModelName = None) -> Response:
    """All labels of each text, the likeliest first; of a text alone they are not in a list."""
    served = resolve_model(request, body.model or model, CLASSIFIERS)
    items, is_batch = items_to_label(request, body.inputs)
    answers = await classify_items(request, served, items, body.keywords(served))
    return json_response(answers if is_batch else answers[0])


async def pipeline(request: Request, body: PipelineRequest, model: ModelName = None) -> Response:
    """Labels as Hugging Face's own inference API gives them: in a list for each text."""
    served = resolve_model(request, body.model or model, CLASSIFIERS)
    texts = read_items(request, "inputs", body.inputs)
    return json_response(await classify_items(request, served, texts, body.keywords()))


async def classify_items(
    request: Request, model: ServedModel, items: Sequence[Any], keywords: Mapping[str, Any]
) -> list[list[dict[str, Any]]]:
    """The labels of each item, the likeliest first.

    Raises:
        Problem: An item failed.
    """
    results = await run_items(request, model, items, keywords)
    return [
        [{"score": score, "label": label} for label, score in result["scores"].items()]
        for result in results
    ]


def items_to_label(request: Request, inputs: str | list[Any]) -> tuple[list[Any], bool]:
    """The items of `/predict`, and whether they came as a list of several.

    Args:
        request: Whose they are.
        inputs: A text; one or two texts, which are one item; or a list of one or two texts each.

    Raises:
        Problem: There are none, or one is empty.
    """
    is_batch = not isinstance(inputs, str) and not (inputs and isinstance(inputs[0], str))
    texts = [[inputs]] if isinstance(inputs, str) else inputs if is_batch else [inputs]
    items = [{"text": each[0], "text_pair": each[1]} if each[1:] else each[0] for each in texts]
    return read_items(request, "inputs", items), is_batch


@router.post("/rerank", response_model=list[Rank])
async def rerank(request: Request, body: RerankTextsRequest, model: ModelName = None) -> Response:
    """The texts by how well they fit the query, the best first."""
    served = resolve_model(request, body.model or model, ("rerank",))
    if not body.texts:
        raise Problem(Kind.EMPTY, "texts: an empty list; send a text at least", param="texts")
    request.state.caller.check(len(body.texts), 0)
    items = [{"query": body.query, "text": text} for text in body.texts]
    results = await run_items(request, served, items, body.keywords(served))
    scores = [result["score"] for result in results]
    ranks: list[dict[str, Any]] = [
        {"index": index, "score": scores[index]} for index in best_first(scores)
    ]
    if body.return_text:
        for rank in ranks:
            rank["text"] = body.texts[rank["index"]]
    return json_response(ranks)

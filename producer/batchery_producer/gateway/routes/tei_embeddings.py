"""TEI's routes for vectors: `/embed`, `/embed_all`, `/embed_sparse` and `/similarity`."""

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from batchery_producer.gateway.answers import json_list, json_response, off_loop
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.models import LEAST_NORM, ModelTokenizer, ServedModel, numbers
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.fields import Inputs, ModelName
from batchery_producer.gateway.routes.shared import (
    check_growth,
    count_chars,
    embed_items,
    read_items,
    resolve_model,
    run_items,
)
from batchery_producer.gateway.routes.tei_requests import PromptRequest, TeiRequest

router = APIRouter(tags=["tei"], route_class=JsonRoute)

#: More numbers are written in a thread, which takes milliseconds.
INLINE_NUMBERS = 50_000


class EmbedRequest(PromptRequest):
    """Texts for `/embed`."""

    inputs: Inputs
    normalize: Annotated[
        bool | None,
        Field(description="Scale vectors to length 1; the model's setting if missing."),
    ] = None
    dimensions: Annotated[
        int | None, Field(ge=1, description="Keep only this many leading dimensions.")
    ] = None

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job."""
        found = super().keywords(model)
        if self.normalize is not None and self.normalize != model.settings.normalize:
            found["normalize"] = self.normalize
        return found


class EmbedAllRequest(PromptRequest):
    """Texts for `/embed_all`."""

    inputs: Inputs


class EmbedSparseRequest(PromptRequest):
    """Texts for `/embed_sparse`."""

    inputs: Inputs


class SparseValue(BaseModel):
    """One number of a sparse vector."""

    index: Annotated[int, Field(ge=0)]
    value: float


class SimilarityInputs(RequestBody):
    """A text, and those that it is compared with."""

    source_sentence: Annotated[str, Field(examples=["the cat sleeps"])]
    sentences: Annotated[list[str], Field(examples=[["the cat rests", "the dog barks"]])]


class SimilarityRequest(TeiRequest):
    """Texts for `/similarity`."""

    inputs: SimilarityInputs
    parameters: PromptRequest | None = None


async def list_response(request: Request, values: Iterable[Any], count: int) -> Response:
    """An answer of many numbers.

    Args:
        request: Whose answer it is.
        values: What is in the list.
        count: How many numbers there are in all.
    """
    is_long = count > INLINE_NUMBERS
    content = await off_loop(request.state.caller, lambda: json_list(values), is_long=is_long)
    return Response(content, media_type="application/json")


async def read_texts(request: Request, model: ServedModel, inputs: str | list[Any]) -> list[Any]:
    """The items of a request. Token ids lose the special tokens around them, as workers add those.

    Raises:
        Problem: There are none, or one is empty.
    """
    items = read_items(request, "inputs", inputs)
    if all(isinstance(item, str) for item in items):
        return items
    try:
        tokenizer: ModelTokenizer = await request.app.state.gateway.tokenizers.of(model)
    except Problem:
        # Without its files here, ids are taken as they are.
        return items
    return [item if isinstance(item, str) else tokenizer.without_frame(item) for item in items]


@router.post("/embed", response_model=list[list[float]])
async def embed(request: Request, body: EmbedRequest, model: ModelName = None) -> Response:
    """One vector for each text."""
    served = resolve_model(request, body.model or model, ("embedding",))
    items = await read_texts(request, served, body.inputs)
    results = await embed_items(request, served, items, body.keywords(served), body.dimensions)
    vectors = [numbers(result["vector"]) for result in results]
    return await list_response(request, vectors, sum(map(len, vectors)))


@router.post("/embed_all", response_model=list[list[list[float]]])
async def embed_all(request: Request, body: EmbedAllRequest, model: ModelName = None) -> Response:
    """One vector for each token of each text."""
    served = resolve_model(request, body.model or model, ("multi_vector_embedding",))
    items = await read_texts(request, served, body.inputs)
    check_growth(count_chars(items))
    keywords = {**body.keywords(served), "encoding": "base64"}
    results = await run_items(request, served, items, keywords)
    count = sum(result["tokens"] * result["dimensions"] for result in results)
    vectors = (numbers(result["vectors"]).reshape(-1, result["dimensions"]) for result in results)
    return await list_response(request, vectors, count)


@router.post("/embed_sparse", response_model=list[list[SparseValue]])
async def embed_sparse(
    request: Request, body: EmbedSparseRequest, model: ModelName = None
) -> Response:
    """One sparse vector for each text."""
    served = resolve_model(request, body.model or model, ("sparse_embedding",))
    items = await read_texts(request, served, body.inputs)
    results = await run_items(request, served, items, body.keywords(served))
    vectors = (
        [
            {"index": index, "value": value}
            for index, value in zip(result["indices"], result["values"], strict=True)
        ]
        for result in results
    )
    # An object takes as long as several numbers.
    count = 5 * sum(len(result["indices"]) for result in results)
    return await list_response(request, vectors, count)


@router.post("/similarity", response_model=list[float])
async def similarity(
    request: Request, body: SimilarityRequest, model: ModelName = None
) -> Response:
    """The cosine of the angle between a text's vector and that of each other text."""
    options = body.parameters or PromptRequest()
    served = resolve_model(request, body.model or options.model or model, ("embedding",))
    if not body.inputs.sentences:
        raise Problem(Kind.EMPTY, "inputs.sentences: an empty list; send a text at least")
    items = read_items(request, "inputs", [body.inputs.source_sentence, *body.inputs.sentences])
    keywords = {**options.keywords(served), "encoding": "base64"}
    results = await run_items(request, served, items, keywords)
    vectors = np.stack([numbers(result["vector"]) for result in results])
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(norms, LEAST_NORM)
    return json_response(np.clip(vectors[1:] @ vectors[0], -1, 1))

"""Routes of Text Embeddings Inference (TEI), and of Hugging Face's inference API."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from fastapi import APIRouter, Body, Request
from pydantic import BaseModel, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from batchery_producer.gateway.answers import best_first, json_list, json_response, off_loop
from batchery_producer.gateway.bodies import Inputs, JsonRoute, ModelName
from batchery_producer.gateway.inference import (
    build_keywords,
    count_chars,
    embed_items,
    read_items,
    run_items,
)
from batchery_producer.gateway.models import (
    LEAST_NORM,
    ServedModel,
    numbers,
)
from batchery_producer.gateway.problems import Kind, Problem, validate
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import RequestBody, expected

router = APIRouter(tags=["tei"], route_class=JsonRoute)


class TeiRequest(RequestBody):
    """Fields of all bodies; unknown ones are ignored, as there."""

    model: Annotated[
        str | None, Field(description="Name or alias of a model; TEI itself has only one.")
    ] = None


class TextRequest(TeiRequest):
    """Fields of the routes that run a model."""

    truncate: Annotated[
        bool | None,
        Field(description="Cut texts that are too long; the model's setting if missing."),
    ] = None
    truncation_direction: Annotated[
        Literal["Left", "Right", "left", "right"] | None,
        Field(description="Where they are cut; that of the model's tokenizer if missing."),
    ] = None

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job."""
        return build_keywords(model, self.truncate, self.truncation_direction)


class PromptRequest(TextRequest):
    """Fields of the routes whose models have prompts."""

    # It goes with each job of a request.
    prompt_name: Annotated[
        str | None,
        Field(max_length=200, description="Name of a prompt to put in front of each text."),
    ] = None

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job, the prompt among them."""
        found = super().keywords(model)
        if self.prompt_name is not None:
            found["prompt"] = self.prompt_name
        return found


# Vectors: `/embed`, `/embed_all`, `/embed_sparse` and `/similarity`


#: More numbers are written in a thread, which takes milliseconds.
INLINE_NUMBERS = 50_000


#: Maximum characters or token ids of a request for vectors of tokens: each takes a thousand times
#: as many bytes, here and in Redis.
MAX_GROWING_CHARS = 100_000


class InputsRequest(PromptRequest):
    """Texts for `/embed_all` and `/embed_sparse`."""

    inputs: Inputs


class EmbedRequest(InputsRequest):
    """Texts for `/embed`."""

    normalize: Annotated[
        bool | None,
        Field(description="Scale vectors to length 1; the model's setting if missing."),
    ] = None
    dimensions: Annotated[
        int | None, Field(ge=1, description="Keep only this many leading dimensions.")
    ] = None

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job."""
        return super().keywords(model) | build_keywords(model, None, normalize=self.normalize)


class SparseValue(TypedDict):
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


@router.post("/embed", response_model=list[list[float]])
async def embed(request: Request, body: EmbedRequest, model: ModelName = None) -> Response:
    """One vector for each text."""
    served = get_gateway(request).models.find(body.model or model, ("embedding",))
    items = read_items(request, "inputs", body.inputs)
    results = await embed_items(request, served, items, body.keywords(served), body.dimensions)
    vectors = [numbers(result["vector"]) for result in results]
    return await list_response(request, vectors, sum(map(len, vectors)))


@router.post("/embed_all", response_model=list[list[list[float]]])
async def embed_all(request: Request, body: InputsRequest, model: ModelName = None) -> Response:
    """One vector for each token of each text."""
    served = get_gateway(request).models.find(body.model or model, ("multi_vector_embedding",))
    items = read_items(request, "inputs", body.inputs)
    if (chars := count_chars(items)) > MAX_GROWING_CHARS:
        raise Problem(
            Kind.TOO_LARGE,
            f"{chars} characters or token ids are more than {MAX_GROWING_CHARS} of a request whose"
            " answer is many times as large; send several requests",
        )
    keywords = {**body.keywords(served), "encoding": "base64"}
    results = await run_items(request, served, items, keywords)
    count = sum(result["tokens"] * result["dimensions"] for result in results)
    vectors = (numbers(result["vectors"]).reshape(-1, result["dimensions"]) for result in results)
    return await list_response(request, vectors, count)


@router.post("/embed_sparse", response_model=list[list[SparseValue]])
async def embed_sparse(request: Request, body: InputsRequest, model: ModelName = None) -> Response:
    """One sparse vector for each text."""
    served = get_gateway(request).models.find(body.model or model, ("sparse_embedding",))
    items = read_items(request, "inputs", body.inputs)
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
    served = get_gateway(request).models.find(body.model or options.model or model, ("embedding",))
    if not body.inputs.sentences:
        raise Problem(Kind.EMPTY, "inputs.sentences: an empty list; send a text at least")
    items = read_items(request, "inputs", [body.inputs.source_sentence, *body.inputs.sentences])
    results = await embed_items(request, served, items, options.keywords(served))
    vectors = np.stack([numbers(result["vector"]) for result in results])
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(norms, LEAST_NORM)
    return json_response(np.clip(vectors[1:] @ vectors[0], -1, 1))


# Scores: `/predict` and `/rerank`


#: More labels than any model has: the worker gives those that there are.
ALL_LABELS = 1_000_000

CLASSIFIERS = ("classification",)

#: A text, or a text and its pair.
TextOrPair = Annotated[list[str], Field(min_length=1, max_length=2)]


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
        str | TextOrPair | list[TextOrPair],
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


class Prediction(TypedDict):
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


class Rank(TypedDict):
    """One text, and how well it fits."""

    index: Annotated[int, Field(ge=0, description="Its place in the request.")]
    score: float
    text: NotRequired[str]


@router.post("/predict", response_model=list[Prediction] | list[list[Prediction]])
async def predict(request: Request, body: PredictRequest, model: ModelName = None) -> Response:
    """All labels of each text, the likeliest first; of a text alone they are not in a list."""
    served = get_gateway(request).models.find(body.model or model, CLASSIFIERS)
    items, is_batch = items_to_label(request, body.inputs)
    answers = await classify_items(request, served, items, body.keywords(served))
    return json_response(answers if is_batch else answers[0])


async def pipeline(request: Request, body: PipelineRequest, model: ModelName = None) -> Response:
    """Labels as Hugging Face's own inference API gives them: in a list for each text."""
    served = get_gateway(request).models.find(body.model or model, CLASSIFIERS)
    texts = read_items(request, "inputs", body.inputs)
    return json_response(await classify_items(request, served, texts, body.keywords()))


async def classify_items(
    request: Request, model: ServedModel, items: Sequence[Any], keywords: Mapping[str, Any]
) -> list[list[Prediction]]:
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
    served = get_gateway(request).models.find(body.model or model, ("rerank",))
    texts = read_items(request, "texts", body.texts)
    items = [{"query": body.query, "text": text} for text in texts]
    results = await run_items(request, served, items, body.keywords(served))
    scores = [result["score"] for result in results]
    ranks: list[Rank] = [{"index": index, "score": scores[index]} for index in best_first(scores)]
    if body.return_text:
        for rank in ranks:
            rank["text"] = texts[rank["index"]]
    return json_response(ranks)


# `POST /` and `/info`


#: What to do with a body for a model of each kind: its form, and the route that takes it.
HANDLERS: dict[str, tuple[type[BaseModel], Callable[..., Awaitable[Response]]]] = {
    "embedding": (EmbedRequest, embed),
    "multi_vector_embedding": (InputsRequest, embed_all),
    "sparse_embedding": (InputsRequest, embed_sparse),
    "classification": (PredictRequest, predict),
    "rerank": (RerankTextsRequest, rerank),
}

#: torch's names of number formats.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@router.post("/", response_model=None)
async def root(
    request: Request, body: Annotated[dict[str, Any], Body()], model: ModelName = None
) -> Response:
    """What the first model does, or the named one: `/embed`, `/predict`, `/rerank` and so on."""
    given = body.get("model")
    name = given if isinstance(given, str) and given else model
    served = get_gateway(request).models.find(name, HANDLERS)
    form, run = HANDLERS[served.kind]
    # The form of a body tells what the kind leaves open.
    if served.kind == "embedding" and isinstance(body.get("inputs"), dict):
        form, run = SimilarityRequest, similarity
    elif served.kind == "classification" and "parameters" in body:
        form, run = PipelineRequest, pipeline
    return await run(request, validate(form, body), served.name)


def _describe_type(model: ServedModel) -> dict[str, dict[str, Any]]:
    if "embedding" in model.kind:
        pooling = {"embedding": model.settings.pooling, "sparse_embedding": "splade"}
        return {"embedding": {"pooling": pooling.get(model.kind, "none")}}
    # Only workers know the names.
    return {
        "reranker" if model.kind == "rerank" else "classifier": {"id2label": {}, "label2id": {}}
    }


@router.get("/info")
async def info(request: Request, model: ModelName = None) -> dict[str, Any]:
    """The first model, or the named one, and the limits of requests, in TEI's words."""
    gateway, caller = get_gateway(request), request.state.caller
    served, settings = gateway.models.find(model, HANDLERS), gateway.settings
    own = served.settings
    return {
        # Where its folder lies is nobody's business.
        "model_id": Path(own.model).name if Path(own.model).is_absolute() else own.model,
        "model_sha": own.revision,
        "model_dtype": DTYPES.get(own.dtype, own.dtype),
        "served_model_name": served.name,
        "model_type": _describe_type(served),
        "max_concurrent_requests": caller.max_concurrency,
        "max_input_length": own.max_length or 0,
        "max_batch_tokens": own.max_batch_tokens or settings.max_batch_tokens or 0,
        "max_batch_requests": own.max_batch_size or settings.max_batch_size,
        "max_client_batch_size": caller.max_items,
        "auto_truncate": own.overflow == "truncate",
        "tokenization_workers": settings.gateway.processes,
        "version": version("batchery"),
        "sha": None,
        "docker_label": None,
    }

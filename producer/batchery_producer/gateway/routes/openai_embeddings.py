"""OpenAI's `/v1/embeddings`, which is TEI's as well."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from batchery_producer.files.openai_batch import ALIAS_IDS, has_ids
from batchery_producer.gateway.answers import json_response
from batchery_producer.gateway.bodies import JsonRoute, RequestBody
from batchery_producer.gateway.models import ServedModel, numbers
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.routes.embedding_options import (
    build_overflow_keywords,
    choose_prompt,
)
from batchery_producer.gateway.routes.fields import TokenId, Unserved, expected
from batchery_producer.gateway.routes.shared import embed_items, read_items, resolve_model

router = APIRouter(tags=["openai"], route_class=JsonRoute)


class JinaText(RequestBody):
    """A text as Jina's clients send it."""

    model_config = ConfigDict(extra="forbid")

    text: str


class EmbeddingsRequest(RequestBody):
    """What clients of OpenAI, Jina, Voyage, Mistral and vLLM send.

    Fields that change vectors are honoured or refused, others are ignored.
    """

    input: Annotated[
        str | list[TokenId] | list[str | list[TokenId] | JinaText],
        expected("a text, a list of token ids, or a list of either; or of {'text': ...}"),
        Field(
            description="A text, token ids of the model's own tokenizer, or a list of either.",
            examples=["the cat", ["the cat", {"text": "a dog"}], [[101, 1996, 4937, 102], "a dog"]],
        ),
    ]
    model: Annotated[str | None, Field(description="The first embedding model if missing.")] = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, Field(ge=1)] = None
    user: str | None = None
    embedding_type: Annotated[
        Literal["float", "base64"] | None, Field(description="Jina's `encoding_format`.")
    ] = None
    output_dtype: Literal["float"] | None = None
    output_dimension: Annotated[int | None, Field(ge=1, description="Voyage's `dimensions`.")] = (
        None
    )
    task: Annotated[str | None, Field(description="Jina's `input_type`.")] = None
    input_type: Annotated[
        str | None,
        Field(description="Puts the model's prompt for that in front, such as `query`."),
    ] = None
    truncation: Annotated[bool | None, Field(description="Voyage's `truncate`.")] = None
    truncate: Annotated[
        bool | None,
        Field(description="Cut texts that are too long; the model's setting if missing."),
    ] = None
    normalized: Annotated[bool | None, Field(description="Jina's `normalize`.")] = None
    normalize: Annotated[
        bool | None,
        Field(description="Scale vectors to length 1; the model's setting if missing."),
    ] = None
    late_chunking: Unserved = None
    return_multivector: Unserved = None
    truncate_prompt_tokens: Unserved = None

    @property
    def items(self) -> str | list[Any]:
        """The input, without Jina's objects."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return self.input
        return [each.text if isinstance(each, JinaText) else each for each in self.input]

    def choose_value(self, *fields: str) -> Any:
        """The value of fields that mean the same.

        Raises:
            Problem: They have two.
        """
        values = {name: getattr(self, name) for name in fields}
        said = {name: value for name, value in values.items() if value is not None}
        if len(set(said.values())) > 1:
            text = f"{' and '.join(said)}: mean the same, and have different values; send one"
            raise Problem(Kind.INVALID, text, param=next(iter(said)))
        return next(iter(said.values()), None)

    async def keywords(self, request: Request, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job.

        Raises:
            Problem: Two fields clash, or the model has no such prompt.
        """
        found = build_overflow_keywords(model, self.choose_value("truncate", "truncation"))
        scale = self.choose_value("normalize", "normalized")
        if scale is not None and scale != model.settings.normalize:
            found["normalize"] = scale
        field = "task" if self.input_type is None else "input_type"
        purpose = self.choose_value("input_type", "task")
        return found | await choose_prompt(request, model, field, purpose)


class EmbeddingObject(BaseModel):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: Usage


@router.post("/v1/embeddings", response_model=EmbeddingsResponse)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """One vector for each input."""
    model = resolve_model(request, body.model, ("embedding",))
    if has_ids(body.input) and not model.is_own_name(body.model):
        raise Problem(Kind.INVALID, ALIAS_IDS.format(body.model), param="input")
    dimensions = body.choose_value("dimensions", "output_dimension")
    as_text = body.choose_value("encoding_format", "embedding_type") == "base64"
    items = read_items(request, "input", body.items)
    keywords = await body.keywords(request, model)
    results = await embed_items(request, model, items, keywords, dimensions)
    tokens = sum(result["tokens"] for result in results)
    content = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": result["vector"] if as_text else numbers(result["vector"]),
            }
            for index, result in enumerate(results)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return json_response(content)

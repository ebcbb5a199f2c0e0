"""What the requests of Text Embeddings Inference (TEI) have in common."""

from typing import Annotated, Any, Literal

from pydantic import Field

from batchery_producer.gateway.bodies import RequestBody
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.routes.embedding_options import build_overflow_keywords


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
        return build_overflow_keywords(model, self.truncate, self.truncation_direction)


class PromptRequest(TextRequest):
    """Fields of the routes whose models have prompts."""

    prompt_name: Annotated[
        str | None, Field(description="Name of a prompt to put in front of each text.")
    ] = None

    def keywords(self, model: ServedModel) -> dict[str, Any]:
        """Keywords of the job, the prompt among them."""
        found = super().keywords(model)
        if self.prompt_name is not None:
            found["prompt"] = self.prompt_name
        return found

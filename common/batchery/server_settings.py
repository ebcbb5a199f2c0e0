"""Settings of models that a server computes; part of each table `[models.NAME]`."""

from typing import Annotated

from pydantic import BaseModel, Field

__all__ = ["ServerSettings"]


class ServerSettings(BaseModel):
    """Where a server with OpenAI's API is, and how much it is asked."""

    base_url: Annotated[
        str | None,
        Field(pattern=r"^https?://.", description="Engine openai: the server's URL, with `/v1`."),
    ] = None
    api_key_env: Annotated[
        str | None, Field(description="Engine openai: environment variable with the API key.")
    ] = None
    max_requests_per_minute: Annotated[
        int | None, Field(gt=0, description="Engine openai: maximum, of all workers together.")
    ] = None
    max_tokens_per_minute: Annotated[
        int | None, Field(gt=0, description="Engine openai: the same for prompts and answers.")
    ] = None
    server_timeout_s: Annotated[
        float, Field(gt=0, description="Engine openai: how long nothing new may come.")
    ] = 120
    server_retry_s: Annotated[
        float, Field(ge=0, description="Engine openai: how long a failing job is tried again.")
    ] = 120

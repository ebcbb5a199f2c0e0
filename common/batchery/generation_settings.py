"""Settings of the kind `generation`; part of each table `[models.NAME]`."""

from typing import Any

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, PositiveInt


class GenerationSettings(BaseModel):
    """How an engine computes texts, and how many at once."""

    engine_python: str | None = Field(
        None, description="Engine vllm: the Python of an environment that has vLLM."
    )
    engine_options: dict[str, Any] = Field(
        {}, description="Engine vllm: options of `vllm serve`, by name."
    )
    slots: PositiveInt | None = Field(
        None, description="Generation: maximum jobs at once; 16, 64 or 256 by engine if unset."
    )
    max_new_tokens: PositiveInt = Field(
        256, description="Generation: maximum tokens of a text, if the job says none."
    )
    cache_tokens: PositiveInt | None = Field(
        None,
        description="Generation: keys and values of so many tokens are kept, of all jobs"
        " together; by the free memory if unset.",
    )
    base_url: str | None = Field(
        None, pattern=r"^https?://.", description="Engine openai: the server's URL, with `/v1`."
    )
    api_key_env: str | None = Field(
        None, description="Engine openai: environment variable with the API key."
    )
    server_timeout_s: PositiveFloat = Field(
        120, description="Engines openai and vllm: how long nothing new may come."
    )
    server_retry_s: NonNegativeFloat = Field(
        120, description="Engines openai and vllm: how long a failing job is tried again."
    )

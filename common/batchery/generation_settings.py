"""Settings of the kind `generation`; part of each table `[models.NAME]`."""

from typing import Annotated, Any

from pydantic import BaseModel, Field


class GenerationSettings(BaseModel):
    """How an engine computes texts, how many at once, and how much a server is asked."""

    engine_python: Annotated[
        str | None, Field(description="Engine vllm: the Python of an environment that has vLLM.")
    ] = None
    engine_options: Annotated[
        dict[str, Any], Field(description="Engine vllm: options of its `AsyncEngineArgs`, by name.")
    ] = {}
    slots: Annotated[
        int | None,
        Field(
            gt=0, description="Generation: maximum jobs at once; 16, 64 or 256 by engine if unset."
        ),
    ] = None
    max_new_tokens: Annotated[
        int, Field(gt=0, description="Generation: maximum tokens of a text, if the job says none.")
    ] = 256
    cache_tokens: Annotated[
        int | None,
        Field(
            gt=0,
            description="Generation: keys and values of so many tokens are kept, of all jobs"
            " together; by the free memory if unset.",
        ),
    ] = None
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

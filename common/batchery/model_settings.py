"""The settings of one model: a table `[models.NAME]`."""

import re
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from batchery.media_settings import MEDIA_KINDS

#: Model ids of the hub. Any other name of a model must be a folder.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

#: The kinds of model that an engine is for; `transformers` is for all.
ENGINE_KINDS = {
    "openai": ("generation",),
    "vllm": ("generation",),
    "onnx": ("embedding", "classification", "rerank"),
}

#: Settings that an ONNX file decides: the values that they may have, and what to do instead.
DECIDED_BY_FILE = {
    "dtype": (("auto",), "the file has its number format; set onnx_file to another one"),
    "forward": (("auto", "padded"), "it cannot be packed"),
}

#: Where a model is, and in which processes: options that its task has, too.
PLACE_OPTIONS = ("devices", "pinned", "feeders")

#: Settings of a model that are options of its task, by the same name: limits of its batches, and
#: how long their results are kept.
TASK_OPTIONS = (
    *("max_batch_size", "max_batch_tokens", "max_wait_ms", "target_latency_ms"),
    "cache_ttl_s",
)

#: Of a setting that there is for all, too.
ALONE = "As the setting of that name, for this model alone."


class ModelSettings(BaseModel):
    """One model, which becomes a Celery task with its own queue."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    kind: Literal[
        "embedding",
        "classification",
        "rerank",
        "sparse_embedding",
        "multi_vector_embedding",
        "generation",
        "image_embedding",
        "image_classification",
        "zero_shot_image_classification",
        "object_detection",
        "audio_classification",
        "audio_embedding",
        "transcription",
    ] = Field(description="What the model does, and so what its results look like.")
    model: str = Field(
        min_length=1, description="A local folder, or a model id of the Hugging Face hub."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of the model on the hub.")
    trust_remote_code: bool = Field(
        False, description="Run code that comes with the model; off, as it may do anything."
    )
    queue: str | None = Field(
        None, description="Queue of its jobs; the model's own name where unset."
    )
    aliases: list[str] = Field(
        [], description="Other names by which requests over HTTP may call it."
    )
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Number format; auto is bf16 where the device is fast at it, else fp32."
    )
    forward: Literal["auto", "padded", "packed"] = Field(
        "auto", description="Forward pass; auto is packed, without padding, where that is right."
    )
    cpu_streams: PositiveInt | None = Field(
        None,
        description="Forward passes that a CPU computes side by side; one per thread of torch.",
    )
    cuda_graphs: Literal["auto", "never"] = Field(
        "auto", description="Small forward passes, and most steps of texts, as CUDA graphs."
    )
    max_length: PositiveInt | None = Field(
        None, description="Maximum tokens of a text; the model's own limit if unset."
    )
    overflow: Literal["truncate", "refuse"] = Field(
        "truncate", description="What to do with a text of more than `max_length` tokens."
    )
    max_chars: PositiveInt = Field(
        1_000_000, description="Maximum characters of a text; longer texts are refused."
    )
    max_batch_size: PositiveInt | None = Field(None, description=ALONE)
    max_batch_tokens: PositiveInt | None = Field(None, description=ALONE)
    max_wait_ms: NonNegativeFloat | None = Field(None, description=ALONE)
    target_latency_ms: PositiveFloat | None = Field(None, description=ALONE)
    cache: bool = Field(
        False, description="Compute equal texts once, and keep their results for a while."
    )
    cache_ttl_s: PositiveFloat | None = Field(None, description=ALONE)
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto", description="Embedding: how token vectors become one; auto asks the model's files."
    )
    normalize: bool = Field(True, description="Embeddings: scale each vector to length 1.")
    dimensions: PositiveInt | None = Field(
        None, description="Embedding: keep only this many leading dimensions."
    )
    prompts: dict[str, str] = Field(
        {}, description='Embeddings: texts to put in front, by name, such as `query = "query: "`.'
    )
    default_prompt: str | None = Field(
        None, description="Embeddings: name of the prompt for jobs that choose none."
    )
    multi_label: bool | None = Field(
        None, description="Classification: labels are independent; the config decides where unset."
    )
    engine_python: str | None = Field(
        None, description="Engine vllm: the Python of an environment that has vLLM."
    )
    engine_options: dict[str, Any] = Field(
        {}, description="Engine vllm: options of `vllm serve`, by name."
    )
    slots: PositiveInt | None = Field(
        None,
        description="Generation and transcription: maximum jobs at once; 16, 64 or 256 by engine"
        " if unset. Also the maximum windows of recordings in a step.",
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
    devices: list[str] | None = Field(
        None, min_length=1, description="Devices of the worker that have it; all if unset."
    )
    pinned: bool = Field(
        False, description="Whether it stays loaded, whatever else needs the memory."
    )
    feeders: int = Field(
        0,
        ge=0,
        le=64,
        description="Embedding: processes that take and tokenize its jobs for each device; 0 for"
        " that of the device itself.",
    )
    split: Literal["layers", "pipeline"] = Field(
        "layers",
        description="On a device such as `cuda:0+cuda:1`, each part of which has some layers:"
        " one pass at a time, or one on each part.",
    )
    layer_memory_bytes: PositiveInt | None = Field(
        None,
        description="Memory of layers on the first part of such a device; four fifths of what"
        " is free if unset.",
    )
    onnx_file: str | None = Field(
        None,
        min_length=1,
        description="Engine onnx: the file in the model's folder; `onnx/model.onnx` or"
        " `model.onnx` if unset.",
    )
    engine: Literal["transformers", "openai", "vllm", "onnx"] = Field(
        "transformers",
        description="What computes; `openai` and `vllm` are for generation, `onnx` for"
        " embedding, classification and rerank.",
    )

    @field_validator("cache")
    @classmethod
    def _caches_texts(cls, cache: bool, info: ValidationInfo) -> bool:
        if cache and info.data.get("kind") in MEDIA_KINDS:
            raise ValueError("only results for texts are kept; leave cache out for other kinds")
        return cache

    @field_validator("engine")
    @classmethod
    def _fits_all_before_it(cls, engine: str, info: ValidationInfo) -> str:
        kinds = ENGINE_KINDS.get(engine)
        if kinds and info.data.get("kind", kinds[0]) not in kinds:
            raise ValueError(f"it is for {', '.join(kinds)} alone; leave engine out for others")
        for name, (values, hint) in DECIDED_BY_FILE.items() if engine == "onnx" else ():
            if info.data.get(name, values[0]) not in values:
                raise ValueError(f"it takes {name} = {' or '.join(values)} alone: {hint}")
        if info.data.get("feeders") and engine != "transformers":
            raise ValueError("a model with feeders is run by transformers alone; leave feeders out")
        return engine

    @field_validator("feeders")
    @classmethod
    def _fits_the_kind(cls, feeders: int, info: ValidationInfo) -> int:
        if feeders and info.data.get("kind", "embedding") != "embedding":
            raise ValueError("only models of the kind embedding have them; leave feeders out")
        return feeders

"""The settings of one built-in model."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelSettings(BaseModel):
    """One model, by which it becomes a Celery task and a queue of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    kind: Annotated[
        Literal["embedding", "classification"],
        Field(description="What the model does, and so what its results look like."),
    ]
    model: Annotated[
        str,
        Field(min_length=1, description="A local folder, or a model id of the Hugging Face hub."),
    ]
    revision: Annotated[
        str | None, Field(description="Branch, tag or commit of the model on the hub.")
    ] = None
    trust_remote_code: Annotated[
        bool, Field(description="Run code that comes with the model; off, as it may do anything.")
    ] = False
    queue: Annotated[
        str | None, Field(description="Queue of its jobs; the model's own name where unset.")
    ] = None
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        Field(description="Number format; auto is bf16 where the device is fast at it, else fp32."),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8", "float8"],
        Field(description="Weights of 8 bits, by torchao: less memory, a little less exact."),
    ] = "none"
    forward: Annotated[
        Literal["auto", "padded", "packed"],
        Field(description="Forward pass; auto is packed, without padding, where that is right."),
    ] = "auto"
    lanes: Annotated[
        int | None,
        Field(
            gt=0,
            description="Forward passes that a CPU computes side by side; one per thread of torch.",
        ),
    ] = None
    cuda_graphs: Annotated[
        Literal["auto", "never"],
        Field(
            description="Small forward passes as CUDA graphs; auto where that is faster. New: off."
        ),
    ] = "never"
    max_length: Annotated[
        int | None,
        Field(gt=0, description="Longest text in tokens; the model's own limit where unset."),
    ] = None
    overflow: Annotated[
        Literal["truncate", "refuse"],
        Field(description="What to do with a text of more than `max_length` tokens."),
    ] = "truncate"
    max_chars: Annotated[
        int, Field(gt=0, description="Longest text in characters; a longer one is refused.")
    ] = 1_000_000
    max_batch_size: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this model alone.")
    ] = None
    max_batch_tokens: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this model alone.")
    ] = None
    max_wait_ms: Annotated[
        float | None, Field(ge=0, description="As the setting of that name, for this model alone.")
    ] = None
    cache: Annotated[
        bool, Field(description="Compute equal texts once, and keep their results for a while.")
    ] = False
    cache_ttl_s: Annotated[
        float | None, Field(gt=0, description="As the setting of that name, for this model alone.")
    ] = None
    cache_max_bytes: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this model alone.")
    ] = None
    pooling: Annotated[
        Literal["auto", "mean", "cls", "last"],
        Field(description="Embedding: how token vectors become one; auto asks the model's files."),
    ] = "auto"
    normalize: Annotated[bool, Field(description="Embedding: scale each vector to length 1.")] = (
        True
    )
    dimensions: Annotated[
        int | None,
        Field(gt=0, description="Embedding: keep only this many leading dimensions."),
    ] = None
    prompts: Annotated[
        dict[str, str],
        Field(
            description='Embedding: texts to put in front, by name, such as `query = "query: "`.'
        ),
    ] = {}
    default_prompt: Annotated[
        str | None, Field(description="Embedding: name of the prompt for jobs that choose none.")
    ] = None
    multi_label: Annotated[
        bool | None,
        Field(
            description="Classification: labels are independent; the config decides where unset."
        ),
    ] = None

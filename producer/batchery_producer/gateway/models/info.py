"""What `/info` tells of a model: from the settings, and from its small files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchery.settings import Settings
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.models.files import ModelFiles
from batchery_producer.gateway.models.served_models import ServedModel

#: torch's names of number formats.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: Limits from here on, in tokens, mean no limit: such tokenizers say 1e30.
NO_LIMIT_TOKENS = 10**9

#: TEI's names of what models do.
TYPES = {"classification": "classifier", "rerank": "reranker"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the files of a model say.

    Attributes:
        labels: Names of labels, by number.
        max_tokens: Maximum length of a text, in tokens; None if they do not say.
    """

    labels: Mapping[int, str] = field(default_factory=dict)
    max_tokens: int | None = None


#: Where the gateway cannot read them.
UNKNOWN = ModelInfo()


def read_prompts(model: ServedModel) -> Mapping[str, str]:
    """The prompts of a model: those of its files, and those of its settings.

    Raises:
        Problem: Its files cannot be read.
    """
    general = ModelFiles(model).json("config_sentence_transformers.json")
    return {**(general.get("prompts") or {}), **model.settings.prompts}


def read_info(model: ServedModel) -> ModelInfo:
    """Reads the files of a model.

    Raises:
        Problem: They cannot be read.
    """
    files = ModelFiles(model)
    config = files.json("config.json")
    limits = [
        config.get("max_position_embeddings"),
        files.json("tokenizer_config.json").get("model_max_length"),
        files.json("sentence_bert_config.json").get("max_seq_length"),
    ]
    stated = [int(each) for each in limits if each and 0 < each < NO_LIMIT_TOKENS]
    labels = config.get("id2label") or {}
    return ModelInfo(
        {int(number): str(name) for number, name in labels.items()}, min(stated, default=None)
    )


def build_info(
    model: ServedModel, info: ModelInfo, settings: Settings, caller: Caller
) -> dict[str, Any]:
    """A model and the limits of requests, in TEI's words."""
    own = model.settings
    return {
        # Where its folder lies is nobody's business.
        "model_id": Path(own.model).name if Path(own.model).is_absolute() else own.model,
        "model_sha": own.revision,
        "model_dtype": DTYPES.get(own.dtype, own.dtype),
        "served_model_name": model.name,
        "model_type": _type(model, info),
        "max_concurrent_requests": caller.max_concurrency,
        "max_input_length": own.max_length or info.max_tokens or 0,
        "max_batch_tokens": own.max_batch_tokens or settings.max_batch_tokens or 0,
        "max_batch_requests": own.max_batch_size or settings.max_batch_size,
        "max_client_batch_size": caller.max_items,
        "auto_truncate": own.overflow == "truncate",
        "tokenization_workers": settings.gateway.processes,
        "version": version("batchery"),
        "sha": None,
        "docker_label": None,
    }


def _type(model: ServedModel, info: ModelInfo) -> dict[str, Any]:
    if "embedding" in model.kind:
        pooling = {"embedding": model.settings.pooling, "sparse_embedding": "splade"}
        return {"embedding": {"pooling": pooling.get(model.kind, "none")}}
    return {
        TYPES.get(model.kind, "classifier"): {
            "id2label": {str(number): name for number, name in info.labels.items()},
            "label2id": {name: number for number, name in info.labels.items()},
        }
    }

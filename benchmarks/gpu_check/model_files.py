"""The models of the check: BERTs of the engine benchmarks, and three other architectures."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers

from benchmarks.engine.models import POSITIONS, VOCABULARY, model_folder

SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
INNER = {False: 3072, True: 64}

#: Name -> prefix of the classes in transformers, and what its config needs.
OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "roberta-base": ("Roberta", {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1}),
        "modernbert-base": (
            "ModernBert",
            {
                "max_position_embeddings": POSITIONS,
                **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
                "cls_token_id": 1,
                "sep_token_id": 2,
            },
        ),
        "mpnet-base": ("MPNet", {"max_position_embeddings": POSITIONS + 2, "pad_token_id": 1}),
    }
)

#: Names of all models.
NAMES = ("minilm", "bert-base", "bert-large", *OTHERS)


def build_folder_name(name: str, folder: Path, *, tiny: bool) -> Path:
    """The files of a model, made on first use.

    Args:
        name: One of `NAMES`.
        folder: Where it is made.
        tiny: A model of the same architecture with two narrow layers.
    """
    if name in OTHERS:
        return _other(name, folder / f"{name}-{tiny}", tiny=tiny)
    name = "tiny" if tiny else name
    made = folder / name
    return made if made.exists() else model_folder(name, folder)


def _other(name: str, folder: Path, *, tiny: bool) -> Path:
    if folder.exists():
        return folder
    prefix, options = OTHERS[name]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCABULARY,
        intermediate_size=INNER[tiny],
        **(TINY if tiny else SIZES),
        **options,
    )
    torch.manual_seed(1)
    getattr(transformers, f"{prefix}Model")(config).save_pretrained(folder)
    source = model_folder("minilm", folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder

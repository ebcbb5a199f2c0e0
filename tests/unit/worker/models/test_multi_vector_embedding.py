"""Multi-vector embeddings: agreement with sentence-transformers, keywords, bad items."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from batchery.errors import ModelLoadError
from batchery.results import MultiVectorEmbedding
from support.tiny_models import CORPUS, Build, Copy, Load, mend, run, write_json

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 5e-6

KIND = "multi_vector_embedding"
ITEMS = ["the cat", " ".join(CORPUS), "rain", CORPUS[1], "cat " * 100]


def close(result: Any, expected: Any) -> None:
    parsed = MultiVectorEmbedding.model_validate(result).to_numpy()
    np.testing.assert_allclose(parsed, np.asarray(expected), atol=TOLERANCE)


def assert_is_the_librarys(folder: Path, model: Any) -> None:
    library = MultiVectorEncoder(str(folder), device="cpu")
    for task in (None, "query", "document"):
        found = run(model, ITEMS, **({"prompt": task} if task else {}))
        for item, result in zip(ITEMS, found, strict=True):
            close(result, library.encode(item, prompt_name=task, task=task))


def add_mask(folder: Path) -> None:
    known = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder, "tokenizer_config.json", {**known, "mask_token": "[UNK]"})


def add_projection(folder: Path, general: Any, weight: torch.Tensor, **config: Any) -> None:
    """Writes a projection as PyLate does."""
    modules = ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_D")
    listed = [
        {"idx": place, "name": f"{place}", "type": kind, "path": path}
        for place, (kind, path) in enumerate(modules)
    ]
    write_json(folder, "modules.json", listed)
    write_json(folder, "config_sentence_transformers.json", {"model_type": "ColBERT", **general})
    size = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    write_json(folder, "1_D/config.json", {**size, **identity, **config})
    save_file({"linear.weight": weight}, folder / "1_D" / "model.safetensors")


@pytest.mark.parametrize("forward", ["auto", "padded"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "gpt2-left"])
def test_each_token_has_the_vector_of_its_last_layer_where_nothing_is_behind_it(
    architecture: str, forward: str, build: Build, load: Load
) -> None:
    folder = build(architecture)
    model = load(KIND, folder, forward=forward, normalize=False)
    assert model.pads == (forward == "padded")
    library = mend(SentenceTransformer(str(folder), device="cpu"))
    for item, result in zip(ITEMS, run(model, ITEMS), strict=True):
        close(result, library.encode(item, output_value="token_embeddings"))
        assert result["tokens"] == len(result["vectors"])


@pytest.mark.parametrize(
    "general",
    [
        {"query_length": 8, "document_length": 12},
        {"query_length": 8, "document_length": 12, "do_query_expansion": False},
        {"query_length": 8, "attend_to_expansion_tokens": True},
        {"query_prefix": "rain ", "document_prefix": "tea ", "query_length": 12},
        {"skiplist_words": ["cat", "the"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [{}, {"use_residual": True}], ids=str)
def test_models_of_pylate_give_what_the_library_gives(
    general: dict[str, Any], config: dict[str, Any], build: Build, load: Load, copied: Copy
) -> None:
    folder = copied(build("bert"))
    add_mask(folder)
    width = 32 if config else 8
    weight = torch.randn(width, 32, generator=torch.manual_seed(3)) / 6
    add_projection(folder, general, weight, **config)
    assert_is_the_librarys(folder, load(KIND, folder))


def test_the_projection_of_a_colbert_checkpoint_is_used(
    build: Build, load: Load, copied: Copy
) -> None:
    folder = copied(build("bert"))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder, "config.json", {**config, "architectures": ["HF_ColBERT"]})
    weights = load_file(folder / "model.safetensors")
    weight = torch.randn(8, 32, generator=torch.manual_seed(3))
    saved = {**weights, "linear.weight": weight}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    add_mask(folder)
    write_json(folder, "artifact.metadata", {"query_maxlen": 8, "doc_maxlen": 12})
    assert_is_the_librarys(folder, load(KIND, folder))


def test_base64_carries_the_same_numbers(build: Build, load: Load) -> None:
    model = load(KIND, build("bert"))
    for plain, packed in zip(run(model, ITEMS), run(model, ITEMS, encoding="base64"), strict=True):
        assert isinstance(packed["vectors"], str)
        assert packed["dimensions"] == 32
        one, other = map(MultiVectorEmbedding.model_validate, (plain, packed))
        np.testing.assert_array_equal(one.to_numpy(), other.to_numpy())


@pytest.mark.parametrize(
    ("width", "config", "problem"),
    [(31, {}, "31"), (32, {"activation_function": "os.Odd"}, "'os.Odd' is not trusted")],
)
def test_a_projection_that_cannot_be_used_is_refused_in_a_line(
    width: int, config: dict[str, str], problem: str, build: Build, load: Load, copied: Copy
) -> None:
    folder = copied(build("bert"))
    add_projection(folder, {}, torch.ones(8, width), **config)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        load(KIND, folder)
    assert "\n" not in str(caught.value)

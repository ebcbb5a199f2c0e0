"""Multi-vector embeddings: agreement with transformers, projections, keywords, bad items."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from batchery.errors import ModelLoadError
from batchery.results import MultiVectorEmbedding
from support.tiny_models import CORPUS, Build, Copy, Load, run

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 5e-6

KIND = "multi_vector_embedding"
ITEMS = ["the cat", " ".join(CORPUS), "rain", CORPUS[1]]


def direct(folder: Path, text: str) -> torch.Tensor:
    """What transformers computes, without Batchery."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        hidden: torch.Tensor = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0]
    return hidden


def close(result: Any, expected: Any) -> None:
    parsed = MultiVectorEmbedding.model_validate(result).to_numpy()
    np.testing.assert_allclose(parsed, np.asarray(expected), atol=TOLERANCE)


def add_dense(folder: Path, weight: torch.Tensor, *, others: Any = (), **config: Any) -> None:
    """Writes a projection as sentence-transformers and PyLate do."""
    (folder / "1_Dense").mkdir(exist_ok=True)
    library = "sentence_transformers.models"
    modules = [(f"{library}.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense"), *others]
    listed = [{"type": kind, "path": path} for kind, path in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense" / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")


@pytest.mark.parametrize("forward", ["auto", "padded"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "gpt2-left"])
def test_each_token_has_the_vector_of_transformers(
    architecture: str, forward: str, build: Build, load: Load
) -> None:
    folder = build(architecture)
    model = load(KIND, folder, forward=forward, normalize=False)
    assert model.pads == (forward == "padded")
    for item, result in zip(ITEMS, run(model, ITEMS), strict=True):
        close(result, direct(folder, item))
        assert result["tokens"] == len(result["vectors"])


def test_vectors_have_length_one_unless_told_otherwise(build: Build, load: Load) -> None:
    folder = build("bert")
    model = load(KIND, folder)
    for item, scaled, raw in zip(
        ITEMS, run(model, ITEMS), run(model, ITEMS, normalize=False), strict=True
    ):
        expected = direct(folder, item)
        close(raw, expected)
        close(scaled, torch.nn.functional.normalize(expected, dim=1))


def test_base64_carries_the_same_numbers(build: Build, load: Load) -> None:
    model = load(KIND, build("bert"))
    for plain, packed in zip(run(model, ITEMS), run(model, ITEMS, encoding="base64"), strict=True):
        assert isinstance(packed["vectors"], str)
        assert packed["dimensions"] == 32
        one, other = map(MultiVectorEmbedding.model_validate, (plain, packed))
        np.testing.assert_array_equal(one.to_numpy(), other.to_numpy())


@pytest.mark.parametrize(
    ("activation", "residual"),
    [("torch.nn.modules.linear.Identity", False), ("torch.nn.modules.activation.Tanh", True)],
)
def test_a_dense_module_projects_the_vectors(
    activation: str, residual: bool, build: Build, load: Load, copied: Copy
) -> None:
    folder = copied(build("bert"))
    weight = torch.randn(32 if residual else 8, 32, generator=torch.manual_seed(3)) / 6
    add_dense(folder, weight, activation_function=activation, use_residual=residual)
    for item, result in zip(ITEMS, run(load(KIND, folder, normalize=False), ITEMS), strict=True):
        hidden = direct(folder, item)
        projected = hidden @ weight.T
        close(result, projected.tanh() + hidden if residual else projected)


def test_the_projection_of_a_colbert_checkpoint_is_used(
    build: Build, load: Load, copied: Copy
) -> None:
    folder = copied(build("bert"))
    weights = load_file(folder / "model.safetensors")
    weight = torch.randn(8, 32, generator=torch.manual_seed(3))
    saved = {**weights, "linear.weight": weight}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(KIND, folder)
    for item, result in zip(ITEMS, run(model, ITEMS), strict=True):
        expected = torch.nn.functional.normalize(direct(folder, item) @ weight.T, dim=1)
        close(result, expected)


def test_what_is_behind_a_pooling_is_not_for_tokens(build: Build, load: Load, copied: Copy) -> None:
    folder = copied(build("bert"))
    kinds = ("Transformer", "Pooling", "Dense", "Odd")
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(listed))
    (result,) = run(load(KIND, folder, normalize=False), ["rain"])
    close(result, direct(folder, "rain"))


def test_prefixes_of_pylate_are_prompts(build: Build, load: Load, copied: Copy) -> None:
    folder = copied(build("bert"))
    prefixes = {"query_prefix": "rain ", "document_prefix": "tea "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prefixes))
    model = load(KIND, folder)
    (plain,) = run(model, ["rain falls"])
    close(run(model, ["falls"], prompt="query")[0], plain["vectors"])


@pytest.mark.parametrize(
    ("width", "others", "config", "message"),
    [
        (31, [], {}, "its projection takes 31 numbers, and its vectors have 32"),
        (32, [("pylate.LayerNorm", "2")], {}, "modules.json asks for LayerNorm, not built in"),
        (32, [], {"activation_function": "os.Odd"}, "asks for Odd, which is not built in"),
        (
            32,
            [("pylate.Dense", "2_Dense")],
            {},
            "2_Dense has no linear.weight in model.safetensors",
        ),
    ],
)
def test_a_projection_that_cannot_be_used_is_refused_in_a_line(
    width: int,
    others: Any,
    config: dict[str, str],
    message: str,
    build: Build,
    load: Load,
    copied: Copy,
) -> None:
    folder = copied(build("bert"))
    add_dense(folder, torch.ones(8, width), others=others, **config)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(KIND, folder)
    assert "\n" not in str(caught.value)

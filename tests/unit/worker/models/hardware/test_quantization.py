"""Weights of eight bits: smaller, nearly the same results, and never where they cannot run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.hardware import quantization
from batchery_worker.models.hardware.quantization import quantize, weights_bytes
from support.tiny_models import Build, Load, run

#: Least cosine of a vector and the same in fp32, by int8. Measured: 0.9979 of the tiny ones, which
#: have random weights, and 0.9987 of MiniLM.
LEAST_COSINE = 0.995


def vectors(model: EmbeddingModel, texts: list[str]) -> torch.Tensor:
    return torch.tensor([each["vector"] for each in run(model, texts)])


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "modernbert", "llama"])
def test_int8_is_close_packed_and_padded(
    architecture: str, build: Build, embedder: Load, texts: list[str]
) -> None:
    folder = build(architecture)
    exact = vectors(embedder(folder), texts)
    packed = embedder(folder, quantize="int8")
    padded = embedder(folder, quantize="int8", forward="padded")
    assert (packed.pads, padded.pads) == (False, True)
    # The weights are others, but the same for all forward passes.
    torch.testing.assert_close(vectors(packed, texts), vectors(padded, texts), atol=2e-6, rtol=0)
    cosines = (vectors(packed, texts) * exact).sum(dim=1)
    assert LEAST_COSINE < float(cosines.min()) < 1 - 1e-6


def test_a_classifier_is_smaller_and_keeps_its_head(
    build: Build, classifier: Load, texts: list[str]
) -> None:
    folder = build("bert", labels=("no", "yes", "perhaps"))
    exact, small = classifier(folder), classifier(folder, quantize="int8")
    assert torch.equal(small.model.classifier.weight, exact.model.classifier.weight)
    assert weights_bytes(small.model) < weights_bytes(exact.model)
    for one, other in zip(run(small, texts, top_k=3), run(exact, texts, top_k=3), strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=0.05)


def test_float8_is_refused_on_a_device_without_it(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = "quantize = 'float8' needs a CUDA device of compute capability 8.9 or more"
    with pytest.raises(ModelLoadError, match=f"{needs}, not cpu; int8 runs anywhere"):
        embedder(build("bert"), quantize="float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    settings = ModelSettings(kind="embedding", model="m", quantize="float8")
    with pytest.raises(ValueError, match=f"{needs}; cuda:0 has 8.6; int8 runs there"):
        quantize(settings, torch.nn.Linear(16, 16), torch.device("cuda:0"))


def test_float8_is_what_torchao_makes_of_it(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "_check_float8", lambda *_: None)
    model: Any = embedder(build("bert"), quantize="float8").model
    assert "Float8" in str(type(model.encoder.layer[0].attention.self.query.weight))


def test_without_torchao_the_error_names_the_extra(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    folder: Path = build("bert")
    with pytest.raises(ModelLoadError, match=r"needs torchao: pip install 'batchery\[quantize\]'"):
        embedder(folder, quantize="int8")


def test_a_model_without_plain_linear_layers_is_refused(build: Build, embedder: Load) -> None:
    with pytest.raises(ModelLoadError, match="but it has no plain linear layers; set it to none"):
        embedder(build("gpt2"), quantize="int8")

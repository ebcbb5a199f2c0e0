"""Kinds of model other than embeddings and classification on a CUDA device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kombu.utils.imports import symbol_by_name

from batchery.installer import KINDS
from batchery.settings import ModelSettings
from batchery_worker.models.forward.attention import varlen_kernel
from support.tiny_models import CORPUS, run, save_model
from support.verification import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: By kind: labels and head of its model.
HEADS: dict[str, tuple[tuple[str, ...], str]] = {
    "rerank": (("fits",), ""),
    "sparse_embedding": ((), "MaskedLM"),
    "multi_vector_embedding": ((), ""),
}
EACH_KIND = pytest.mark.parametrize("kind", HEADS)


def tiny(kind: str, folder: Path, **settings: Any) -> ModelSettings:
    labels, head = HEADS[kind]
    save_model(folder, "bert", labels, head, hidden_size=64)
    return ModelSettings.model_validate({"kind": kind, "model": str(folder), **settings})


@EACH_KIND
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_batches_are_what_single_texts_are(kind: str, dtype: str, tmp_path: Path) -> None:
    found = verify(tiny(kind, tmp_path, dtype=dtype), "cuda:0")
    assert all(each.passed for each in found.values())
    assert ("packed" in found) == (dtype == "bf16" and varlen_kernel() is not None)


@EACH_KIND
@pytest.mark.parametrize("forward", ["auto", "padded"])
def test_a_pass_is_launched_without_waiting_for_the_device(
    kind: str, forward: str, tmp_path: Path
) -> None:
    settings = tiny(kind, tmp_path, dtype="bf16", forward=forward, cuda_graphs="never")
    model = symbol_by_name(KINDS[kind])(settings)
    model.load("cuda:0")
    items = [model.sample_item(text) for text in [*CORPUS, "rain"]]
    expected = run(model, items, **model.sample_keywords)
    prepared = model.preprocess(items, **model.sample_keywords)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = model.forward(prepared, **model.sample_keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = model.postprocess(outputs, **model.sample_keywords)
    assert [each["tokens"] for each in results] == [each["tokens"] for each in expected]

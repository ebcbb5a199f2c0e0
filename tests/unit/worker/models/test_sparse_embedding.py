"""Sparse embeddings: agreement with sentence-transformers, keywords, models without a head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

from support.tiny_models import CORPUS, Build, Load, mend, run

#: Greatest difference of any weight in fp32: the sums run in another order.
TOLERANCE = 5e-6

ITEMS = ["the cat", " ".join(CORPUS), "rain", CORPUS[1], "cat " * 100]


def dense(result: Any, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    whole = np.zeros(length, dtype=np.float32)
    whole[result["indices"]] = result["values"]
    return whole


def assert_is_the_librarys(folder: Path, model: Any, tasks: Any = (None,)) -> None:
    library = mend(SparseEncoder(str(folder), device="cpu"))
    for task in tasks:
        found = run(model, ITEMS, **({"prompt": task} if task else {}))
        for item, result in zip(ITEMS, found, strict=True):
            expected = library.encode(item, task=task, convert_to_sparse_tensor=False).numpy()
            found_weights = dense(result, len(expected))
            np.testing.assert_allclose(found_weights, expected, atol=TOLERANCE, rtol=2e-6)
            assert result["indices"] == sorted(result["indices"])
            assert len(result["values"]) == np.count_nonzero(expected)


@pytest.mark.parametrize("forward", ["auto", "padded"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "modernbert"])
def test_weights_are_those_of_splade(
    architecture: str, forward: str, build: Build, load: Load
) -> None:
    folder = build(architecture, head="MaskedLM")
    assert_is_the_librarys(folder, load("sparse_embedding", folder, forward=forward))


@pytest.mark.parametrize("forward", ["auto", "padded"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_the_files_say_how_weights_are_made(
    strategy: Any, activation: Any, forward: str, build: Build, load: Load, tmp_path: Path
) -> None:
    first = Transformer(str(build("bert", head="MaskedLM")), transformer_task="fill-mask")
    modules = [first, SpladePooling(strategy, activation)]
    SparseEncoder(modules=modules, device="cpu", max_active_dims=5).save(str(tmp_path))
    assert_is_the_librarys(tmp_path, load("sparse_embedding", tmp_path, forward=forward))


def test_queries_may_need_no_inference(build: Build, load: Load, tmp_path: Path) -> None:
    first = Transformer(str(build("bert", head="MaskedLM")), transformer_task="fill-mask")
    static = SparseStaticEmbedding(first.tokenizer)
    router = Router.for_query_document([static], [first, SpladePooling("max")])
    SparseEncoder(modules=[router], device="cpu").save(str(tmp_path))
    model = load("sparse_embedding", tmp_path)
    assert_is_the_librarys(tmp_path, model, (None, "query", "document"))


@pytest.mark.parametrize("top_k", [1, 3, 500])
def test_top_k_keeps_the_largest(top_k: int, build: Build, load: Load) -> None:
    model = load("sparse_embedding", build("bert", head="MaskedLM"))
    for whole, kept in zip(run(model, CORPUS), run(model, CORPUS, top_k=top_k), strict=True):
        largest = sorted(whole["values"])[-top_k:]
        assert sorted(kept["values"]) == pytest.approx(largest, abs=TOLERANCE)
        assert set(kept["indices"]) <= set(whole["indices"])
        assert kept["indices"] == sorted(kept["indices"])


def test_prompts_and_token_ids_go_in_as_texts_do(build: Build, load: Load) -> None:
    folder = build("bert", head="MaskedLM")
    model = load("sparse_embedding", folder, prompts={"query": "rain falls "})
    ids = model.tokenizer(["on hills"], add_special_tokens=False)["input_ids"]
    literal = run(model, ["rain falls on hills"])[0]
    for result in run(model, ["on hills", *ids], prompt="query"):
        np.testing.assert_allclose(dense(result, 37), dense(literal, 37), atol=TOLERANCE)

"""Sparse embeddings: agreement with transformers, keywords, bad items, models without a head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from support.tiny_models import CORPUS, Build, Load, run

#: Greatest difference of any weight in fp32: the sums run in another order.
TOLERANCE = 5e-6


def direct(folder: Path, text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What SPLADE computes, without Batchery: its special tokens count."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**tokenizer([text], return_tensors="pt")).logits[0]
    return np.asarray(torch.log(1 + torch.relu(logits)).max(dim=0).values)


def dense(result: Any, length: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    whole = np.zeros(length, dtype=np.float32)
    whole[result["indices"]] = result["values"]
    return whole


@pytest.mark.parametrize("forward", ["auto", "padded"])
@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "modernbert"])
def test_weights_are_those_of_splade(
    architecture: str, forward: str, build: Build, load: Load
) -> None:
    folder = build(architecture, head="MaskedLM")
    model = load("sparse_embedding", folder, forward=forward)
    items = ["the cat", " ".join(CORPUS), "rain", CORPUS[1]]
    for item, result in zip(items, run(model, items), strict=True):
        expected = direct(folder, item)
        np.testing.assert_allclose(dense(result, len(expected)), expected, atol=TOLERANCE)
        assert result["indices"] == sorted(result["indices"])
        assert all(weight > 0 for weight in result["values"])
        assert len(result["values"]) == np.count_nonzero(expected)


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

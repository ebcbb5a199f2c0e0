"""Packed forward passes: right where they are taken, and taken only where they are right."""

import logging
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from batchery.errors import ModelLoadError
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.forward import attention, selection
from batchery_worker.models.forward.attention import Row, row_of_texts
from batchery_worker.models.forward.packed import Packed
from support.tiny_models import Build, Load, run

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 2e-6

LABELS = ("animal", "weather", "trade")

PACKED = ["bert", "roberta", "distilbert", "modernbert", "llama", "mistral-left", "gpt2"]
PADDED = {
    "mpnet": "since its attention cannot be replaced in transformers",
    "xlnet-left": "since its code takes no position_ids",
    "t5": "since its code takes no position_ids",
}


def vectors(model: EmbeddingModel, texts: list[str]) -> torch.Tensor:
    return torch.tensor([each["vector"] for each in run(model, texts)])


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [*product(PACKED, ["mean"]), *product(["bert", "mistral-left"], ["cls", "last"])],
)
def test_packed_vectors_are_the_padded_ones(
    architecture: str, pooling: str, build: Build, embedder: Load, texts: list[str]
) -> None:
    folder = build(architecture)
    packed = embedder(folder, pooling=pooling)
    padded = embedder(folder, pooling=pooling, forward="padded")
    assert (packed.pads, padded.pads) == (False, True)
    difference = vectors(packed, texts) - vectors(padded, texts)
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("architecture", PADDED)
def test_model_that_cannot_be_packed_is_padded_and_logged(
    architecture: str, build: Build, embedder: Load, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(architecture)
    with caplog.at_level(logging.INFO):
        assert embedder(folder).pads
    assert f"model {folder}: padded on cpu, {PADDED[architecture]}" in caplog.messages


def test_the_log_says_that_a_model_is_packed(
    build: Build, embedder: Load, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build("bert")
    with caplog.at_level(logging.INFO):
        embedder(folder)
        embedder(folder, forward="padded")
    assert f"model {folder}: packed on cpu" in caplog.messages
    assert f"model {folder}: padded on cpu, as the settings say" in caplog.messages


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("llama", {}, "since its head does not read the first token of each text"),
        ("modernbert", {"classifier_pooling": "mean"}, "since packed results differ by"),
    ],
)
def test_heads_that_read_more_than_the_first_token_are_padded(
    architecture: str, options: dict[str, Any], reason: str, build: Build, classifier: Load
) -> None:
    model = classifier(build(architecture, labels=LABELS, **options))
    assert model.pads
    assert model.why_padded.startswith(reason)


def shifted(packed: Packed, ids: Any, ends: Any) -> Any:
    """Positions that begin one too late."""
    starts = np.repeat(ends[:-1], np.diff(ends))
    return (np.arange(len(ids)) - starts + 1).clip(max=70)


def break_attention(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    right = attention._text_by_text

    def wrong(query: Any, key: Any, value: Any, row: Row, shape: Any) -> torch.Tensor:
        if how == "neighbours are seen":
            row = Row([sum(row.lengths)])
        elif how == "one token of a neighbour is seen":
            first, second, *others = row.lengths
            row = Row([first + 1, second - 1, *others])
        elif how == "what comes later is not seen":
            shape = shape._replace(causal=True)
        elif how == "the window is too wide":
            shape = shape._replace(window=shape.window and shape.window + 1)
        return right(query, key, value, row, shape)

    monkeypatch.setattr(attention, "_text_by_text", wrong)
    if how == "positions are shifted":
        monkeypatch.setattr(Packed, "_positions", shifted)


WRONG = [
    "neighbours are seen",
    "what comes later is not seen",
    "positions are shifted",
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_packed_pass_is_found_at_the_start(
    how: str,
    dtype: str,
    build: Build,
    embedder: Load,
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = build("bert")
    expected = vectors(embedder(folder, forward="padded", dtype=dtype), texts)
    break_attention(monkeypatch, how)
    model = embedder(folder, dtype=dtype)
    assert model.pads
    assert model.why_padded.startswith("since packed token vectors differ by")
    # And nothing of the wrong attention is left behind.
    assert torch.equal(vectors(model, texts), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_a_single_token_that_leaks_is_found_however_little_it_changes(
    architecture: str,
    dtype: str,
    build: Build,
    embedder: Load,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_attention(monkeypatch, "one token of a neighbour is seen")
    # No distance is too large: the leak shows without any.
    monkeypatch.setattr(selection, "TOLERANCE", dict.fromkeys(selection.TOLERANCE, 9.0))
    model = embedder(build(architecture), dtype=dtype)
    assert "of their size with other neighbours" in model.why_padded


def test_a_device_whose_results_vary_gets_some_tolerance(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention._text_by_text

    def vary(*given: Any) -> torch.Tensor:
        out = right(*given)
        return out + 1e-6 * torch.randn_like(out)

    monkeypatch.setattr(attention, "_text_by_text", vary)
    assert embedder(build("bert")).why_padded == ""


def test_a_window_that_is_too_wide_is_found(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_attention(monkeypatch, "the window is too wide")
    assert embedder(build("modernbert")).pads


def test_packed_as_a_setting_is_an_error_where_it_is_wrong(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("mpnet")
    with pytest.raises(ModelLoadError) as caught:
        embedder(folder, forward="packed")
    assert str(caught.value) == (
        f"model {str(folder)!r}: forward = 'packed', but its attention cannot be replaced in"
        " transformers; set it to auto or padded"
    )
    assert not embedder(build("bert"), forward="packed").pads
    break_attention(monkeypatch, "neighbours are seen")
    with pytest.raises(ModelLoadError, match="but packed token vectors differ"):
        embedder(build("bert"), forward="packed")


@pytest.mark.parametrize(
    ("window", "forward", "padded"),
    [(200, "auto", False), (2000, "auto", True), (2000, "packed", False)],
)
def test_a_window_wider_than_the_check_is_checked_or_not_relied_on(
    window: int, forward: str, padded: bool, build: Build, embedder: Load
) -> None:
    options = {"sliding_window": window, "max_position_embeddings": 4000}
    model = embedder(build("mistral-left", **options), forward=forward)
    assert model.pads is padded
    if padded:
        assert "window of 2000 tokens is too wide to be checked" in model.why_padded


def test_a_window_that_no_text_reaches_is_no_reason_to_pad(build: Build, embedder: Load) -> None:
    assert not embedder(build("mistral-left", sliding_window=2000)).pads


def test_a_text_that_spells_the_padding_keeps_its_positions(build: Build, embedder: Load) -> None:
    texts = ["the cat [PAD] sat", "rain [PAD] [PAD]", "a dog"]
    folder = build("roberta")
    difference = vectors(embedder(folder), texts) - vectors(
        embedder(folder, forward="padded"), texts
    )
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("foreign", ["position_bias", "softcap", "s_aux"])
def test_unsupported_attention_is_refused(foreign: str) -> None:
    part = torch.randn(1, 2, 3, 4)
    setting: dict[str, Any] = {foreign: torch.ones(1)}
    with (
        row_of_texts(Row([3])),
        pytest.raises(attention.NotPackable, match=f"its attention needs {foreign}"),
    ):
        attention.attention(torch.nn.Identity(), part, part, part, None, **setting)
